"""Tables and figures of result rows, for a terminal and for Markdown. Needs no torch.

rich and matplotlib are used when they are there.
"""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

from . import results

ABSENT = "–"
ORDER = ("plain", "op", "fa2", "sdpa_flash", "cudnn", "mem_eff", "flex", "naive")
POINT = ("head_dim", "mask", "seqlen", "batch", "heads", "dtype")


def figure(x: float | None) -> str:
    """Three digits that matter."""
    if x is None:
        return ABSENT
    if x and (abs(x) >= 1e5 or abs(x) < 1e-2):
        return f"{x:.2e}"
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.3g}"


def peer_columns(rows: list[dict]) -> list[str]:
    """The peers that some row has, in one order."""
    named = {name for row in rows for name in results.peers_of(row)}
    return sorted(named, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))


def ratio(row: dict) -> float | None:
    """How many times better ours is than the best peer."""
    rivals = {n: x for n, x in results.peers_of(row).items() if n not in ("plain", "op", "naive")}
    if not rivals or not row["ours"]:
        return None
    if row["unit"] in results.LOWER_IS_BETTER:
        return min(rivals.values()) / row["ours"]
    return row["ours"] / max(rivals.values())


def table(rows: list[dict]) -> list[list[str]]:
    """Rows of one mode as lines of text, the header first."""
    peers = peer_columns(rows)
    has = {
        "features": any(row["features"] for row in rows),
        "ratio": any(ratio(row) for row in rows),
        "ceiling": any(row.get("ceiling") for row in rows),
    }
    header = [*POINT, *(["features"] if has["features"] else []), "ours", *peers]
    header += ["ours / best"] * has["ratio"] + ["% of ceiling"] * has["ceiling"]
    lines = [header]
    for row in rows:
        q, k = row["heads_q"], row["heads_k"]
        shown = row | {"heads": str(q) if q == k else f"{q}/{k}"}
        line = [str(shown[name]) for name in POINT]
        line += [row["features"] or ABSENT] * has["features"]
        line += [figure(row.get(name)) for name in ("ours", *peers)]
        if has["ratio"]:
            line.append(ABSENT if ratio(row) is None else f"{ratio(row):.2f}")
        if has["ceiling"]:
            top = row.get("ceiling")
            line.append(f"{100 * row['ours'] / top:.0f}" if top else ABSENT)
        lines.append(line)
    return lines


def by_mode(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Rows by (mode, unit), in the order of their first one; each by its key."""
    found: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        found.setdefault((row["mode"], row["unit"]), []).append(row)

    def place(row):
        return (
            *(row["dtype"], row["heads_q"] != row["heads_k"], row["head_dim"]),
            *(row["mask"] != "full", row["seqlen"], row["features"]),
        )

    return {mode: sorted(group, key=place) for mode, group in found.items()}


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def markdown(rows: list[dict]) -> str:
    """A Markdown table."""
    lines = table(rows)
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def print_table(rows: list[dict], title: str) -> None:
    """In the terminal, by rich when it is there."""
    header, *lines = table(rows)
    ratios = [r for row in rows if (r := ratio(row))]
    if len(ratios) > 1:
        title += f"; ours / best, geometric mean {geometric_mean(ratios):.3f}"
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        print(f"\n{title}")
        for line in (header, *lines):
            print("  ".join(x.rjust(w) for x, w in zip(line, widths, strict=True)))
        return
    wide = shutil.get_terminal_size((140, 24)).columns if sys.stdout.isatty() else 140
    shown = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for name in header:
        shown.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        shown.add_row(*line)
    Console(width=wide).print(shown)


def compare(old: list[dict], new: list[dict]) -> list[str]:
    """A line for each point that both have: ours then, now, and how much better it is now."""
    before = {results.row_key(row): row for row in old}
    lines = []
    for row in new:
        then = before.get(results.row_key(row))
        if then is None or not then.get("ours") or not row.get("ours"):
            continue
        change = row["ours"] / then["ours"]
        change = 1 / change if row["unit"] in results.LOWER_IS_BETTER else change
        name = " ".join(str(row[n]) for n in ("mode", *POINT[:4], "dtype", "features")).strip()
        figures = f"{figure(then['ours'])} -> {figure(row['ours'])} {row['unit']}"
        lines.append(f"{name}: {figures} ({change:.2f} x)")
    return lines


def figures(rows: list[dict], folder: Path, device: str) -> list[Path]:
    """PNGs of rates over seqlen, a file for each mode and dtype; none without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no figures: matplotlib is not installed", file=sys.stderr)
        return []
    folder.mkdir(parents=True, exist_ok=True)
    chosen: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["mode"] in ("fwd", "bwd") and row["heads_q"] == row["heads_k"]:
            chosen.setdefault((row["mode"], row["dtype"]), []).append(row)
    paths = []
    for (mode, dtype), points in chosen.items():
        if len({row["seqlen"] for row in points}) < 2:
            continue
        dims = sorted({row["head_dim"] for row in points})
        size = (10, 3.2 * len(dims))
        drawing, axes = pyplot.subplots(len(dims), 2, figsize=size, squeeze=False, sharey=True)
        for line, head_dim in zip(axes, dims, strict=True):
            for axis, mask in zip(line, ("full", "causal"), strict=True):
                here = [r for r in points if r["head_dim"] == head_dim and r["mask"] == mask]
                _draw(axis, sorted(here, key=lambda r: r["seqlen"]))
                axis.set_title(f"{mode}, head_dim {head_dim}, {mask}, {dtype}")
        for axis in axes.flat:
            if axis.has_data():
                axis.legend(fontsize="small")
                break
        drawing.suptitle(device)
        drawing.tight_layout()
        paths.append(folder / f"{results.device_slug(device)}_{mode}_{dtype}.png")
        drawing.savefig(paths[-1], dpi=120)
        pyplot.close(drawing)
    return paths


def _draw(axis, rows: list[dict]) -> None:
    """One panel: a line a contestant, and the ceiling."""
    for name in ("ours", *peer_columns(rows)):
        points = [(r["seqlen"], r[name]) for r in rows if r.get(name) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", lw=2 if name == "ours" else 1,
                      label=name)  # fmt: skip
    if rows and rows[-1].get("ceiling"):
        axis.axhline(rows[-1]["ceiling"], ls="--", color="grey", label="matrix product")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("seqlen")
    axis.set_ylabel("TFLOP/s")
    axis.set_ylim(bottom=0)
