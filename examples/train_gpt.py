"""Trains a GPT with each attention in turn: the same weights, batches and steps.

    python examples/train_gpt.py                     # every variant, then a table and a figure
    python examples/train_gpt.py --long              # 16k and 64k tokens a sequence
    python examples/train_gpt.py --variants sdpa_flash,flash_ext --steps 200

On a GPU it is GPT-2's smallest size (124 million parameters, bf16 autocast), block 1024, batch 64
in micro-batches; on a CPU a toy, which shows that everything runs. A byte of the text is a token:
of GPT-2's vocabulary 256 rows are ever met, while a step costs what it costs with all of them.

Results go to benchmarks/results/training/<device>.json, one row a variant, written as soon as it
is there: a run that was ended goes on where it stopped, and `--again` measures anew. What fails,
also for want of memory, is a row with its reason. There is no autotuned flash_ext among the
variants, because there is no autotuner.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import flash_ext
from flash_ext.bench import results
from flash_ext.bench.__main__ import describe
from flash_ext.bench.timing import Clock, matmul_ceiling
from gpt import ATTENTIONS, GPT, Config
from training import (
    MIB,
    Batches,
    PeakMemory,
    Schedule,
    in_fresh_process,
    limit_memory,
    out_of_memory,
    read_text,
    train,
)

TEXT_BYTES = 32 << 20
FINAL_STEPS = 5  # whose mean is the final loss
OUT_OF_MEMORY = "out of memory"
NAMES = {
    "naive": "naive",
    "sdpa": "SDPA",
    "sdpa_flash": "SDPA FLASH",
    "sdpa_cudnn": "SDPA CUDNN",
    "flex": "flex_attention",
    "flash_ext": "flash_ext",
}


@dataclass(frozen=True)
class Job:
    """One variant's training; with the device it names a row of the result file."""

    variant: str
    context: int
    batch: int  # sequences of one pass
    micro_batches: int
    steps: int
    num_layers: int
    num_heads: int
    vocab_size: int
    learning_rate: float
    text: str

    def config(self) -> Config:
        return Config(self.vocab_size, self.context, self.num_layers, self.num_heads)


@dataclass(frozen=True)
class Preset:
    """What a device trains by default."""

    variants: tuple[str, ...]
    long_variants: tuple[str, ...]
    long_contexts: tuple[int, ...]
    num_layers: int
    num_heads: int
    vocab_size: int
    context: int
    batch: int
    micro_batches: int
    steps: int
    long_steps: int
    learning_rate: float


PRESETS = {
    # SDPA's CUDNN and flex_attention's backward do not exist on a CPU.
    "cpu": Preset(
        ("naive", "sdpa", "sdpa_flash", "flash_ext"),
        ("naive", "sdpa", "flash_ext"),
        *((4096, 16384), 2, 2, 256, 1024, 2, 2, 20, 2, 3e-3),
    ),
    "cuda": Preset(
        tuple(NAMES),
        ("naive", "sdpa", "flash_ext"),
        *((16384, 65536), 12, 12, 50304, 1024, 16, 4, 80, 4, 6e-4),
    ),
}


# ---- running -------------------------------------------------------------------------------------


def run(device_name: str, job: Job, text: Path | None) -> dict:
    """Trains; the row's figures, or {"failed": why}."""
    device = torch.device(device_name)
    try:
        limit_memory(device)
        config = job.config()
        batches = Batches(read_text(text, TEXT_BYTES)[0], job.context, device)
        memory = PeakMemory(device)
        torch.manual_seed(0)
        model = GPT(config, ATTENTIONS[job.variant]).to(device)
        how = Schedule(job.steps, job.batch, job.micro_batches, job.learning_rate)
        found = train(model, batches, how, NAMES[job.variant], memory)
    except Exception as error:  # whatever a variant raises is its result
        if out_of_memory(error):
            return {"failed": OUT_OF_MEMORY}
        lines = str(error).strip().splitlines() or [""]
        return {"failed": f"{type(error).__name__}: {lines[0]}"[:200]}
    return found.as_dict() | {
        "final_loss": statistics.fmean(found.losses[-FINAL_STEPS:]),
        "tflops": config.flops_per_token * found.tokens_per_second / 1e12,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def measure_ceiling(device_name: str) -> tuple[str, float]:
    return matmul_ceiling(Clock(torch.device(device_name)))


def apart(function: Callable, device_name: str, *arguments):
    """function(device_name, …); on a CPU in a process of its own, whose memory is then its own."""
    if device_name == "cpu":
        return in_fresh_process(function, device_name, *arguments)
    try:
        return function(device_name, *arguments)
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def kernels_of(job: Job, device: str) -> dict:
    """The kernels that serve flash_ext, with a fingerprint of their sources."""
    if job.variant != "flash_ext":
        return {}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = torch.empty(1, 1, job.num_heads, Config.head_dim, dtype=dtype, device=device)
    served = {}
    for name in ("forward", "backward"):
        text = flash_ext.explain(q, q, q, causal=True, backward=name == "backward")
        kernel = text.split("serves: ")[1].split("\n")[0]
        served[name] = {"kernel": kernel, "sources": results.fingerprint(kernel)}
    return {"kernels": served}


# ---- the result file -----------------------------------------------------------------------------


def key_of(row: dict) -> tuple:
    return tuple(row.get(name) for name in Job.__dataclass_fields__)


class ResultFile:
    """{"meta": …, "rows": […]}, written whole after every row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = json.loads(path.read_text()) if path.exists() else {"meta": {}, "rows": []}

    def find(self, job: Job) -> dict | None:
        """The row of this job; one that failed for another reason than memory is tried again."""
        for row in self.content["rows"]:
            if key_of(row) == key_of(vars(job)):
                failed = row.get("failed", OUT_OF_MEMORY)
                return row if failed.startswith(OUT_OF_MEMORY) else None
        return None

    def put(self, meta: dict, row: dict) -> None:
        others = [old for old in self.content["rows"] if key_of(old) != key_of(row)]
        self.content = {"meta": self.content["meta"] | meta, "rows": [*others, row]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".json.new")
        beside.write_text(json.dumps(self.content, indent=1, ensure_ascii=False) + "\n")
        beside.replace(self.path)


# ---- what it shows -------------------------------------------------------------------------------


def cells_of(row: dict, ceiling: float) -> list[str]:
    if "failed" in row:
        return [row["failed"]]
    return [
        f"{row['final_loss']:.4f}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['tflops']:.3g}",
        f"{100 * row['tflops'] / ceiling:.0f} %",
        f"{row['peak_bytes'] / MIB:.0f}",
    ]


def print_tables(rows: list[dict], ceiling: float) -> None:
    """One a context; MFU is against the device's own matrix product, measured in this run."""
    for context in sorted({row["context"] for row in rows}):
        here = [row for row in rows if row["context"] == context]
        batch = here[0]["batch"] * here[0]["micro_batches"]
        print(f"\ncontext {context}, batch {batch}, {here[0]['steps']} steps")
        header = ("final loss", "tokens/s", "TFLOP/s", "MFU", "peak MiB")
        print(f"{'':<16}" + "".join(f"{name:>12}" for name in header))
        for row in here:
            cells = "".join(f"{cell:>12}" for cell in cells_of(row, ceiling))
            print(f"{NAMES[row['variant']]:<16}" + cells)


def draw_bars(axes, rows: list[dict], key: str, unit: float, colours: dict[str, str]) -> None:
    """A group of bars a context, a bar a variant; what failed is an empty place with its reason."""
    contexts = sorted({row["context"] for row in rows})
    width = 1 / (len(colours) + 1)
    for row in rows:
        place = contexts.index(row["context"]) + width * list(colours).index(row["variant"])
        height = row.get(key, 0) / unit
        bar = axes.bar(place, height, 0.9 * width, color=colours[row["variant"]])
        failed = row.get("failed", "")
        reason = OUT_OF_MEMORY if failed.startswith(OUT_OF_MEMORY) else "failed"
        text = reason if failed else f"{height:.3g}"
        axes.bar_label(bar, [text], rotation=90, padding=3, fontsize="small")
    middle = width * (len(colours) - 1) / 2
    axes.set_xticks([i + middle for i in range(len(contexts))], [f"context {n}" for n in contexts])
    axes.margins(y=0.3)


def draw_losses(axes, rows: list[dict], colours: dict[str, str]) -> None:
    """The curves of the shortest context; the legend has every variant."""
    context = min(row["context"] for row in rows)
    curves = {r["variant"]: r.get("losses", []) for r in rows if r["context"] == context}
    for variant, colour in colours.items():
        losses = curves.get(variant, [])
        axes.plot(range(1, len(losses) + 1), losses, color=colour, label=NAMES[variant], lw=1.2)
    axes.set(title=f"training loss, context {context}", xlabel="step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def draw(rows: list[dict], path: Path, title: str) -> None:
    """Speed, loss and memory side by side."""
    try:
        import matplotlib
    except ImportError:
        print("no figure: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    variants = list(dict.fromkeys(row["variant"] for row in rows))
    colours = {name: f"C{list(NAMES).index(name)}" for name in variants}
    figure, (speed, loss, memory) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    draw_bars(speed, rows, "tokens_per_second", 1e3, colours)
    speed.set(title="thousand tokens/s")
    draw_losses(loss, rows, colours)
    draw_bars(memory, rows, "peak_bytes", 1 << 30, colours)
    memory.set(title="peak memory, GiB")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"figure: {path}")


# ---- the command ---------------------------------------------------------------------------------


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    def names(text: str) -> tuple[str, ...]:
        wrong = [name for name in text.split(",") if name not in NAMES]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(NAMES)}")
        return tuple(text.split(","))

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where one is")
    parser.add_argument("--variants", type=names, help=f"of {','.join(NAMES)}")
    parser.add_argument("--long", action="store_true", help="long contexts, one sequence a step")
    parser.add_argument("--contexts", type=numbers, help="instead of the preset's")
    for name in ("steps", "batch", "micro-batches", "layers", "heads"):
        parser.add_argument(f"--{name}", type=int, help="instead of the preset's")
    parser.add_argument("--text", type=Path, help="train on this file instead of Python's sources")
    parser.add_argument("--out", type=Path, help="result file; the figure goes beside it")
    parser.add_argument("--again", action="store_true", help="measure what is there already too")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return options


def plan(options: argparse.Namespace, text: str) -> list[Job]:
    """The options over the device's preset."""
    preset = PRESETS[options.device]
    long = options.long
    contexts = options.contexts or (preset.long_contexts if long else (preset.context,))
    variants = options.variants or (preset.long_variants if long else preset.variants)
    return [
        Job(
            variant=variant,
            context=context,
            batch=options.batch or (1 if long else preset.batch),
            micro_batches=options.micro_batches or (1 if long else preset.micro_batches),
            steps=options.steps or (preset.long_steps if long else preset.steps),
            num_layers=options.layers or preset.num_layers,
            num_heads=options.heads or preset.num_heads,
            vocab_size=preset.vocab_size,
            learning_rate=preset.learning_rate,
            text=text,
        )
        for context in contexts
        for variant in variants
    ]


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    text, name = read_text(options.text, TEXT_BYTES)
    device = torch.device(options.device)
    meta = describe(device)
    slug = "cpu" if options.device == "cpu" else results.device_slug(meta["device"])
    path = options.out or results.RESULTS / "training" / f"{slug}.json"
    file = ResultFile(path)
    what, ceiling = apart(measure_ceiling, options.device)
    jobs = plan(options, name)
    print(f"{meta['device']}, torch {meta['torch']}; {what}: {ceiling:.3g} TFLOP/s")
    print(f"text: {len(text)} bytes, {name}")
    rows = []
    for number, job in enumerate(jobs, 1):
        where = f"[{number}/{len(jobs)}] {NAMES[job.variant]}, context {job.context}"
        row = None if options.again else file.find(job)
        if row is None:
            try:
                found = apart(run, options.device, job, options.text)
            except RuntimeError as error:  # the process was ended
                found = {"failed": f"{OUT_OF_MEMORY}? {error}"}
            row = vars(job) | found | kernels_of(job, options.device)
            row |= {"ceiling": ceiling, "date": datetime.date.today().isoformat()}
            file.put(meta, row)
            took = row.get("failed") or f"{row['seconds']:.0f} s"
        else:
            took = f"of {row['date']}, in {path}"
        print(f"{where}: {took}", flush=True)
        rows.append(row)
    print_tables(rows, ceiling)
    draw(rows, path.with_suffix(".long.png" if options.long else ".png"), meta["device"])
    return 0 if any("failed" not in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
