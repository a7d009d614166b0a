"""Builds flash_ext: `pip install --no-build-isolation .` (add -e for an editable install).

FLASH_EXT_ARCHS  targets, comma-separated (default cpu; README lists the names)
FLASH_EXT_ONLY   keep kernels whose name contains this: build one kernel in seconds
MAX_JOBS         compile at most this many units at once
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import native_build  # noqa: E402

CPU_LIBRARY = "flash_ext._C"
BUILD_DIR = ROOT / "build" / "native"


def say_targets() -> None:
    """What is built, and what a visible GPU would add."""
    archs = native_build.requested_archs()
    gpu = native_build.visible_gpu_arch()
    manifest = native_build.load_manifest()
    if gpu and gpu not in archs and gpu in manifest.ARCHS:
        archs.append(gpu)
    missing = [arch for arch in archs if arch not in manifest.BUILT_ARCHS]
    print(f"flash_ext: building for {', '.join(a for a in archs if a not in missing)}")
    for arch in missing:
        text = f"flash_ext: {arch} has no kernels in this version"
        if arch == gpu:
            print(f"{text}; tensors on the visible GPU will be refused by name")
        else:
            raise SystemExit(f"{text}; leave it out of FLASH_EXT_ARCHS")


class BuildLibraries(build_ext):
    """Hands the libraries to ninja instead of to distutils' compiler."""

    def build_extension(self, ext: Extension) -> None:
        say_targets()
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        native_build.build_cpu_library(BUILD_DIR, output)


class BuildTesting(Command):
    """flash_ext_testing, the pybind11 module through which tests reach csrc/common."""

    description = "build the test-only module"
    user_options: list[tuple[str, str, str]] = []

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
    ext_modules=[Extension(CPU_LIBRARY, sources=[], py_limited_api=True)],
    cmdclass={
        "build_ext": BuildLibraries,
        "build_testing": BuildTesting,
        "bdist_wheel": StableAbiWheel,
    },
)
