"""The training comparison's tables and figures, from the rows of its result file."""

from __future__ import annotations

from pathlib import Path

from training import MIB, OUT_OF_MEMORY

NAMES = {
    "naive": "naive",
    "sdpa": "SDPA",
    "sdpa_flash": "SDPA FLASH",
    "sdpa_cudnn": "SDPA CUDNN",
    "flex": "flex_attention",
    "flash_ext": "flash_ext",
}
# What rows of one table have in common.
KIND = ("context", "batch", "micro_batches", "steps", "num_layers", "num_heads", "text")


def cells_of(row: dict) -> list[str]:
    if "failed" in row:
        return [row["failed"], *[""] * 4]
    return [
        f"{row['final_loss']:.4f}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['tflops']:.3g}",
        f"{100 * row['tflops'] / row['ceiling']:.0f} %",
        f"{row['peak_bytes'] / MIB:.0f}",
    ]


def tables(rows: list[dict]) -> str:
    """Markdown, a table for each kind of training."""
    kinds: dict[tuple, list[dict]] = {}
    for row in rows:
        kinds.setdefault(tuple(row[name] for name in KIND), []).append(row)
    text = ""
    for key in sorted(kinds):
        here = sorted(kinds[key], key=lambda row: list(NAMES).index(row["variant"]))
        first = here[0]
        batch = first["batch"] * first["micro_batches"]
        size = f"{first['num_layers']} layers, {first['num_heads']} heads"
        text += f"\ncontext {first['context']}, batch {batch}, {first['steps']} steps; {size}\n\n"
        header = ("attention", "final loss", "tokens/s", "TFLOP/s", "MFU", "peak MiB")
        lines = [header, ["---"] * len(header)]
        lines += [[NAMES[row["variant"]], *cells_of(row)] for row in here]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            text += f"| {' | '.join(cells)} |\n"
    return text


def write_page(results: Path, content: dict, what: str) -> None:
    """The tables of all rows beside the result file, with the figures that are there.

    what: the product that MFU is a share of.
    """
    meta, path = content["meta"], results.with_suffix(".md")
    text = (
        f"# Training with each attention: {meta['device']}, torch {meta['torch']}\n\n"
        f"Written by examples/train_gpt.py. MFU is the share of what torch's own {what} reaches, "
        "measured in the same run. The final loss is the mean of the last steps.\n"
    )
    text += tables(content["rows"])
    for figure in (path.with_suffix(".png"), path.with_suffix(".long.png")):
        if figure.exists():
            text += f"\n![Speed, loss and memory side by side]({figure.name})\n"
    path.write_text(text, encoding="utf-8")
    print(f"tables: {path}")


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
