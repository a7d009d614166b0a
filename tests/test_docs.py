"""The documentation says what is so: its Python blocks run, its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import util

import flash_ext

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
# migration.md puts a flash_attn into sys.modules: every page runs in a process of its own.
RUNNABLE = ("features.md", "migration.md", "numerics.md")


def python_blocks(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", RUNNABLE)
def test_blocks_run(page):
    blocks = python_blocks(page)
    assert blocks
    if page == "migration.md":
        pytest.importorskip("transformers")
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        env=util.environment(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_api_reference_is_fresh():
    tool = ROOT / "tools" / "api_reference.py"
    run = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_api_reference_has_every_public_function():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    section = text.split("## flash_ext.reference")[0]
    named = set(re.findall(r"^### (\w+)$", section, re.MULTILINE))
    assert named == set(flash_ext.__all__) - {"__version__"}
