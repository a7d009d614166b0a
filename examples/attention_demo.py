"""Attention over a real text: right against naive attention, then time and memory of both.

A small untrained transformer (bytes in, causal attention with ALiBi and grouped key heads) reads
Python's own standard-library sources, or `--text FILE`. First every layer's attention and its
gradients are compared with naive attention in fp64 on the same inputs; a miss ends the program
with exit status 1. Then one attention, forward and backward, is timed and its memory measured for
growing context, each in a fresh process. The table goes to the terminal and, when matplotlib is
there, a picture to `--picture`.

    python examples/attention_demo.py
    python examples/attention_demo.py --text book.txt --dtype bfloat16 --contexts 1024 4096 16384
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash_ext

NUM_LAYERS, NUM_HEADS, NUM_HEADS_K, HEAD_DIM = 3, 4, 2, 64
WIDTH = NUM_HEADS * HEAD_DIM
CHECK_CONTEXT = 1024
MIB = 2**20

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# ---- the two attentions: q (1, seqlen, 4, 64), k and v (1, seqlen, 2, 64), slopes (4,) -----------


def flash_attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """flash_ext: tiles of the scores live in cache, none is ever stored."""
    return flash_ext.attention(q, k, v, alibi_slopes=slopes, causal=True)


def naive_attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """The textbook: scores and probabilities, (1, 4, seqlen, seqlen) each, written out in full."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    position = torch.arange(q.shape[2])
    distance = position[:, None] - position[None, :]
    bias = (-slopes[:, None, None] * distance.abs()).masked_fill(distance < 0, -math.inf)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias.to(q.dtype)
    return (scores.softmax(dim=-1) @ v).transpose(1, 2)


# ---- the model ---------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm attention and MLP over hidden states (1, seqlen, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (NUM_HEADS + 2 * NUM_HEADS_K) * HEAD_DIM, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.qkv(self.norm_attention(hidden)).unflatten(-1, (-1, HEAD_DIM))
        return packed.split([NUM_HEADS, NUM_HEADS_K, NUM_HEADS_K], dim=2)

    def forward(self, hidden: Tensor, attend: Attend, slopes: Tensor) -> Tensor:
        hidden = hidden + self.project(attend(*self.heads(hidden), slopes).flatten(2))
        return hidden + self.mlp(self.norm_mlp(hidden))


class ByteTransformer(nn.Module):
    """Bytes (1, seqlen) to logits (1, seqlen, 256), untrained, the same weights in every run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.register_buffer("slopes", 2.0 ** (-8.0 * torch.arange(1, NUM_HEADS + 1) / NUM_HEADS))

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, attend, self.slopes)
        return F.linear(hidden, self.embed.weight)


def read_text(path: Path | None, size: int) -> tuple[bytes, str]:
    """The first `size` bytes of the file or of the standard library's sources, and their name."""
    if path is not None:
        return path.read_bytes()[:size], str(path)
    text = b""
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(text) >= size:
            break
        text += source.read_bytes()
    return text[:size], f"sources of Python {sys.version.split()[0]}'s standard library"


def as_tokens(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unsqueeze(0)


# ---- is it right? --------------------------------------------------------------------------------


@torch.enable_grad()
def out_and_grads(
    attend: Attend, inputs: list[Tensor], slopes: Tensor, dout: Tensor
) -> list[Tensor]:
    """out, dq, dk, dv of one attention over inputs q, k, v."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves, slopes)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def tolerance(ref: Tensor, naive_error: float, dtype: torch.dtype) -> float:
    """The rule of the library's tests, for one tensor whose exact value is ref (fp64).

    fp32: 1e-5 of the largest row's norm. Narrower: twice the error of the same math done step by
    step in that dtype, plus the dtype's rounding near the result.
    """
    if dtype == torch.float32:
        return 1e-5 * ref.norm(dim=-1).max().item()
    rounded = ref.to(dtype)
    return 2 * naive_error + 2 * (rounded + 0.3 - 0.3 - rounded).abs().max().item()


def check(model: ByteTransformer, tokens: Tensor) -> bool:
    """Prints flash_ext's and naive attention's largest errors against fp64, layer by layer."""
    layers: list[list[Tensor]] = []

    def recording_attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        layers.append([q, k, v])
        return flash_attend(q, k, v, slopes)

    with torch.no_grad():
        logits = model(tokens, recording_attend)
        difference = (logits - model(tokens, naive_attend)).abs().max() / logits.abs().max()

    right = True
    print("largest error against fp64:")
    print(f"{'layer':>8} {'tensor':>6} {'flash_ext':>10} {'naive':>10} {'tolerance':>10}")
    for layer, inputs in enumerate(layers):
        dtype = inputs[0].dtype
        seeded = torch.Generator().manual_seed(layer)
        dout = torch.randn(inputs[0].shape, generator=seeded).to(dtype)
        flash = out_and_grads(flash_attend, inputs, model.slopes, dout)
        naive = out_and_grads(naive_attend, inputs, model.slopes, dout)
        wide = [x.double() for x in inputs]
        exact = out_and_grads(naive_attend, wide, model.slopes.double(), dout.double())
        for name, a, b, ref in zip(("out", "dq", "dk", "dv"), flash, naive, exact, strict=True):
            error, naive_error = ((x.double() - ref).abs().max().item() for x in (a, b))
            allowed = tolerance(ref, naive_error, dtype)
            passed = error <= allowed  # False for NaN
            right &= passed
            numbers = f"{error:10.1e} {naive_error:10.1e} {allowed:10.1e}"
            print(f"{layer:>8} {name:>6} {numbers}  {'ok' if passed else 'FAILED'}")
    print(
        f"logits of the whole model: flash_ext and naive differ by {difference:.1e} of the largest"
    )
    print()
    return right


# ---- what does it cost? --------------------------------------------------------------------------


def proc_bytes(file: str, field: str) -> int:
    """A figure of Linux's /proc in bytes; VmRSS is resident now, VmHWM its highest value so far."""
    for line in Path("/proc", file).read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{file} has no {field}; the measurement needs Linux")


def measure(which: str, context: int, dtype: torch.dtype, text: Path | None) -> dict[str, float]:
    """Milliseconds and peak bytes of one attention, forward and backward, in this process.

    The peak counts the memory that had to be made resident beyond what was before the call: result,
    gradients, saved tensors and scratch, whoever allocated them. (Torch's own allocation events
    would miss what a library allocates without torch.) Freed memory that the process keeps would
    hide a later peak, so each measurement has a fresh process, and only its first call counts.
    """
    model = ByteTransformer().to(dtype)
    tokens = as_tokens(read_text(text, context)[0])
    with torch.no_grad():
        inputs = [x.contiguous() for x in model.blocks[0].heads(model.embed(tokens))]
    dout = torch.randn_like(inputs[0])
    # Thread pools and code that loads on first use are not the context's cost.
    small = [x[:, :64].contiguous() for x in inputs]
    out_and_grads(METHODS[which], small, model.slopes, dout[:, :64])

    try:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew from VmRSS
        before = proc_bytes("self/status", "VmRSS")
    except OSError:  # some containers forbid it
        before = proc_bytes("self/status", "VmHWM")
    seconds = []
    # The first call also pays for fresh pages; the quick ones are repeated and the best is kept.
    while sum(seconds) < 0.5:
        start = time.perf_counter()
        out_and_grads(METHODS[which], inputs, model.slopes, dout)
        seconds.append(time.perf_counter() - start)
        if len(seconds) == 1:
            peak = proc_bytes("self/status", "VmHWM") - before
    return {"ms": 1e3 * min(seconds), "mib": max(peak, 0) / MIB}


def why_not(which: str, context: int, options: argparse.Namespace) -> str:
    """The reason to leave this measurement out, or an empty string."""
    if which != "naive":
        return ""
    # Scores, probabilities and what the backward makes of them: 3.6 at once, measured at 8192.
    need = 3.6 * NUM_HEADS * context**2 * getattr(torch, options.dtype).itemsize
    if context > options.naive_limit or need > proc_bytes("meminfo", "MemAvailable") // 2:
        return f"~{need / MIB:.0f}"
    return ""


def in_fresh_process(which: str, context: int, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", which, "--contexts", str(context)]
    command += ["--dtype", options.dtype]
    command += ["--text", str(options.text)] if options.text else []
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(answer.stdout)


def show_progress(done: int, total: int, label: str) -> None:
    """A bar in a terminal's last line, wiped when done; nothing when the output is a file."""
    if sys.stderr.isatty():
        bar = ("#" * (24 * done // total)).ljust(24, ".")
        line = f"[{bar}] {done}/{total} {label}" if done < total else ""
        print(f"{line:<72}", end="\r", file=sys.stderr, flush=True)


def compare(options: argparse.Namespace) -> list[dict]:
    """Measures both methods for every context; prints a row for each and returns the rows."""
    print("one attention, forward + backward:")
    print(f"{'':>8} | {'time, ms':^27} | {'peak memory, MiB':^27}")
    columns = f"{'naive':>9} {'flash_ext':>9} {'ratio':>7}"
    print(f"{'context':>8} | {columns} | {columns}")
    jobs = [(context, which) for context in options.contexts for which in METHODS]
    rows: list[dict] = []
    for done, (context, which) in enumerate(jobs):
        if not rows or rows[-1]["context"] != context:
            rows.append({"context": context})
        row = rows[-1]
        show_progress(done, len(jobs), f"{which}, context {context}")
        row[which] = why_not(which, context, options) or in_fresh_process(which, context, options)
        if len(row) == 1 + len(METHODS):
            show_progress(len(jobs), len(jobs), "")
            print(f"{context:>8} | {cells(row, 'ms')} | {cells(row, 'mib')}", flush=True)
    if any(isinstance(row["naive"], str) for row in rows):
        print("~: naive attention was not run, by --naive-limit or for want of memory; an estimate")
    print()
    return rows


def cells(row: dict, unit: str) -> str:
    naive, flash = row["naive"], row["flash_ext"][unit]
    if isinstance(naive, str):
        return f"{naive if unit == 'mib' else '-':>9} {flash:9.1f} {'':>7}"
    return f"{naive[unit]:9.1f} {flash:9.1f} {naive[unit] / max(flash, 0.1):6.1f}x"


def draw(rows: list[dict], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    contexts = [row["context"] for row in rows]
    shown = {"mib": "peak memory, MiB", "ms": "time, ms"}
    for axes, (unit, title) in zip(panels, shown.items(), strict=True):
        for which in METHODS:
            points = [(r["context"], r[which][unit]) for r in rows if isinstance(r[which], dict)]
            axes.plot(*zip(*points, strict=True), marker="o", label=which)
        axes.set(xscale="log", yscale="log", xlabel="context, bytes of text", title=title)
        axes.set_xticks(contexts, [str(context) for context in contexts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.suptitle("One attention, forward + backward")
    figure.savefig(path, dpi=130)
    print(f"picture: {path}")


METHODS: dict[str, Attend] = {"naive": naive_attend, "flash_ext": flash_attend}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="read this file instead of Python's own sources")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    contexts = [512, 1024, 2048, 4096, 8192, 16384]
    parser.add_argument("--contexts", type=int, nargs="+", default=contexts, help="in bytes")
    parser.add_argument("--naive-limit", type=int, default=8192, help="largest context of naive")
    parser.add_argument("--picture", type=Path, default=Path("attention_memory.png"))
    parser.add_argument("--measure", choices=METHODS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    dtype = getattr(torch, options.dtype)
    if options.measure:
        print(json.dumps(measure(options.measure, options.contexts[0], dtype, options.text)))
        return 0

    text, name = read_text(options.text, max(options.contexts))
    options.contexts = sorted(n for n in options.contexts if 0 < n <= len(text))
    if not options.contexts:
        sys.exit(f"{name} has {len(text)} bytes: no context of --contexts fits")
    print(
        f"flash_ext {flash_ext.__version__}, torch {torch.__version__}, {options.dtype}, "
        f"{torch.get_num_threads()} threads"
    )
    print(f"text: {len(text)} bytes, {name}")
    print(
        f"model: {NUM_LAYERS} layers, {NUM_HEADS} query heads on {NUM_HEADS_K} key heads of "
        f"{HEAD_DIM}, causal, ALiBi; untrained\n"
    )
    if not check(ByteTransformer().to(dtype), as_tokens(text[:CHECK_CONTEXT])):
        print("flash_ext is outside the tolerance")
        return 1
    draw(compare(options), options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
