"""Trains a small GPT on a text, byte by byte, then the same steps with torch's own attention.

The text is Python's standard library's sources, or `--text FILE`. First flash_ext trains, then
torch's scaled_dot_product_attention from the same seed on the same batches, each in a process of
its own; at the end stand samples of what was learned, a table of both, and what the same step takes
with naive attention. The loss curves go to `--picture`. Exit status 1 when the two final losses
differ by more than 1 %.

    python examples/demo.py
    python examples/demo.py --text book.txt --steps 2000

It runs on a GPU when there is one whose backward flash_ext serves, and on the CPU else.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import flash_ext
from gpt import ATTENTIONS, GPT, Config
from training import (
    MIB,
    Batches,
    PeakMemory,
    Schedule,
    autocast,
    in_fresh_process,
    read_text,
    train,
)

# The numbers below keep the whole demo under 4 minutes on two cores.
CPU = {"context": 512, "num_layers": 3, "num_heads": 2, "steps": 500, "batch": 4}
GPU = {"context": 2048, "num_layers": 4, "num_heads": 8, "steps": 1000, "batch": 16}
HEAD_DIM = 64
TEXT_BYTES = 8 << 20
NAIVE_STEPS = 4
ALLOWED = 0.01  # of a loss
PROMPT = b"def "
NAMES = {"flash_ext": "flash_ext", "sdpa": "torch SDPA", "naive": "naive"}


def choose_device() -> tuple[torch.device, str]:
    """(device, why not the GPU, or nothing)."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), ""
    q = torch.empty(1, 8, 1, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    try:
        text = flash_ext.explain(q, q, q, causal=True, backward=True)
    except RuntimeError as error:
        return torch.device("cpu"), str(error).splitlines()[0]
    if "serves: no kernel" in text:
        return torch.device("cpu"), "flash_ext has no backward kernel for it"
    return torch.device("cuda", 0), ""


def run(which: str, options: argparse.Namespace, steps: int, samples: int) -> dict:
    """Trains with one attention; losses, speed, memory and, where wanted, samples of text."""
    device = torch.device(options.device)
    text, _ = read_text(options.text, TEXT_BYTES)
    config = Config(256, options.context, options.layers, options.heads, HEAD_DIM)
    batches = Batches(text, config.context, device)
    memory = PeakMemory(device)
    torch.manual_seed(options.seed)
    model = GPT(config, ATTENTIONS[which]).to(device)
    how = Schedule(steps, options.batch, seed=options.seed)
    found = train(model, batches, how, NAMES[which], memory).as_dict()
    if which == "naive":
        return found
    with torch.no_grad(), autocast(device):
        found["loss"] = batches.held_out_loss(model, options.batch, options.evaluations)
        generator = torch.Generator().manual_seed(options.seed)
        prompt = torch.tensor([list(PROMPT)], device=device)
        found["samples"] = [
            bytes(model.generate(prompt, options.length, 0.7, generator)[0].tolist())
            for _ in range(samples)
        ]
    return found


def draw(found: dict[str, dict], path: Path) -> None:
    """The loss of each step, smoothed, of both."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.8), layout="constrained")
    for which, style in (("sdpa", {"lw": 4, "alpha": 0.4}), ("flash_ext", {"lw": 1.2})):
        losses = torch.tensor(found[which]["losses"])
        width = max(len(losses) // 50, 1)
        smooth = losses.unfold(0, width, 1).mean(-1)
        steps = torch.arange(width, len(losses) + 1)
        axes.plot(steps.tolist(), smooth.tolist(), label=NAMES[which], **style)
    axes.set(xlabel="step", ylabel="training loss, nats a byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    print(f"picture: {path}")


def print_table(found: dict[str, dict]) -> float:
    """Returns by how much the losses differ, as a share of torch's."""
    columns = [found[which] for which in NAMES]
    rows = {
        "held-out loss, nats a byte": [f"{c['loss']:.4f}" if "loss" in c else "–" for c in columns],
        "tokens/s": [f"{c['tokens_per_second']:.0f}" for c in columns],
        "peak memory, MiB": [f"{c['peak_bytes'] / MIB:.0f}" for c in columns],
        "steps": [str(len(c["losses"])) for c in columns],
    }
    print(f"\n{'':<28}" + "".join(f"{name:>12}" for name in NAMES.values()))
    for title, cells in rows.items():
        print(f"{title:<28}" + "".join(f"{cell:>12}" for cell in cells))
    ours, torchs = found["flash_ext"]["loss"], found["sdpa"]["loss"]
    return abs(ours - torchs) / torchs


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="train on this file instead")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where one serves")
    for name in ("context", "layers", "heads", "batch", "steps"):
        parser.add_argument(f"--{name}", type=int, help="default: by the device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=2, help="how many to write at the end")
    parser.add_argument("--length", type=int, default=240, help="of a sample, in bytes")
    parser.add_argument("--evaluations", type=int, default=20, help="batches of the held-out loss")
    parser.add_argument("--picture", type=Path, default=Path("demo_loss.png"))
    options = parser.parse_args(arguments)
    device, reason = choose_device()
    if reason:
        print(f"the GPU is left alone: {reason}")
    options.device = options.device or device.type
    sizes = GPU if options.device == "cuda" else CPU
    for name in ("context", "batch", "steps"):
        setattr(options, name, getattr(options, name) or sizes[name])
    options.layers = options.layers or sizes["num_layers"]
    options.heads = options.heads or sizes["num_heads"]
    return options


def main(arguments: list[str] | None = None) -> int:
    begin = time.monotonic()
    options = parse_options(arguments)
    text, name = read_text(options.text, TEXT_BYTES)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    threads = f", {torch.get_num_threads()} threads" if options.device == "cpu" else ""
    print(f"flash_ext {flash_ext.__version__}, torch {torch.__version__}, {where}{threads}")
    print(f"text: {len(text)} bytes, {name}")
    print(
        f"model: {options.layers} layers, {options.heads} heads of {HEAD_DIM}, context "
        f"{options.context}; {options.steps} steps of {options.batch} × {options.context} bytes\n"
    )
    found = {}
    for which, steps, samples in (
        ("flash_ext", options.steps, options.samples),
        ("sdpa", options.steps, 0),
        ("naive", min(NAIVE_STEPS, options.steps), 0),
    ):
        found[which] = in_fresh_process(run, which, options, steps, samples)
        losses, seconds = found[which]["losses"], found[which]["seconds"]
        change = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"
        print(f"{NAMES[which]:<11} {len(losses)} steps, {change}, {seconds:.0f} s", flush=True)
    for sample in found["flash_ext"]["samples"]:
        print(f"\n--- a sample\n{sample.decode('utf-8', 'replace')}")
    difference = print_table(found)
    print(f"\nthe held-out losses differ by {100 * difference:.2f} %")
    draw(found, options.picture)
    print(f"{time.monotonic() - begin:.0f} s in all")
    if difference > ALLOWED:
        print(f"more than the {100 * ALLOWED:.0f} % that rounding explains")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
