"""Builds flash_ext: `pip install --no-build-isolation .` (add -e for an editable install).

FLASH_EXT_ARCHS  targets, comma-separated (default: cpu and a visible GPU's; README lists the names)
FLASH_EXT_ONLY   keep kernels whose name contains this: build one kernel in seconds
MAX_JOBS         compile at most this many units at once
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import native_build  # noqa: E402

CPU_LIBRARY = "flash_ext._C"
CUDA_LIBRARY = "flash_ext._C_cuda"


def chosen_archs() -> list[str]:
    """What FLASH_EXT_ARCHS names; without it cpu and a visible GPU's. The build says which."""
    archs = native_build.requested_archs()
    known = native_build.load_manifest().BUILT_ARCHS
    if missing := [arch for arch in archs if arch not in known]:
        raise SystemExit(
            f"FLASH_EXT_ARCHS names {', '.join(missing)}, for which this version has no kernels; "
            f"those that have: {', '.join(known)}"
        )
    gpu = None if "FLASH_EXT_ARCHS" in os.environ else native_build.visible_gpu_arch()
    if gpu and gpu not in archs:
        if gpu in known:
            print(f"flash_ext: adding {gpu}, the GPU that is visible here")
            archs.append(gpu)
        else:
            print(f"flash_ext: the visible GPU is {gpu}, for which this version has no kernels")
    print(f"flash_ext: building for {', '.join(archs)}")
    return archs


ARCHS = chosen_archs()
GPU_ARCHS = [arch for arch in ARCHS if arch != "cpu"]


class BuildLibraries(build_ext):
    """Hands the libraries to ninja instead of to distutils' compiler."""

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        base = ROOT / self.get_finalized_command("build").build_base
        if ext.name == CPU_LIBRARY:
            native_build.build_cpu_library(base / "native", output)
        else:
            native_build.build_cuda_library(base / "cuda", output, GPU_ARCHS)


class BuildTesting(Command):
    """flash_ext_testing, the pybind11 module through which tests reach csrc/common."""

    description = "build the test-only module"
    user_options: ClassVar[list] = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        import sysconfig

        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        native_build.build_testing(
            ROOT / "build" / "testing", ROOT / "tests" / "native" / f"flash_ext_testing{suffix}"
        )


class StableAbiWheel(bdist_wheel):
    """One wheel for every Python from 3.10 on: the libraries hold no Python symbol at all."""

    def finalize_options(self) -> None:
        self.py_limited_api = "cp310"
        super().finalize_options()


setup(
    ext_modules=[
        Extension(name, sources=[], py_limited_api=True)
        for name in (CPU_LIBRARY, *([CUDA_LIBRARY] if GPU_ARCHS else []))
    ],
    cmdclass={
        "build_ext": BuildLibraries,
        "build_testing": BuildTesting,
        "bdist_wheel": StableAbiWheel,
    },
)
