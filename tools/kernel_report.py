"""Builds the GPU kernels of every architecture and reports what each one uses.

    python tools/kernel_report.py                          every architecture, full
    python tools/kernel_report.py --archs sm80,sm90        some
    python tools/kernel_report.py --only bf16              kernels whose name contains this
    python tools/kernel_report.py --write docs/kernels.md  keeps the report

Registers and spills are ptxas' own words; shared memory is what the launch asks for. Needs a
CUDA toolkit, no GPU. Exit status 1 when a kernel spills more than the budget below, or when ptxas
says that it runs wgmma products one after the other.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import native_build

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "kernels"

# Bytes of spill stores that a kernel may have: the fastest tiles leave no register for strides,
# lengths and pointers; docs/performance.md says more.
SPILL_BUDGET = 256

# Kernels compiled for each kind of score, with and without dropout.
MAINLOOPS = ("fwd", "bwd", "decode")

COMPILED = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?P<target>sm_\w+)'")
SPILLS = re.compile(r"(?P<spills>\d+) bytes spill stores")
# ptxas' notes C7508 to C7520: a register budget is ignored, or products are serialised.
SERIALISED = re.compile(r"\(C75(?:08|1\d|20)\).*|.*serialized.*")
REGISTERS = re.compile(r"Used (?P<registers>\d+) registers")
ENTRY = re.compile(r"\d(?P<entry>(?:fwd|bwd|decode|append|rotary)\w*?)_kernel")
SMEM = re.compile(r"Li(?P<smem>\d+)EEEvNS")  # the last template argument of a mainloop's kernel


@dataclass
class Usage:
    """One compiled entry function."""

    arch: str
    unit: str
    variant: str
    registers: int
    spills: int
    smem: int


def variant_of(mangled: str) -> str:
    """Which of a unit's kernels and instances this is, from its name and template arguments."""
    entry = match["entry"] if (match := ENTRY.search(mangled)) else mangled
    if match := re.search(r"combine_kernelI.*Li(\d+)ELi\d+ELi\d+EEEvNS", mangled):
        return f"combine, {match[1]} rows"
    if entry not in MAINLOOPS:
        return entry.removeprefix("bwd_")  # a side kernel of the backward
    score = "modified" if "ScoreKindE1" in mangled else "plain"
    dropout = " + dropout" if "DropoutKindE1" in mangled else ""
    match = re.search(r"DecodeTraitsI.*ELi\d+ELi\d+ELi(\d+)EL", mangled)
    rows = f", {match[1]} rows" if match else ""
    pages = ", pages" if "KeysKindE1" in mangled else ""
    return score + dropout + rows + pages


def parse_log(arch: str, unit: str, log: str) -> list[Usage]:
    """ptxas -v of one translation unit, entry functions only."""
    rows: list[Usage] = []
    mangled, spills = "", 0
    for line in log.splitlines():
        if match := COMPILED.search(line):
            mangled = match["name"]
        elif match := SPILLS.search(line):
            spills = int(match["spills"])
        elif (match := REGISTERS.search(line)) and mangled:
            variant = variant_of(mangled)
            smem = SMEM.search(mangled) if variant.startswith(("plain", "modified")) else None
            rows.append(
                Usage(
                    arch,
                    unit,
                    variant,
                    int(match["registers"]),
                    spills,
                    int(smem["smem"]) if smem else 0,
                )
            )
            mangled = ""
    return rows


def serialised(log: str) -> list[str]:
    """What ptxas says against the wgmma kernels of a unit."""
    return [match[0] for line in log.splitlines() if (match := SERIALISED.search(line))]


def build(arch: str) -> tuple[list[Usage], list[str], float, int]:
    """(usage of every kernel, ptxas' complaints, seconds, bytes of the library)."""
    directory = BUILD / arch
    library = directory / "_C_cuda.abi3.so"
    started = time.monotonic()
    native_build.build_cuda_library(directory, library, [arch])
    seconds = time.monotonic() - started
    rows, complaints = [], []
    for unit in sorted(
        (directory / "generated").glob("*.cu")
    ):  # those of this build, no older logs
        log = directory / "objects" / f"{unit.stem}.o.log"
        rows += parse_log(arch, unit.stem, log.read_text())
        complaints += [f"{unit.stem}: {text[:200]}" for text in serialised(log.read_text())]
    return rows, complaints, seconds, library.stat().st_size


def markdown(rows: list[Usage], sizes: dict[str, int]) -> str:
    lines = [
        "# Kernels, as compiled",
        "",
        "Made by `make kernels-all`. Spills are bytes of spill stores.",
        "",
        "| architecture | library, MB |",
        "| --- | --- |",
        *(f"| {arch} | {size / 1e6:.1f} |" for arch, size in sizes.items()),
        "",
        "| kernel | instance | registers | spills | shared memory, KB |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {r.unit} | {r.variant} | {r.registers} | {r.spills} | {r.smem / 1024:.0f} |"
            for r in rows
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    manifest = native_build.load_manifest()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archs", default=",".join(manifest.GPU_SMEM_KB))
    parser.add_argument("--only", default="", help="keep kernels whose name contains this")
    parser.add_argument("--write", type=Path, help="keep the report as Markdown")
    args = parser.parse_args()
    if args.only:
        os.environ["FLASH_EXT_ONLY"] = args.only
    all_rows: list[Usage] = []
    all_complaints: list[str] = []
    sizes: dict[str, int] = {}
    for arch in args.archs.split(","):
        rows, complaints, seconds, size = build(arch)
        all_rows += rows
        all_complaints += complaints
        sizes[arch] = size
        worst = max(rows, key=lambda row: row.spills)
        print(
            f"{arch}: {len(rows)} kernels, {size / 1e6:.1f} MB, {seconds:.0f} s, "
            f"at most {worst.spills} bytes spilled ({worst.unit}, {worst.variant})",
            flush=True,
        )
    if args.write:
        args.write.write_text(markdown(all_rows, sizes))
    over = [row for row in all_rows if row.spills > SPILL_BUDGET]
    for row in over:
        print(f"{row.unit}, {row.variant}: {row.spills} bytes spilled, above {SPILL_BUDGET}")
    print("\n".join(all_complaints), end="\n" if all_complaints else "")
    return 1 if over or all_complaints else 0


if __name__ == "__main__":
    raise SystemExit(main())
