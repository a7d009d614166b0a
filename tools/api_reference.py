"""Writes docs/api.md, the API reference, from the docstrings.

    python tools/api_reference.py            rewrites docs/api.md
    python tools/api_reference.py --check    changes nothing; exit status 1 when it is stale

The sources are read, not imported: neither a built library nor the other libraries of
flash_ext.integrations are needed. What is public is what a module lists in __all__.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"

# Module, and the names to show: None for its __all__.
MODULES = {
    "flash_ext": None,
    "flash_ext.reference": ("attention", "attn_probs", "dropout_keep", "merge"),
    "flash_ext.integrations.transformers": None,
    "flash_ext.integrations.flash_attn": (),
    "flash_ext.integrations.xformers": None,
    "flash_ext.integrations.dtensor": (),
}

HEAD = """# API reference

Generated from the docstrings by `tools/api_reference.py`; `make format` writes it anew, `make lint`
fails when it is stale. [semantics.md](semantics.md) says what the arguments mean.
"""


def _source(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _parse(module: str) -> ast.Module:
    return ast.parse(_source(module).read_text(encoding="utf-8"))


def _all(tree: ast.Module) -> list[str]:
    """The module's __all__, in its order."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return []


def _find(module: str, name: str):
    """(the module that defines a name, its class or function), through imports; None if neither."""
    tree = _parse(module)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and any(a.name == name for a in node.names):
            package = module if _source(module).name == "__init__.py" else module.rpartition(".")[0]
            origin = f"{package}.{node.module}" if node.level else node.module
            if origin.startswith("flash_ext") and _source(origin).exists():
                return _find(origin, name)
    return None


def _signature(node) -> str:
    """name(parameters) in one line or one parameter a line; of a class that of its __init__."""
    function = node
    if isinstance(node, ast.ClassDef):
        methods = [x for x in node.body if getattr(x, "name", "") == "__init__"]
        fields = [ast.unparse(x) for x in node.body if isinstance(x, ast.AnnAssign)]
        if not methods:
            return f"class {node.name}({', '.join(fields)})"
        function = methods[0]
    parameters = ast.unparse(function.args).removeprefix("self").removeprefix(", ")
    parameters = parameters.replace("'", '"')  # ruff formats the blocks of Markdown pages too
    prefix = "class " if isinstance(node, ast.ClassDef) else ""
    line = f"{prefix}{node.name}({parameters})"
    if len(line) <= 100:
        return line
    return f"{prefix}{node.name}(\n    {_one_a_line(parameters)},\n)"


def _one_a_line(parameters: str) -> str:
    """Commas outside brackets begin a new line."""
    depth, out = 0, []
    for i, c in enumerate(parameters):
        depth += (c in "([{") - (c in ")]}")
        is_break = c == " " and depth == 0 and parameters[i - 1] == ","
        out.append("\n    " if is_break else c)
    return "".join(out)


def _entry(module: str, name: str) -> str:
    found = _find(module, name)
    if found is None:
        return ""  # a constant or a module: nothing to describe
    origin, node = found
    doc = ast.get_docstring(node)
    if doc is None:
        raise SystemExit(f"{origin}.{name} is public and has no docstring")
    return f"### {name}\n\n```python\n{_signature(node)}\n```\n\n```text\n{doc}\n```\n"


def page() -> str:
    """docs/api.md."""
    parts = [HEAD]
    for module, names in MODULES.items():
        tree = _parse(module)
        parts.append(f"## {module}\n\n```text\n{ast.get_docstring(tree)}\n```\n")
        listed = _all(tree) if names is None else names
        parts += filter(None, (_entry(module, name) for name in listed))
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes docs/api.md.")
    parser.add_argument("--check", action="store_true", help="change nothing, fail when stale")
    options = parser.parse_args()
    fresh = page()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == fresh:
        return 0
    if options.check:
        print("docs/api.md is stale; run `python tools/api_reference.py`")
        return 1
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
