"""Programs that import flash_attn, on flash_ext.

    import flash_ext.integrations.flash_attn  # before the first import of flash_attn

From then on `import flash_attn` and `from flash_attn… import …` find flash_ext's functions: those
of flash_attn and flash_attn.flash_attn_interface, flash_attn.bert_padding and
flash_attn.layers.rotary. `flash_attn.__version__`, importlib.util.find_spec and importlib.metadata
answer as for the release whose signatures these are, so that programs that look first find it too.
Where behaviour differs, README.md has the table. Modules that are not listed (fused losses, norms,
whole models) do not exist, also where flash-attn itself is installed: importing one raises
ModuleNotFoundError.
"""

import importlib.metadata
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import flash_ext

from . import _flash_attn_padding, _flash_attn_rotary

VERSION = "2.8.3"

# What flash_attn and flash_attn.flash_attn_interface export.
FUNCTIONS = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)


def _exports() -> dict:
    """The names of each module, by its name."""
    functions = {name: getattr(flash_ext, name) for name in FUNCTIONS}
    padding, rotary = (
        {name: getattr(module, name) for name in module.__all__}
        for module in (_flash_attn_padding, _flash_attn_rotary)
    )
    return {
        "flash_attn": {"__version__": VERSION, **functions},
        "flash_attn.flash_attn_interface": functions,
        "flash_attn.bert_padding": padding,
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": rotary,
    }


class _Distribution(importlib.metadata.Distribution):
    """flash-attn as importlib.metadata sees an installed package."""

    FILES = {  # noqa: RUF012 (a constant)
        "METADATA": f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n",
        "top_level.txt": "flash_attn\n",
    }

    def read_text(self, filename):
        return self.FILES.get(filename)

    def locate_file(self, path):
        raise FileNotFoundError(f"{path}: this flash_attn is flash_ext's and has no files")


class _DistributionFinder(importlib.metadata.DistributionFinder):
    """Finds no module, only the distribution."""

    def find_spec(self, name, path=None, target=None):
        return None

    def find_distributions(self, context):
        asked = context.name
        if asked is None or asked.lower().replace("_", "-") == "flash-attn":
            yield _Distribution()


def _module(name: str, exports: dict, is_package: bool) -> ModuleType:
    module = ModuleType(name, f"flash_ext's part of {name}; see {__name__}.")
    module.__spec__ = ModuleSpec(name, loader=None, origin=__name__, is_package=is_package)
    if is_package:
        module.__path__ = []
    module.__dict__.update(exports)
    return module


def _install() -> None:
    """Puts the modules where the import system looks first."""
    existing = sys.modules.get("flash_attn")
    if existing is not None and getattr(existing.__spec__, "origin", None) != __name__:
        raise ImportError(
            f"flash_attn is imported already, from {getattr(existing, '__file__', None)}; import "
            f"{__name__} before it"
        )
    for finder in [f for f in sys.meta_path if type(f).__name__ == _DistributionFinder.__name__]:
        sys.meta_path.remove(finder)  # importlib.reload comes here again
    modules = _exports()
    for name, exports in modules.items():
        is_package = any(other.startswith(name + ".") for other in modules)
        sys.modules[name] = _module(name, exports, is_package)
    for name in modules:
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    sys.meta_path.insert(0, _DistributionFinder())


_install()
