"""Which GPUs this machine has, without waking one up, and which wheel has kernels for them.

A wheel holds the CPU kernels and those of one GPU architecture (docs/build.md); its version says
which: 0.1.0+sm90.
"""

import ctypes
import importlib.metadata
from pathlib import Path
from typing import NamedTuple

from ._version import __version__

# NVIDIA architectures that wheels are made for, with the shared memory (KB) that their kernels ask
# for; those of EXACT run nowhere else. csrc/kernels.py has the same, and decides at a build.
WHEELS = {
    **{"sm80": 163, "sm86": 99, "sm87": 163, "sm89": 99},
    **{"sm90": 227, "sm100": 227, "sm120": 99},
}
EXACT = ("sm87", "sm90")


class Gpu(NamedTuple):
    name: str
    arch: str  # sm90


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm"))


def _shared_memory(arch: str) -> int:
    """That of the newest known architecture that is not newer; 0 before the first."""
    known = [name for name in WHEELS if _number(name) <= _number(arch)]
    return WHEELS[max(known, key=_number)] if known else 0


def runs_on(built: list[str], arch: str) -> bool:
    """Whether a GPU runs what was built for these architectures: launch.h's rule, from afar."""
    here = _number(arch)
    for name in built:
        if WHEELS[name] > _shared_memory(arch):
            continue
        same_major = _number(name) // 10 == here // 10 and name not in EXACT and here != 87
        newest = name == max(built, key=_number)  # carries PTX, which the driver compiles
        if _number(name) == here or (here > _number(name) and (same_major or newest)):
            return True
    return False


def wheel_for(arch: str) -> str | None:
    """The architecture of the wheel to take for such a GPU; None when there is none."""
    if arch in WHEELS:
        return arch
    fitting = [name for name in WHEELS if runs_on([name], arch)]
    return max(fitting, key=_number, default=None)


def nvidia_gpus() -> list[Gpu]:
    """By the driver's management library, which makes no CUDA context; [] where it is not there."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return []
    except (OSError, AttributeError):
        return []
    found = []
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        name = ctypes.create_string_buffer(96)
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
            continue
        nvml.nvmlDeviceGetName(device, name, len(name))
        nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
        found.append(Gpu(name.value.decode(), f"sm{major.value}{minor.value}"))
    nvml.nvmlShutdown()
    return found


def version() -> str:
    """The version with its wheel's architecture, where this package is one that was installed."""
    try:
        distribution = importlib.metadata.distribution("flash_ext")
    except importlib.metadata.PackageNotFoundError:
        return __version__
    here = Path(__file__).resolve()
    is_this = Path(distribution.locate_file("flash_ext/machine.py")).resolve() == here
    return distribution.version if is_this else __version__


def advice(gpu: Gpu) -> str:
    """What to install for this GPU."""
    arch = wheel_for(gpu.arch)
    if arch is None:
        return f"no wheel has kernels for {gpu.name} ({gpu.arch}); the oldest served is sm80"
    return (
        f"for {gpu.name} ({gpu.arch}) take the wheel flash_ext-{__version__}+{arch}, or build with "
        f"FLASH_EXT_ARCHS={arch}"
    )


def wrong_build(built: list[str], gpus: list[Gpu]) -> str | None:
    """Why no GPU of this machine runs the GPU kernels that were built, or None when one does."""
    if not built or not gpus or any(runs_on(built, gpu.arch) for gpu in gpus):
        return None
    return (
        f"flash_ext {version()} has GPU kernels for {', '.join(built)} alone, which no GPU of this "
        f"machine runs; {advice(gpus[0])}"
    )
