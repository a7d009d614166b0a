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
from report import NAMES, draw, tables, write_page
from training import (
    OUT_OF_MEMORY,
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
    """What a device trains by default; the long mode has one sequence a step."""

    model: Config
    learning_rate: float
    variants: tuple[str, ...]
    batch: int
    micro_batches: int
    steps: int
    long_variants: tuple[str, ...]
    long_contexts: tuple[int, ...]
    long_steps: int


PRESETS = {
    "cpu": Preset(
        model=Config(vocab_size=256, num_layers=2, num_heads=2),
        learning_rate=3e-3,
        # SDPA's CUDNN and flex_attention's backward do not exist on a CPU.
        variants=("naive", "sdpa", "sdpa_flash", "flash_ext"),
        batch=2,
        micro_batches=2,
        steps=20,
        long_variants=("naive", "sdpa", "flash_ext"),
        long_contexts=(4096, 16384),
        long_steps=2,
    ),
    "cuda": Preset(
        model=Config(),
        learning_rate=6e-4,
        variants=tuple(NAMES),
        batch=16,
        micro_batches=4,
        steps=80,
        long_variants=("naive", "sdpa", "flash_ext"),
        long_contexts=(16384, 65536),
        long_steps=4,
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
        try:
            text = flash_ext.explain(q, q, q, causal=True, backward=name == "backward")
        except RuntimeError:  # a build without kernels for the device: training will say so
            return {}
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

    def find(self, job: Job, kernels: dict) -> dict | None:
        """The row of this job, unless it is of other kernels or failed, but for want of memory."""
        for row in self.content["rows"]:
            if key_of(row) == key_of(vars(job)) and row.get("kernels") == kernels.get("kernels"):
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
    batch, micro_batches, steps = preset.batch, preset.micro_batches, preset.steps
    contexts, variants = (preset.model.context,), preset.variants
    if options.long:
        batch, micro_batches, steps = 1, 1, preset.long_steps
        contexts, variants = preset.long_contexts, preset.long_variants
    return [
        Job(
            variant=variant,
            context=context,
            batch=options.batch or batch,
            micro_batches=options.micro_batches or micro_batches,
            steps=options.steps or steps,
            num_layers=options.layers or preset.model.num_layers,
            num_heads=options.heads or preset.model.num_heads,
            vocab_size=preset.model.vocab_size,
            learning_rate=preset.learning_rate,
            text=text,
        )
        for context in options.contexts or contexts
        for variant in options.variants or variants
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
        kernels = kernels_of(job, options.device)
        row = None if options.again else file.find(job, kernels)
        if row is None:
            try:
                found = apart(run, options.device, job, options.text)
            except RuntimeError as error:  # the process was ended
                found = {"failed": f"{OUT_OF_MEMORY}? {error}"}
            row = vars(job) | found | kernels
            row |= {"ceiling": ceiling, "date": datetime.date.today().isoformat()}
            file.put(meta, row)
            took = row.get("failed") or f"{row['seconds']:.0f} s"
        else:
            took = f"of {row['date']}, in {path}"
        print(f"{where}: {took}", flush=True)
        rows.append(row)
    print(f"{tables(rows)}\nMFU is against the {what}")
    draw(rows, path.with_suffix(".long.png" if options.long else ".png"), meta["device"])
    write_page(path, file.content, what)
    return 0 if any("failed" not in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
