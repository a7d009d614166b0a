"""What has been measured and tested on which device, kept in benchmarks/results.

    python tools/evidence.py run --out DIR   tests/gpu and the bench; writes DIR/<device>.json
                                             (--device cpu: the bench alone)
    python tools/evidence.py merge FILE      a result file from elsewhere into benchmarks/results
    python tools/evidence.py tables          rewrites README.md's and docs/performance.md's tables
    python tools/evidence.py check           warns of rows whose sources have changed and of tables
                                             that differ from the result files; also as --check

Only `run` needs torch and a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- gpu-table:begin -->", "<!-- gpu-table:end -->"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "performance.md"
TITLES = {
    "fwd": "Forward",
    "bwd": "Backward",
    "varlen_fwd": "Forward, packed sequences of many lengths",
    "varlen_bwd": "Backward, packed sequences of many lengths",
    "features_fwd": "Forward, what a feature costs",
    "features_bwd": "Backward, what a feature costs",
    "host_fwd": "Host time of an eager call without gradients",
    "host_fwdbwd": "Host time of an eager call and its backward",
    "rms_error": "RMS error against fp64",
    "max_error": "Largest error against fp64",
    "memory_fwd": "Peak memory above the inputs, forward",
    "memory_bwd": "Peak memory, backward",
}


def load_bench():
    """(results, report) of flash_ext.bench, past flash_ext itself, which needs torch."""
    folder = str(ROOT / "flash_ext")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("bench.results"), importlib.import_module("bench.report")
    finally:
        sys.path.remove(folder)


results, report = load_bench()


# ---- run -----------------------------------------------------------------------------------------


def summary(junit: Path) -> dict:
    """A result file's "tests" out of pytest's JUnit report."""
    cases = ElementTree.parse(junit).getroot().iter("testcase")
    passed, failed, skipped = 0, [], Counter()
    for case in cases:
        outcome = {child.tag: child for child in case}
        if "failure" in outcome or "error" in outcome:
            failed.append(f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}")
        elif "skipped" in outcome:
            skipped[outcome["skipped"].get("message", "")] += 1
        else:
            passed += 1
    return {
        "passed": passed,
        "failed": len(failed),
        "failures": failed[:50],
        "skipped": dict(skipped),
        "date": datetime.date.today().isoformat(),
    }


def run_tests(arguments: list[str]) -> tuple[dict, bool]:
    """tests/gpu in a process of its own: (summary, whether it succeeded and anything ran).

    The summary is {} when pytest did not get as far as a report.
    """
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "--tb=short"]
        command += ["-rf", "-p", "no:cacheprovider", f"--junitxml={junit}", *arguments]
        print("$", *command, flush=True)
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        tests = summary(junit) if junit.exists() else {}
        return tests, code == 0 and tests.get("passed", 0) > 0


def device_of(kind: str) -> tuple[str, dict]:
    """(file name, meta) of the device, as the bench describes it."""
    sys.path.insert(0, str(ROOT))
    import torch

    from flash_ext.bench import __main__ as bench

    device = torch.device(kind)
    meta = bench.describe(device)
    return bench.default_path(device, meta).name, meta


def run(options: argparse.Namespace, rest: list[str]) -> int:
    name, meta = device_of(options.device)
    path = options.out / name
    status = 0
    if options.only != "bench" and options.device != "cpu":  # tests/gpu says nothing of a CPU
        tests, good = run_tests(options.pytest)
        results.merge_into(path, {"meta": meta, "tests": tests, "rows": []})
        print({key: value for key, value in tests.items() if key != "failures"})
        status = 0 if good else 1
    if options.only != "tests":
        command = [sys.executable, "-m", "flash_ext.bench", "--device", options.device]
        command += ["--out", str(path.resolve()), *rest]
        print("$", *command, flush=True)
        status |= subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    return int(status)


# ---- tables --------------------------------------------------------------------------------------


def result_files(folder: Path) -> dict[str, dict]:
    """{device: its result file}, GPUs first."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem == "cpu", path.stem))
    return {path.stem: results.load(path) for path in paths}


def heading(content: dict) -> str:
    """The machine and its libraries, in one line."""
    meta = content["meta"]
    words = [str(meta.get("device", "unknown device"))]
    names = {"torch": "torch", "cuda": "CUDA", "cudnn": "cuDNN", "driver": "driver"}
    words += [f"{shown} {meta[name]}" for name, shown in names.items() if meta.get(name)]
    return ", ".join(words)


def tests_line(content: dict) -> str:
    tests = content["tests"]
    if not tests:
        return ""
    skipped = sum(tests.get("skipped", {}).values())
    counts = f"{tests['passed']} passed, {tests['failed']} failed, {skipped} skipped"
    return f"Tests on this device ({tests['date']}): {counts}.\n"


def unit_note(rows: list[dict]) -> str:
    """The unit, the dates and the ceiling, for above a table."""
    dates = sorted({row["date"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    unit = {"abs": "absolute"}.get(rows[0]["unit"], rows[0]["unit"])
    ceilings = sorted({row["ceiling"] for row in rows if row.get("ceiling")})
    top = f"; ceiling {'–'.join(report.figure(x) for x in ceilings)} {unit}" if ceilings else ""
    if len(ceilings) > 2:
        top = f"; ceiling {report.figure(ceilings[0])}–{report.figure(ceilings[-1])} {unit}"
    ratios = [r for row in rows if (r := report.ratio(row))]
    mean = f"; ours / best, geometric mean {report.geometric_mean(ratios):.2f}" if ratios else ""
    return f"{unit}, {when}{top}{mean}."


def page_tables(files: dict[str, dict]) -> str:
    """docs/performance.md's: every row of every device."""
    parts = []
    for content in files.values():
        parts.append(f"## {heading(content)}\n")
        parts.append(tests_line(content))
        for (mode, _), rows in report.by_mode(content["rows"]).items():
            parts += [f"### {TITLES.get(mode, mode)}\n", unit_note(rows) + "\n"]
            parts.append(report.markdown(rows) + "\n")
    return "\n".join(part for part in parts if part).rstrip() or "Nothing has been measured yet."


def readme_tables(files: dict[str, dict]) -> str:
    """README.md's: dense attention on GPUs, where queries and keys have as many heads."""
    parts = []
    for device, content in files.items():
        if device == "cpu":
            continue
        parts += [f"### {heading(content)}\n", tests_line(content)]
        for (mode, _), rows in report.by_mode(content["rows"]).items():
            chosen = [row for row in rows if row["heads_q"] == row["heads_k"]]
            if mode in ("fwd", "bwd") and chosen:
                parts += [f"{TITLES[mode]}: {unit_note(chosen)}\n", report.markdown(chosen) + "\n"]
    found = "\n".join(part for part in parts if part).rstrip()
    return found or "Nothing has been measured on a GPU yet."


def with_tables(text: str, tables: str, name: str) -> str:
    """text with what is between the markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{name} must hold one {BEGIN} and, after it, one {END}")
    return re.sub(
        f"{re.escape(BEGIN)}.*{re.escape(END)}",
        lambda _: f"{BEGIN}\n{tables}\n{END}",
        text,
        flags=re.DOTALL,
    )


def fresh_pages(folder: Path) -> dict[Path, str]:
    """The two pages as the result files would have them."""
    files = result_files(folder)
    wanted = {README: readme_tables(files), PAGE: page_tables(files)}
    return {
        path: with_tables(path.read_text(encoding="utf-8"), tables, path.name)
        for path, tables in wanted.items()
    }


# ---- check ---------------------------------------------------------------------------------------


def warnings(folder: Path) -> list[str]:
    """What a reader of the figures should know; empty when all are of today's sources."""
    lines = []
    for device, content in result_files(folder).items():
        old = results.stale(content["rows"])
        for kernel in dict.fromkeys(row.get("kernel", "") for row in old):
            rows = [row for row in old if row.get("kernel", "") == kernel]
            modes = ", ".join(dict.fromkeys(row["mode"] for row in rows))
            since = max(row["date"] for row in rows)
            lines.append(
                f"{device}: {len(rows)} rows ({modes}) of {kernel} are older than its sources "
                f"(measured {since})"
            )
    lines += [
        f"{path.name}: the tables differ from the result files; run tools/evidence.py tables"
        for path, text in fresh_pages(folder).items()
        if path.read_text(encoding="utf-8") != text
    ]
    return lines


def check(folder: Path) -> int:
    """Warns; old figures are no error."""
    for line in warnings(folder):
        print(f"warning: {line}")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="the same as the command check")
    commands = parser.add_subparsers(dest="command")
    runs = commands.add_parser("run", help="what follows -- goes to the bench, as in -- --quick")
    runs.add_argument("--out", type=Path, default=results.RESULTS, help="directory to write into")
    runs.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    runs.add_argument("--only", choices=("tests", "bench"), help="one of the two")
    runs.add_argument("--pytest", action="append", default=[], help="an argument for pytest")
    merges = commands.add_parser("merge")
    merges.add_argument("file", type=Path)
    commands.add_parser("tables")
    commands.add_parser("check")
    arguments = list(sys.argv[1:] if argv is None else argv)
    rest: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, rest = arguments[:at], arguments[at + 1 :]
    options = parser.parse_args(arguments)

    if options.command == "run":
        if options.device == "cpu" and (options.only == "tests" or options.pytest):
            parser.error(
                "the tests are a GPU's: with --device cpu leave out --only tests, --pytest"
            )
        return run(options, rest)
    if options.command == "merge":
        content = results.load(options.file)
        if not content["rows"] and not content["tests"]:
            parser.error(f"{options.file} holds no rows and no tests")
        whole = results.merge_into(results.RESULTS / options.file.name, content)
        print(f"{len(content['rows'])} rows merged, {len(whole['rows'])} there now")
        return 0
    if options.command == "tables":
        for path, text in fresh_pages(results.RESULTS).items():
            path.write_text(text, encoding="utf-8")
        return 0
    if options.command == "check" or options.check:
        return check(results.RESULTS)
    parser.print_help()
    return 2


if __name__ == "__main__":
    sys.exit(main())
