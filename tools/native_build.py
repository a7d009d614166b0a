"""Builds the native libraries with ninja: what setup.py and the Makefile call.

The kernels come from csrc/kernels.py; every translation unit is compiled for its own target, in
parallel, and only when it or a header that it includes has changed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

# The oldest torch whose stable ABI the libraries use: 2.10.
TORCH_TARGET_VERSION = "0x020a000000000000ULL"

CXX_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]

# The angle-bracket headers of the fragment contract are the tile class's own folder here.
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    f"-I{CSRC / 'cuda' / 'tile'}",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-Xptxas=-v",
    "--threads=1",
]

# Compiled into each backend's library.
SHARED_SOURCES = ["api.cpp", "args.cpp", "cache_api.cpp", "glibc.cpp", "kernel_table.cpp"]


def load_manifest():
    """csrc/kernels.py as a module."""
    spec = importlib.util.spec_from_file_location("flash_kernels", CSRC / "kernels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def requested_archs() -> list[str]:
    """FLASH_EXT_ARCHS as a list, checked; `cpu` when it is not set."""
    known = load_manifest().ARCHS
    names = os.environ.get("FLASH_EXT_ARCHS", "cpu").replace(";", ",").split(",")
    archs = [name.strip() for name in names if name.strip()]
    unknown = [name for name in archs if name not in known]
    if unknown:
        raise SystemExit(
            f"FLASH_EXT_ARCHS names {', '.join(unknown)}; allowed are {', '.join(known)}, "
            "separated by commas"
        )
    return ["cpu", *(arch for arch in archs if arch != "cpu")]


def kernel_filter(archs: Sequence[str]) -> str:
    """FLASH_EXT_ONLY where it names a kernel of this library; without one all are built."""
    only = os.environ.get("FLASH_EXT_ONLY", "")
    names = [kernel.name for kernel in load_manifest().kernels(archs)]
    return only if any(only in name for name in names) else ""


def visible_gpu_arch() -> str | None:
    """The architecture of the first visible GPU in FLASH_EXT_ARCHS' names, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm{properties.major}{properties.minor}"


def torch_paths() -> tuple[Path, Path]:
    """(include, lib) of the torch that is built against."""
    try:
        spec = importlib.util.find_spec("torch")
    except ImportError:
        spec = None
    if spec is None:
        raise SystemExit(
            "building flash_ext needs torch in this environment: install torch first, then run "
            "pip install --no-build-isolation ."
        )
    root = Path(spec.origin).parent
    return root / "include", root / "lib"


def compiler() -> str:
    cxx = os.environ.get("CXX", "c++")
    if shutil.which(cxx) is None:
        raise SystemExit(f"no C++ compiler {cxx!r}: install g++ 9 or later, or set CXX")
    return cxx


def escape(text: str | Path) -> str:
    return str(text).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def write_ninja(
    build_dir: Path,
    units: Sequence[tuple[Path, Sequence[str]]],
    output: Path,
    includes: Sequence[str],
    link: Sequence[str],
    nvcc: str = "",
) -> None:
    """One shared library from (source, extra flags) pairs; .cu sources go to nvcc."""
    lines = [
        "ninja_required_version = 1.5",
        f"cxx = {escape(compiler())}",
        f"cflags = {' '.join([*CXX_FLAGS, *includes])}",
        f"ldflags = {' '.join(link)}",
        "rule compile",
        "  command = $cxx -MMD -MF $out.d $cflags $extra -c $in -o $out",
        "  deps = gcc",
        "  depfile = $out.d",
        "  description = compile $in",
        "rule compile_cuda",
        f"  command = {nvcc} -MMD -MF $out.d {' '.join([*NVCC_FLAGS, f'-I{escape(CSRC)}'])} $extra"
        " -c $in -o $out > $out.log 2>&1 || (cat $out.log && false)",
        "  deps = gcc",
        "  depfile = $out.d",
        "  description = compile $in",
        "rule link",
        "  command = $cxx -shared -Wl,-s -o $out $in $ldflags",
        "  description = link $out",
    ]
    objects = []
    for source, flags in units:
        target = build_dir / "objects" / f"{source.stem}.o"
        objects.append(escape(target))
        rule = "compile_cuda" if source.suffix == ".cu" else "compile"
        lines += [
            f"build {escape(target)}: {rule} {escape(source)}",
            f"  extra = {' '.join(flags)}",
        ]
    lines += [f"build {escape(output)}: link {' '.join(objects)}", f"default {escape(output)}", ""]
    text = "\n".join(lines)
    target = build_dir / "build.ninja"
    if not target.exists() or target.read_text() != text:
        target.write_text(text)


def run_ninja(build_dir: Path) -> None:
    command = ["ninja", "-C", str(build_dir)]
    if jobs := os.environ.get("MAX_JOBS"):
        command += ["-j", jobs]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        raise SystemExit("building flash_ext needs ninja: pip install ninja") from None
    except subprocess.CalledProcessError:
        raise SystemExit("flash_ext: a translation unit did not compile; see above") from None


def host_includes(include: Path) -> list[str]:
    """Flags of the sources that see torch."""
    return [
        f"-I{escape(CSRC)}",
        f"-isystem {escape(include)}",
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
        # Error texts name files as this repository and torch know them, not this machine.
        f"-ffile-prefix-map={escape(ROOT)}/=",
        f"-ffile-prefix-map={escape(include)}/=",
    ]


def build_cpu_library(build_dir: Path, output: Path) -> None:
    """flash_ext/_C: the schemas and the CPU kernels."""
    generated = build_dir / "generated"
    units = load_manifest().generate(["cpu"], generated, kernel_filter(["cpu"]))
    include, lib = torch_paths()
    sources = [(CSRC / name, ()) for name in ("backend_cpu.cpp", *SHARED_SOURCES)]
    sources += [(generated / unit["source"], unit["flags"]) for unit in units]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_ninja(
        build_dir,
        sources,
        output,
        includes=host_includes(include),
        # libtorch is named so that the loader finds the shims wherever torch is; nothing else of
        # it is used.
        link=[f"-L{escape(lib)}", "-Wl,--no-as-needed", "-ltorch"],
    )
    run_ninja(build_dir)


def cuda_home() -> Path:
    """The CUDA toolkit: CUDA_HOME, or where nvcc lies."""
    if home := os.environ.get("CUDA_HOME"):
        return Path(home)
    candidates = [Path("/usr/local/cuda")]
    if nvcc := shutil.which("nvcc"):
        candidates.insert(0, Path(nvcc).resolve().parent.parent)
    for home in candidates:
        if (home / "include" / "cuda_runtime_api.h").exists():
            return home
    raise SystemExit(
        "building CUDA kernels needs the CUDA toolkit (12.8 or later): install it and set "
        "CUDA_HOME, or leave the sm... names out of FLASH_EXT_ARCHS"
    )


def build_cuda_library(build_dir: Path, output: Path, archs: Sequence[str]) -> None:
    """flash_ext/_C_cuda: the CUDA kernels of some architectures, with the runtime inside."""
    home = cuda_home()
    generated = build_dir / "generated"
    units = load_manifest().generate(list(archs), generated, kernel_filter(archs))
    include, lib = torch_paths()
    sources = [(CSRC / name, ()) for name in ("backend_gpu.cpp", *SHARED_SOURCES)]
    sources += [(generated / unit["source"], unit["flags"]) for unit in units]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_ninja(
        build_dir,
        sources,
        output,
        includes=[*host_includes(include), f"-isystem {escape(home / 'include')}"],
        link=[
            f"-L{escape(lib)}",
            "-Wl,--no-as-needed",
            "-ltorch",
            "-Wl,--as-needed",
            *(f"-L{escape(home / name)}" for name in ("lib64", "lib") if (home / name).exists()),
            "-lcudart_static",
            "-ldl",
            "-lrt",
            "-lpthread",
        ],
        nvcc=escape(home / "bin" / "nvcc"),
    )
    run_ninja(build_dir)


def build_testing(build_dir: Path, output: Path) -> None:
    """flash_ext_testing: common/ exposed to pytest through pybind11. No torch in it."""
    import sysconfig

    import pybind11

    build_dir.mkdir(parents=True, exist_ok=True)
    write_ninja(
        build_dir,
        [(ROOT / "tests" / "native" / "testing.cpp", ())],
        output,
        includes=[
            f"-I{escape(CSRC)}",
            f"-isystem {escape(pybind11.get_include())}",
            f"-isystem {escape(sysconfig.get_paths()['include'])}",
        ],
        link=[],
    )
    run_ninja(build_dir)
