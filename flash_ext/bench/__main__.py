"""The command: `python -m flash_ext.bench --device cuda --mode fwd,host`."""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from pathlib import Path

import torch

import flash_ext

from . import grid, peers, report, results
from .measure import Bench
from .timing import matmul_ceiling


def _list(allowed=None, kind=str):
    """An argparse type: comma-separated values."""

    def parse(text: str) -> tuple:
        values = tuple(kind(part) for part in text.split(",") if part)
        wrong = [value for value in values if allowed and value not in allowed]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(allowed)}")
        return values

    return parse


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flash_ext.bench", description=__doc__)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda where there is one"
    )
    parser.add_argument(
        "--mode", type=_list(grid.MODES), help="any of " + ",".join(grid.MODES) + "; default all"
    )
    parser.add_argument(
        "--head-dim",
        type=_list(kind=int),
        default=(),
        help="instead of the grid's; gqa, varlen and features take one, 128 or else the first, "
        "memory takes two",
    )
    parser.add_argument("--seqlen", type=_list(kind=int), default=(), help="instead of the grid's")
    parser.add_argument(
        "--peers",
        type=_list(peers.NAMES),
        help="only these peers, of " + ",".join(peers.NAMES) + "; default all, none: ''",
    )
    parser.add_argument("--quick", action="store_true", help="few points, no slow peers")
    parser.add_argument(
        "--out",
        type=Path,
        help="result file that the rows are merged into; default benchmarks/results/<device>.json",
    )
    parser.add_argument("--compare", type=Path, help="an older result file to compare ours with")
    parser.add_argument("--figures", type=Path, help="directory for PNGs")
    options = parser.parse_args(argv)
    for flag, given, fixed in (
        ("--head-dim", options.head_dim, grid.FIXED_HEAD_DIM),
        ("--seqlen", options.seqlen, grid.FIXED_SEQLEN),
    ):
        unused = [mode for mode in options.mode or () if mode in fixed]
        if given and unused:
            parser.error(f"{flag} has no meaning for --mode {','.join(unused)}: leave one out")
    if options.figures and options.mode and not set(options.mode) & {"fwd", "bwd"}:
        parser.error("--figures draws --mode fwd and bwd alone: add one, or leave it out")
    return options


def driver_version() -> str:
    """The GPU driver's, as nvidia-smi says; "" when it does not."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.split("\n")[0].strip()


def cpu_name() -> str:
    """The processor's name, where Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "cpu"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "cpu"


def describe(device: torch.device) -> dict:
    """A result file's meta."""
    meta = {"torch": torch.__version__, "flash_ext": flash_ext.__version__}
    if device.type == "cuda":
        version = torch.backends.cudnn.version() or 0
        return meta | {
            "device": torch.cuda.get_device_name(device),
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "cudnn": f"{version // 10000}.{version // 100 % 100}.{version % 100}",
        }
    threads = torch.get_num_threads()
    return meta | {"device": f"{cpu_name()}, {threads} threads", "driver": "", "cuda": ""}


def default_path(device: torch.device, meta: dict) -> Path:
    name = "cpu" if device.type == "cpu" else results.device_slug(meta["device"])
    return results.RESULTS / f"{name}.json"


class Progress:
    """A line that is written over on a terminal; nothing elsewhere."""

    def __init__(self, total: int):
        self.total, self.done, self.begin = total, 0, time.monotonic()
        self.active = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if self.active:
            spent = time.monotonic() - self.begin
            bar = "#" * (20 * self.done // max(self.total, 1))
            line = f"[{bar:<20}] {self.done}/{self.total} {spent:.0f} s {text}"
            print(f"\r\033[K{line[:110]}", end="", file=sys.stderr, flush=True)

    def step(self) -> None:
        self.done += 1

    def clear(self) -> None:
        if self.active:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        print("this torch sees no CUDA device; use --device cpu", file=sys.stderr)
        return 2
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    meta = describe(device)
    path = options.out or default_path(device, meta)
    old = results.load(options.compare)["rows"] if options.compare else []

    only = options.peers
    if only is None and options.quick:
        only = ("fa2", "cudnn", "sdpa_flash")
    bench = Bench(device, only)
    what, ceiling = matmul_ceiling(bench.clock)
    bench.ceiling = ceiling
    meta |= {"ceiling": what, "date": datetime.date.today().isoformat()}
    print(f"{meta['device']}, torch {meta['torch']}; {what}: {report.figure(ceiling)} TFLOP/s")

    modes = options.mode or grid.MODES
    if kind == "cpu" and options.mode is None:
        modes = tuple(mode for mode in modes if mode != "memory")
    plan = {m: grid.groups(m, kind, options.quick, options.head_dim, options.seqlen) for m in modes}
    progress = Progress(sum(map(len, plan.values())))
    found: list[dict] = []
    for mode, groups in plan.items():
        begin, rows = time.monotonic(), []
        for group in groups:
            progress.show(str(group[0]))
            rows += bench.measure(group)
            progress.step()
            # Written after every group: a run that is ended keeps what it has.
            results.merge_into(path, {"meta": meta, "rows": rows})
        progress.clear()
        spent = f"{time.monotonic() - begin:.0f} s"
        for (name, unit), some in report.by_mode(rows).items():
            report.print_table(some, f"{name}, {unit} ({spent} for {mode})")
        found += rows
    report_failures(bench.failures)
    for line in report.compare(old, found):
        print(line)
    if options.figures:
        for picture in report.figures(found, options.figures, meta["device"]):
            print(picture)
    print(f"{len(found)} rows merged into {path}")
    return 0 if found else 1


def report_failures(failures: dict[str, str]) -> None:
    """Who is missing and why, the same reasons together."""
    reasons: dict[str, list[str]] = {}
    for who, reason in failures.items():
        reasons.setdefault(reason, []).append(who)
    for reason, who in reasons.items():
        more = f" and {len(who) - 2} more" if len(who) > 2 else ""
        print(f"missing: {'; '.join(who[:2])}{more}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
