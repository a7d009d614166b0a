"""Exact attention for PyTorch on CUDA and AMD GPUs and on CPUs; see README.md.

`_C` holds the operators' schemas and the CPU kernels. The GPU kernels are libraries of their own,
because they need symbols that only torch's CUDA and ROCm builds have; a wheel may hold either.
"""

import warnings
from pathlib import Path

import torch

from ._version import __version__

_HERE = Path(__file__).parent
_BUILD = "`pip install --no-build-isolation .` in flash_ext's source tree"


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


def _load_gpu_library(name: str, runtime: str, advice: str) -> None:
    """A GPU library that does not load leaves the CPU kernels usable: a warning says why."""
    path = _HERE / f"{name}.abi3.so"
    if not path.exists():
        return
    try:
        torch.ops.load_library(path)
    except OSError as error:
        warnings.warn(
            f"flash_ext's {runtime} kernels do not load with torch {torch.__version__}, so tensors "
            f"on such a GPU will be refused; {advice}, or build it anew: {_BUILD}. The loader "
            f"says: {error}",
            RuntimeWarning,
            stacklevel=3,
        )


_load_cpu_library()
if torch.version.hip:
    _load_gpu_library("_C_hip", "ROCm", "they need the ROCm release that they were built with")
elif torch.version.cuda:
    _load_gpu_library(
        "_C_cuda", "CUDA", "a build with CUDA toolkit 13 needs a driver >= 580 (see nvidia-smi)"
    )

from .checks import check_inputs  # noqa: E402  (the schemas must be there first)
from .interface import (  # noqa: E402
    attention,
    attn_probs,
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    kernels,
    merge,
)
from .padding import pad_input, unpad_input  # noqa: E402

__all__ = [
    "__version__",
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
    "kernels",
    "merge",
    "pad_input",
    "unpad_input",
]
