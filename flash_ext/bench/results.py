"""Result files: what a row holds, which row replaces which, and whether its sources have changed.

A result file is {"meta": {device, driver, torch, cuda, …}, "tests": {…}, "rows": [one measurement
each]}. Nothing here imports torch or the rest of flash_ext, so tools load this file by its path.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of a source tree; an installed package has no csrc
# An installed package writes under the working directory, not beside itself in site-packages.
RESULTS = (ROOT if (ROOT / "csrc").is_dir() else Path()) / "benchmarks" / "results"

# A row's identity: a new measurement of it replaces the old one.
KEY = (
    *("mode", "head_dim", "mask", "seqlen", "batch", "heads_q", "heads_k", "unit"),
    *("dtype", "head_dim_v", "features"),
)
# What else is no peer.
OTHER = ("ours", "kernel", "sources", "date", "ceiling")

LOWER_IS_BETTER = ("µs", "MiB", "abs")
_INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
_VENDOR_WORDS = {"nvidia", "amd", "instinct", "geforce", "graphics", "radeon", "corporation"}


def device_slug(name: str) -> str:
    """The file name of a device's results: "NVIDIA H200" is h200."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(word for word in words if word not in _VENDOR_WORDS) or "unknown"


def row_key(row: dict) -> tuple:
    return tuple(row.get(name) for name in KEY)


def peers_of(row: dict) -> dict[str, float]:
    """The peers' figures by name."""
    return {name: x for name, x in row.items() if name not in KEY and name not in OTHER}


def merged(old: list[dict], new: list[dict]) -> list[dict]:
    """The rows of both; a new one replaces the old one of its key in its place."""
    rows = {row_key(row): row for row in old}
    rows.update({row_key(row): row for row in new})
    return list(rows.values())


def load(path: Path) -> dict:
    """A result file; an empty one when there is none yet."""
    if not path.exists():
        return {"meta": {}, "tests": {}, "rows": []}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise ValueError(f"{path} is no result file: it has no list of rows")
    return {"meta": {}, "tests": {}, **content}


def merge_into(path: Path, content: dict) -> dict:
    """Merges content into the file at path, which is written whole; returns what it holds now."""
    whole = load(path)
    whole["meta"] = {**whole["meta"], **content.get("meta", {})}
    whole["tests"] = content.get("tests") or whole["tests"]
    whole["rows"] = merged(whole["rows"], content.get("rows", []))
    path.parent.mkdir(parents=True, exist_ok=True)
    # A run that is ended in the middle of writing leaves the old file whole.
    beside = path.with_suffix(".json.new")
    beside.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.replace(path)
    return whole


# ---- fingerprints --------------------------------------------------------------------------------


def _included(file: Path, root: Path) -> Iterator[Path]:
    """The files of the tree that `file` includes, from beside it or from root.

    For <fragment.h>, <config.h> and <copy.h> the neighbour is what NVIDIA's units are given.
    """
    for quoted, angled in _INCLUDE.findall(file.read_text(encoding="utf-8")):
        for base in (file.parent, root):
            path = (base / (quoted or angled)).resolve()
            if path.is_file():
                yield path
                break


def closure(text: str, root: Path) -> list[Path]:
    """Every file under root that a translation unit with this text is made from, sorted."""
    waiting = [
        path
        for quoted, angled in _INCLUDE.findall(text)
        if (path := (root / (quoted or angled)).resolve()).is_file()
    ]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting.extend(_included(path, root))
    return sorted(seen)


@functools.cache
def _manifest(csrc: Path):
    """csrc/kernels.py as a module; csrc is no package, so by path."""
    spec = importlib.util.spec_from_file_location("flash_ext_manifest", csrc / "kernels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


@functools.cache
def _manifest_entries(csrc: Path) -> dict[str, str]:
    """{kernel name: its translation unit, table entry and flags}, of every architecture."""
    manifest = _manifest(csrc)
    return {
        kernel.name: kernel.source() + kernel.entry() + " ".join(kernel.flags)
        for arch in manifest.BUILT_ARCHS
        for kernel in manifest.kernels(arch, "x86_64")  # the one with every instruction set
    }


def fingerprint(kernel: str, csrc: Path = ROOT / "csrc") -> str:
    """A hash over the files that the kernel is compiled from and its entry of the manifest.

    "" when the kernel is not in the manifest, or where there are no sources.
    """
    if not (csrc / "kernels.py").exists():
        return ""
    text = _manifest_entries(csrc).get(kernel)
    return "" if text is None else hash_of(text, csrc)


def hash_of(text: str, root: Path) -> str:
    """Of a translation unit's text and of the files under root that it includes."""
    digest = hashlib.sha256(text.encode())
    for path in closure(text, root.resolve()):
        digest.update(path.relative_to(root.resolve()).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def stale(rows: list[dict], csrc: Path = ROOT / "csrc") -> list[dict]:
    """The rows whose kernel's sources have changed since they were measured."""
    return [
        row for row in rows if row.get("sources", "") != fingerprint(row.get("kernel", ""), csrc)
    ]
