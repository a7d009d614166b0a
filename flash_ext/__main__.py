"""`python -m flash_ext`: what is installed, what it finds here, and why something is missing."""

import platform
import sys
from pathlib import Path

import torch

import flash_ext

from . import _built_archs, _libraries, machine

LIBRARIES = {"_C": "schemas, CPU kernels", "_C_cuda": "CUDA kernels", "_C_hip": "AMD kernels"}


def library_lines() -> list[str]:
    lines = []
    for name, holds in LIBRARIES.items():
        is_there = (Path(__file__).parent / f"{name}.abi3.so").exists()
        unused = "left alone: torch here is a build for something else"
        state = _libraries.get(name, unused if is_there else "not in this build")
        lines.append(f"{name}.abi3.so ({holds}): {state}")
    return lines


def serving(device: str, dtype: torch.dtype) -> list[str]:
    """For each pass the kernel that serves a plain call on this device, or why none does."""
    lines = []
    q = torch.empty(1, 1, 1, 64, dtype=dtype, device=device)
    for name in ("forward", "backward"):
        try:
            text = flash_ext.explain(q, q, q, backward=name == "backward")
        except RuntimeError as error:
            lines.append(f"  {name}: {str(error).splitlines()[0]}")
            continue
        chosen = text.split("serves: ")[1].splitlines()[0]
        lines.append(f"  {name}: {chosen}")
        if chosen == "no kernel":
            reasons = dict.fromkeys(
                line.split(": ", 1)[1] for line in text.splitlines() if line.startswith("not ")
            )
            lines += [f"    {reason}" for reason in reasons] or ["    the library has none"]
    return lines


def device_lines() -> list[str]:
    lines = [f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"]
    lines += serving("cpu", torch.float32)
    gpus = machine.nvidia_gpus()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            lines.append(f"GPU {index}: {torch.cuda.get_device_name(index)}")
            lines += serving(f"cuda:{index}", torch.bfloat16)
    else:
        build = torch.version.cuda or torch.version.hip
        seen = f"torch for {build} sees none" if build else "this torch is a CPU build"
        lines.append(f"no GPU for torch: {seen}")
    built = _built_archs()
    for gpu in dict.fromkeys(gpus):
        lines.append(f"the driver names {gpu.name} ({gpu.arch})")
        if not torch.version.cuda:
            lines.append("  needs a CUDA build of torch")
        if not machine.runs_on(built, gpu.arch):
            lines.append(f"  {machine.advice(gpu)}")
    return lines


def kernel_lines() -> list[str]:
    """One line an architecture and pass."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in flash_ext.kernels():
        groups.setdefault((row["arch"], row["pass"]), []).append(row)
    lines = []
    for (arch, pass_), rows in groups.items():
        dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in rows))
        head_dim = max(row["head_dim"] for row in rows)
        lines.append(f"{arch} {pass_}: {dtypes}; head_dim to {head_dim}; {len(rows)} kernels")
    return lines


def lacking_lines() -> list[str]:
    """Features that some kernel of this build has and others of the same pass do not."""
    features: dict[tuple[str, str], set[str]] = {}
    for row in flash_ext.kernels():
        features.setdefault((row["arch"], row["pass"]), set()).update(row["features"])
    lines = []
    for (arch, pass_), has in features.items():
        others = [x for (_, other), x in features.items() if other == pass_]
        if missing := sorted(set().union(*others) - has):
            lines.append(f"{arch} {pass_}: {', '.join(missing)}")
    passes = dict.fromkeys(pass_ for _, pass_ in features)
    for arch in dict.fromkeys(arch for arch, _ in features):
        lines += [f"{arch} {p}: no kernels" for p in passes if (arch, p) not in features]
    return lines


def main() -> int:
    print(f"flash_ext {machine.version()} in {Path(__file__).parent}")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}")
    sections = {
        "libraries": library_lines(),
        "devices": device_lines(),
        "kernels": kernel_lines(),
        "not available (a call says why)": lacking_lines(),
    }
    for title, lines in sections.items():
        if lines:
            print(f"\n{title}")
            print("\n".join(f"  {line}" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
