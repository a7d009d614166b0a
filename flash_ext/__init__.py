"""Exact attention for PyTorch on CUDA and AMD GPUs and on CPUs; see README.md.

`_C` holds the operators' schemas and the CPU kernels. The GPU kernels are libraries of their own,
because they need symbols that only torch's CUDA and ROCm builds have; a wheel may hold either.
"""

import json
import warnings
from pathlib import Path

import torch

from . import machine
from ._version import __version__

_HERE = Path(__file__).parent
_BUILD = "`pip install --no-build-isolation .` in flash_ext's source tree"
_libraries: dict[str, str] = {}  # name: "loaded", or why not; `python -m flash_ext` prints them


def _load_cpu_library() -> None:
    path = _HERE / "_C.abi3.so"
    if not path.exists():
        raise ImportError(
            f"{path.name}, flash_ext's compiled library, is missing; build it: {_BUILD}"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"flash_ext's compiled library does not load with torch {torch.__version__}; it needs "
            f"torch >= 2.10, or build it anew: {_BUILD}. The loader says: {error}"
        ) from error
    _libraries["_C"] = "loaded"


def _refuse_gpu_tensors(reason: str) -> torch.library.Library:
    """Operators on a GPU tensor say why no kernel serves it, instead of torch's general text.

    The registration lasts as long as what is returned.
    """

    def refuse(*_args, **_kwargs):
        advice = "".join(f"; {machine.advice(gpu)}" for gpu in machine.nvidia_gpus()[:1])
        raise RuntimeError(f"flash: no kernel for GPU tensors: {reason}{advice}")

    library = torch.library.Library("flash", "IMPL")
    for name in ("attn", "attn_backward", "attn_probs", "cache_append", "rotary", "explain"):
        library.impl(name, refuse, "CUDA")  # ROCm builds of torch use the same key
    return library


def _load_gpu_library(name: str, archs: str, advice: str) -> torch.library.Library | None:
    """Without its GPU library the package serves CPU tensors and says what is missing."""
    path = _HERE / f"{name}.abi3.so"
    if not path.exists():
        reason = f"flash_ext was built without them; build with FLASH_EXT_ARCHS={archs} {_BUILD}"
        _libraries[name] = reason
        return _refuse_gpu_tensors(reason)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        reason = (
            f"{path.name} does not load with torch {torch.__version__}; {advice}, or build it "
            f"anew: {_BUILD}. The loader says: {error}"
        )
        warnings.warn(f"flash_ext: {reason}", RuntimeWarning, stacklevel=3)
        _libraries[name] = reason
        return _refuse_gpu_tensors(reason)
    _libraries[name] = "loaded"
    return None


def _built_archs() -> list[str]:
    """The GPU architectures of the loaded libraries."""
    rows = json.loads(torch.ops.flash.kernels())
    return [arch for arch in dict.fromkeys(row["arch"] for row in rows) if arch != "cpu"]


_load_cpu_library()
_refusals = None
if torch.version.hip:
    _refusals = _load_gpu_library(
        "_C_hip", "gfx942 (or your GPU's)", "it needs the ROCm release that it was built with"
    )
elif torch.version.cuda:
    _refusals = _load_gpu_library(
        "_C_cuda",
        "sm90 (or your GPU's)",
        "a build with CUDA toolkit 13 needs a driver >= 580 (see nvidia-smi)",
    )
    if _libraries["_C_cuda"] == "loaded" and (
        _wrong := machine.wrong_build(_built_archs(), machine.nvidia_gpus())
    ):
        warnings.warn(_wrong, RuntimeWarning, stacklevel=2)

from .checks import check_inputs  # noqa: E402  (the schemas must be there first)
from .functional import attention, attn_probs, explain, kernels, merge  # noqa: E402
from .interface import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .kvcache import apply_rotary_emb, flash_attn_with_kvcache  # noqa: E402
from .padding import pad_input, unpad_input  # noqa: E402
from .sdpa import route_sdpa, scaled_dot_product_attention  # noqa: E402

__all__ = [
    "__version__",
    "apply_rotary_emb",
    "attention",
    "attn_probs",
    "check_inputs",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "kernels",
    "merge",
    "pad_input",
    "route_sdpa",
    "scaled_dot_product_attention",
    "unpad_input",
]
