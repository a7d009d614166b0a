"""What the training examples share: a text, its batches, the loop, and what a run cost."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import multiprocessing
import os
import resource
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpt import GPT

MIB = 2**20
OUT_OF_MEMORY = "out of memory"  # how a reason begins
HELD_OUT = 0.05  # of the text, its end


# ---- text ----------------------------------------------------------------------------------------


def read_text(path: Path | None, limit: int) -> tuple[bytes, str]:
    """At most `limit` bytes of the file, or of the standard library's sources; and their name."""
    if path is not None:
        return path.read_bytes()[:limit], str(path)
    library, parts, size = Path(sysconfig.get_path("stdlib")), [], 0
    for source in sorted(library.rglob("*.py")):
        inside = source.relative_to(library).parts
        if {"site-packages", "dist-packages", "test", "tests"} & set(inside) or size >= limit:
            continue
        parts.append(source.read_bytes())
        size += len(parts[-1])
    name = f"sources of Python {sys.version.split()[0]}'s standard library"
    return b"".join(parts)[:limit], name


def as_tokens(text: bytes) -> Tensor:
    """A byte is a token."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Batches:
    """Random pieces of a text, the same ones for the same seed; the text's end is held out."""

    def __init__(self, text: bytes, context: int, device: torch.device) -> None:
        tokens = as_tokens(text).to(device)
        self.context, self.split = context, int(len(tokens) * (1 - HELD_OUT))
        self.training, self.held_out = tokens[: self.split], tokens[self.split :]
        if len(self.held_out) <= context:
            raise ValueError(
                f"the text has {len(tokens)} bytes; a context of {context} needs at least "
                f"{math.ceil((context + 2) / HELD_OUT)}: take a longer text or a shorter context"
            )

    def _pieces(self, tokens: Tensor, batch: int, generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(tokens) - self.context, (batch, 1), generator=generator)
        index = (starts + torch.arange(self.context)).to(tokens.device)
        return tokens[index], tokens[index + 1]

    def train(self, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless (tokens, targets), (batch, context) each."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield self._pieces(self.training, batch, generator)

    @torch.no_grad()
    def held_out_loss(self, model: GPT, batch: int, count: int) -> float:
        """Mean loss over `count` batches of the text's end, always the same ones."""
        generator = torch.Generator().manual_seed(0)
        pieces = (self._pieces(self.held_out, batch, generator) for _ in range(count))
        return statistics.fmean(model.loss(*piece).item() for piece in pieces)


# ---- what a run costs ----------------------------------------------------------------------------


def _proc_bytes(field: str) -> int:
    """This process's VmRSS (resident), VmHWM (its highest so far) or VmSize (address space)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; the measurement needs Linux")


class PeakMemory:
    """Bytes above what was there at the start: a GPU's by its allocator, else resident memory.

    Memory that a process has freed and kept would hide a later peak, so on a CPU each measurement
    needs a fresh process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
            return
        self.before = _proc_bytes("VmRSS")
        with contextlib.suppress(OSError):  # some containers forbid it: then the peak so far counts
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return max(_proc_bytes("VmHWM") - self.before, 0)


def in_fresh_process(function: Callable, *arguments):
    """function(*arguments) in a process of its own; RuntimeError when the system ends that one."""
    # Threads that wait for each other sleep instead of spinning: beside other work on the same
    # cores spinning takes several times as long. Read when torch loads its OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except concurrent.futures.process.BrokenProcessPool as error:
            raise RuntimeError("the process was ended from outside, for want of memory?") from error


def limit_memory(device: torch.device) -> None:
    """Lets an allocation fail before the system ends this process; a GPU's does so anyway."""
    if device.type == "cpu":
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        limit = _proc_bytes("VmSize") + int(0.8 * 1024 * free)
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))


def out_of_memory(error: Exception) -> bool:
    """torch has a class of its own for a GPU's and a text for a CPU's."""
    is_text = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return is_text or isinstance(error, (torch.OutOfMemoryError, MemoryError))


class ProgressBar:
    """A terminal's last line, written over; nothing where the output is a file."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.begin = label, total, time.monotonic()
        self.active = sys.stderr.isatty()

    def show(self, done: int, text: str) -> None:
        if self.active:
            spent = time.monotonic() - self.begin
            rest = spent / max(done, 1) * (self.total - done)
            bar = ("#" * (24 * done // self.total)).ljust(24, ".")
            line = f"{self.label:<11} [{bar}] {done}/{self.total}  {text}  {rest:.0f} s left"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.active:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# ---- the loop ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """How to train. A step is micro_batches forward and backward passes, then one update."""

    steps: int
    batch: int  # sequences of one pass
    micro_batches: int = 1
    learning_rate: float = 3e-3
    seed: int = 0

    def rate(self, step: int) -> float:
        """A linear rise over the first twentieth, then a cosine down to a tenth."""
        warmup = max(self.steps // 20, 1)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        done = (step - warmup) / max(self.steps - warmup, 1)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@dataclass
class Run:
    """What came of it."""

    losses: list[float]  # of each step, nats a token
    seconds_per_step: float  # median, the first steps left out
    tokens_per_second: float
    peak_bytes: int  # model, gradients, optimizer and activations
    seconds: float

    def as_dict(self) -> dict:
        return asdict(self)


def autocast(device: torch.device):
    """bf16 on a GPU, fp32 on a CPU."""
    on_gpu = device.type == "cuda"
    return torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext()


def train(model: GPT, batches: Batches, how: Schedule, label: str, memory: PeakMemory) -> Run:
    """Trains with AdamW; the same seed and schedule see the same tokens whatever the attention."""
    device = next(model.parameters()).device
    decays = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    pieces = batches.train(how.batch, how.seed)
    losses: list[float] = []
    seconds: list[float] = []
    bar = ProgressBar(label, how.steps)
    start = time.perf_counter()
    for step in range(how.steps):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = how.rate(step)
        total = torch.zeros((), device=device)
        for _ in range(how.micro_batches):
            with autocast(device):
                loss = model.loss(*next(pieces)) / how.micro_batches
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total.item())  # waits for the device
        seconds.append(time.perf_counter() - begin)
        bar.show(step + 1, f"loss {losses[-1]:.3f}")
    bar.clear()
    # The first steps pay for start-up: thread pools, allocation, compilation.
    steady = statistics.median(seconds[min(3, len(seconds) - 1) :])
    tokens = how.batch * how.micro_batches * batches.context
    return Run(losses, steady, tokens / steady, memory.read(), time.perf_counter() - start)
