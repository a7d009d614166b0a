"""Writes the README's support table from the kernel table, csrc/kernels.py.

    python tools/readme_tables.py            rewrites README.md between the markers
    python tools/readme_tables.py --check    changes nothing; exit status 1 when it is stale

The rows come from `kernels.support_rows()`: a list of dicts with the keys of COLUMNS, each value a
string or a list of strings. What no kernel declares is therefore in no table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import native_build

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- support-table:begin -->", "<!-- support-table:end -->"
COLUMNS = {
    "backend": "backend",
    "pass": "pass",
    "dtypes": "dtypes",
    "head_dim": "head dim",
    "features": "features",
}


def support_table(rows: list[dict]) -> str:
    """A Markdown table of the rows, one line each, in the kernel table's order."""
    lines = [list(COLUMNS.values()), ["---"] * len(COLUMNS)]
    for row in rows:
        values = (row[key] for key in COLUMNS)
        lines.append([v if isinstance(v, str) else ", ".join(map(str, v)) for v in values])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_table(readme: str, table: str) -> str:
    """The README with the text between the markers replaced by the table."""
    if (
        readme.count(BEGIN) != 1
        or readme.count(END) != 1
        or readme.index(BEGIN) > readme.index(END)
    ):
        raise ValueError(f"README.md must hold one {BEGIN} and, after it, one {END}")
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the README's support table.")
    parser.add_argument("--check", action="store_true", help="change nothing, fail when stale")
    options = parser.parse_args()

    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    fresh = with_table(readme, support_table(native_build.load_manifest().support_rows()))
    if readme == fresh:
        return 0
    if options.check:
        print("README.md: the support table is stale; run `python tools/readme_tables.py`")
        return 1
    path.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
