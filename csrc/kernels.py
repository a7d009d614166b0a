"""The manifest: the only list of kernels.

Data and small functions, no build logic. From here come the generated translation units (written
into the build directory, never into git), the kernel table that the dispatcher reads, and the
README's support table. Run as a script it writes the units of some architectures:

    python csrc/kernels.py --archs cpu --out build/generated

Adding a kernel, a head dim or an architecture is an entry here; docs/adding.md walks through each.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Every name of kernel_table.h's Feature, in its order.
FEATURES = {
    "varlen": "kVarlen",
    "gqa": "kGqa",
    "window": "kWindow",
    "softcap": "kSoftcap",
    "bias": "kBias",
    "bool_mask": "kBoolMask",
    "alibi": "kAlibi",
    "sinks": "kSinks",
    "dropout": "kDropout",
    "seqused": "kSeqused",
    "page_table": "kPaged",
    "num_splits": "kSplits",
    "head_dim_v": "kHeadDimV",
    "deterministic": "kDeterministic",
    "dlse": "kDlse",
    "dbias": "kDbias",
    "dalibi_slopes": "kDalibi",
    "dsinks": "kDsinks",
    "leftpad_k": "kLeftpad",
}

PASSES = {
    "fwd": ("kFwd", "FwdParams"),
    "bwd": ("kBwd", "BwdParams"),
    "probs": ("kProbs", "ProbsParams"),
    "append": ("kAppend", "AppendParams"),
    "rotary": ("kRotary", "RotaryParams"),
}

# name in a kernel's name: (DType, scalar type in csrc)
DTYPES = {
    "fp32": ("kFloat32", "float"),
    "bf16": ("kBFloat16", "bfloat16"),
    "fp16": ("kFloat16", "float16"),
    "fp64": ("kFloat64", "double"),
}

# Architectures that FLASH_EXT_ARCHS may name. Those without kernels are refused with the reason.
ARCHS = (
    *("cpu", "sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm120"),
    *("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"),
)

# NVIDIA architectures that have kernels, with the shared memory that a block may use there (KB),
# the key of the tile class's config.h. sm90 is compiled for sm_90a.
GPU_SMEM_KB = {
    "sm80": 163,
    "sm86": 99,
    "sm87": 163,
    "sm89": 99,
    "sm90": 227,
    "sm100": 227,
    "sm120": 99,
}
EXACT_ARCHS = ("sm87", "sm90")  # machine code of these runs on no other
BUILT_ARCHS = ("cpu", *GPU_SMEM_KB)


# (architecture, feature) -> why no kernel has it; shown by the error message.
SKIP = {
    **{(arch, feature): reason for arch in GPU_SMEM_KB for feature, reason in {}.items()},
}

# Instruction sets of the CPU kernels, best first: the first one that the processor has is used.
CPU_ISAS = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "generic": [],
}

COMMON = {
    "varlen",
    "gqa",
    "window",
    "softcap",
    "bias",
    "bool_mask",
    "alibi",
    "seqused",
    "deterministic",
}
CPU_FEATURES = {
    "fwd": COMMON | {"sinks", "dropout", "head_dim_v", "num_splits", "page_table", "leftpad_k"},
    "bwd": COMMON | {"sinks", "dropout", "head_dim_v", "dlse", "dbias", "dalibi_slopes", "dsinks"},
    "probs": COMMON | {"sinks", "dropout", "head_dim_v"},  # no v: any head_dim_v will do
    "append": {"varlen", "head_dim_v", "page_table"},
    "rotary": {"varlen"},
}
# Passes that move numbers and compute little: one build of them does for every processor.
CPU_PLAIN_PASSES = ("append", "rotary")


# What each kind of kernel of the tile class (mma.sync) declares. Kinds of one pass stand in order
# of preference: the first one that declares a call serves it.
CACHE = {"page_table", "leftpad_k"}
GPU_FEATURES = {
    "decode": COMMON | CACHE | {"sinks", "head_dim_v", "num_splits"},
    "fwd": COMMON | {"sinks", "dropout", "head_dim_v", "leftpad_k"},
    "fwd_paged": COMMON | CACHE | {"sinks", "dropout", "head_dim_v"},
    "bwd": COMMON | {"sinks", "dropout", "head_dim_v", "dlse", "dbias", "dalibi_slopes", "dsinks"},
    "append": {"varlen", "head_dim_v", "page_table"},
    "rotary": {"varlen"},
}
# kind -> (pass, file of csrc/cuda/tile), where they are not the kind's own name.
GPU_KINDS = {"decode": ("fwd", "decode"), "fwd_paged": ("fwd", "fwd")}
GPU_MOST_ROWS = {"decode": 64}  # query rows a key head; with more, the forward reads fewer bytes
GPU_ANY_HEAD_DIM = ("append", "rotary")  # one bucket
GPU_DTYPES = ("bf16", "fp16")
GPU_HEAD_DIMS = (64, 96, 128, 192, 256)  # buckets; smaller dims are predicated in the kernel

# What the Hopper class (wgmma, TMA) declares; the tile class serves the rest there.
HOPPER_FEATURES = {
    "fwd": {
        *("varlen", "gqa", "window", "softcap", "sinks", "seqused", "head_dim_v"),
        "deterministic",
    },
}
HOPPER_HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))  # qk, v


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel: a translation unit and a row of the table."""

    name: str
    arch: str
    kind: str  # what of a pass it is for; most often the pass itself
    pass_: str
    dtype: str
    head_dim: int  # largest that it serves, of q and k
    head_dim_v: int  # of v
    features: frozenset[str]
    row_alignment: int  # bytes
    most_rows: int  # query rows a key head that it is meant for; 0: any
    suffix: str  # of the translation unit
    prelude: str  # its first lines
    runs: str  # whether this code runs on the current device
    workspace: str  # bytes that it needs; params is the struct of its pass
    call: str  # the launch
    flags: tuple[str, ...]
    isa: str = ""

    def source(self) -> str:
        """The translation unit, compiled for its own target only."""
        params = f"static_cast<const {PASSES[self.pass_][1]}&>(any)"
        return (
            "// Generated from csrc/kernels.py.\n"
            f"{self.prelude}\n"
            "namespace flash {\n"
            f"bool runs_{self.name}() {{ return {self.runs}; }}\n"
            f"size_t workspace_{self.name}(const AttnParams& any) {{\n"
            f"  return {self.workspace}({params});\n"
            "}\n"
            f"void launch_{self.name}(const AttnParams& any, const Launch& launch) {{\n"
            f"  {self.call}({params}, launch);\n"
            "}\n"
            "}  // namespace flash\n"
        )

    def declarations(self) -> str:
        return (
            f"bool runs_{self.name}();\n"
            f"size_t workspace_{self.name}(const AttnParams&);\n"
            f"void launch_{self.name}(const AttnParams&, const Launch&);\n"
        )

    def entry(self) -> str:
        features = " | ".join(FEATURES[name] for name in FEATURES if name in self.features)
        return (
            f'    {{"{self.name}", "{self.arch}", Pass::{PASSES[self.pass_][0]},\n'
            f"     DType::{DTYPES[self.dtype][0]}, {self.head_dim}, {self.head_dim_v},\n"
            f"     {features},\n"
            f"     {self.most_rows}, {self.row_alignment}, runs_{self.name}, "
            f"workspace_{self.name}, launch_{self.name}}},\n"
        )


def cpu_kernels(machine: str) -> list[Kernel]:
    """`machine` as platform.machine() names it; the instruction sets above are those of x86-64."""
    isas = CPU_ISAS if machine in ("x86_64", "AMD64") else {"generic": CPU_ISAS["generic"]}
    return [
        Kernel(
            name=f"cpu_{pass_}_{dtype}_{isa}",
            arch="cpu",
            kind=pass_,
            pass_=pass_,
            dtype=dtype,
            head_dim=256,
            head_dim_v=256,
            features=frozenset(CPU_FEATURES[pass_]),
            row_alignment=1,
            most_rows=0,
            suffix=".cpp",
            prelude=(
                f'#define FLASH_CPU_ISA isa_{isa}\n#include "cpu/{pass_}.h"\n#include "cpu/isa.h"\n'
            ),
            runs=f"cpu::runs_{isa}()",
            workspace=f"cpu::{pass_}_workspace<{DTYPES[dtype][1]}>",
            call=f"cpu::{pass_}<{DTYPES[dtype][1]}>",
            flags=tuple(flags),
            isa=isa,
        )
        for isa, flags in isas.items()
        for pass_ in PASSES
        if isa == "generic" or pass_ not in CPU_PLAIN_PASSES
        for dtype in DTYPES
    ]


def gpu_flags(arch: str, newest: bool) -> tuple[str, ...]:
    """nvcc's target; the newest one of a build also carries PTX for GPUs that come later."""
    number = arch.removeprefix("sm")
    feature = "a" if arch == "sm90" else ""
    flags = [f"-gencode=arch=compute_{number}{feature},code=sm_{number}{feature}"]
    if newest:
        flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return tuple(flags)


def gpu_runs(arch: str, newest: bool) -> str:
    return (
        f"cuda::runs_on({arch_number(arch)}, {GPU_SMEM_KB[arch]}, "
        f"cuda::Runs::{'kExactly' if arch in EXACT_ARCHS else 'kSameMajor'}, "
        f"cuda::Carries::{'kCodeAndPtx' if newest else 'kCode'})"
    )


def hopper_kernels() -> list[Kernel]:
    """wgmma exists on sm_90a alone: no PTX of these kernels can serve a later GPU."""
    return [
        Kernel(
            name=f"sm90_wgmma_{pass_}_{dtype}_d{dim}" + (f"_v{dim_v}" if dim_v != dim else ""),
            arch="sm90",
            kind=f"wgmma_{pass_}",
            pass_=pass_,
            dtype=dtype,
            head_dim=dim,
            head_dim_v=dim_v,
            features=frozenset(HOPPER_FEATURES[pass_]),
            row_alignment=16,
            most_rows=0,
            suffix=".cu",
            prelude=f'#include "cuda/sm90/{pass_}.cuh"\n#include "kernel_table.h"\n',
            runs=gpu_runs("sm90", newest=False),
            workspace=f"cuda::sm90::{pass_}_workspace",
            call=f"cuda::sm90::{pass_}<{DTYPES[dtype][1]}, {dim}, {dim_v}>",
            flags=gpu_flags("sm90", newest=False),
        )
        for pass_ in HOPPER_FEATURES
        for dtype in GPU_DTYPES
        for dim, dim_v in HOPPER_HEAD_DIMS
    ]


def tile_kernels(arch: str, newest: bool) -> list[Kernel]:
    smem = GPU_SMEM_KB[arch]
    runs = gpu_runs(arch, newest)

    def kernel(kind: str, dtype: str, head_dim: int) -> Kernel:
        pass_, file = GPU_KINDS.get(kind, (kind, kind))
        plain = kind in GPU_ANY_HEAD_DIM
        types = DTYPES[dtype][1] + ("" if plain else f", {head_dim}, {smem}")
        return Kernel(
            name=f"{arch}_{kind}_{dtype}_d{head_dim}",
            arch=arch,
            kind=kind,
            pass_=pass_,
            dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim,
            features=frozenset(GPU_FEATURES[kind]),
            row_alignment=1 if plain else 16,
            most_rows=GPU_MOST_ROWS.get(kind, 0),
            suffix=".cu",
            prelude=f'#include "cuda/tile/{file}.cuh"\n#include "kernel_table.h"\n',
            runs=runs,
            workspace=f"cuda::{kind}_workspace<{types}>",
            call=f"cuda::{kind}<{types}>",
            flags=gpu_flags(arch, newest),
        )

    return [
        kernel(kind, dtype, head_dim)
        for kind in GPU_FEATURES
        for dtype in GPU_DTYPES
        for head_dim in (GPU_HEAD_DIMS[-1:] if kind in GPU_ANY_HEAD_DIM else GPU_HEAD_DIMS)
    ]


def gpu_kernels(arch: str, newest: bool) -> list[Kernel]:
    """In order of preference: what is meant for few rows, Hopper's own, the tile class."""
    tile = tile_kernels(arch, newest)
    return [
        *(kernel for kernel in tile if kernel.most_rows),
        *(hopper_kernels() if arch == "sm90" else []),
        *(kernel for kernel in tile if not kernel.most_rows),
    ]


def arch_number(arch: str) -> int:
    return int(arch.removeprefix("sm"))


def kernels(archs: str | Sequence[str], machine: str = platform.machine()) -> list[Kernel]:
    """The kernels of some architectures of one library, in order of preference."""
    archs = [archs] if isinstance(archs, str) else list(dict.fromkeys(archs))
    for arch in archs:
        if arch not in ARCHS:
            raise ValueError(f"architecture {arch!r} is not one of {', '.join(ARCHS)}")
        if arch not in BUILT_ARCHS:
            raise ValueError(
                f"architecture {arch!r} has no kernels yet; those that have: "
                f"{', '.join(BUILT_ARCHS)}"
            )
    if archs == ["cpu"]:
        return cpu_kernels(machine)
    if "cpu" in archs:
        raise ValueError("cpu and GPU kernels go into different libraries; ask for one of them")
    ordered = sorted(archs, key=arch_number, reverse=True)
    return [kernel for arch in ordered for kernel in gpu_kernels(arch, arch == ordered[0])]


def table_source(rows: list[Kernel]) -> str:
    """The kernel table of one library."""
    archs = {row.arch for row in rows}
    skips = {key: reason for key, reason in SKIP.items() if key[0] in archs}
    return (
        "// Generated from csrc/kernels.py.\n"
        '#include "kernel_table.h"\n\n'
        "namespace flash {\n"
        + "".join(row.declarations() for row in rows)
        + "\nconst KernelEntry kKernelTable[] = {\n"
        + "".join(row.entry() for row in rows)
        + "};\n"
        f"const int kKernelTableSize = {len(rows)};\n\n"
        "const SkipReason kSkipReasons[] = {\n"
        + "".join(
            f'    {{"{arch}", {FEATURES[feature]}, "{reason}"}},\n'
            for (arch, feature), reason in skips.items()
        )
        + "};\n"
        f"const int kSkipReasonsSize = {len(skips)};\n"
        "}  // namespace flash\n"
    )


# What the README calls the kinds.
SUPPORT_KINDS = {
    "fwd": "forward",
    "fwd_paged": "forward over pages",
    "decode": "forward of few rows, or in splits",
    "bwd": "backward",
    "probs": "probabilities",
    "append": "append to a cache",
    "rotary": "rotary",
    "wgmma_fwd": "forward",
}


def support_rows() -> list[dict[str, str]]:
    """What is declared, for people: one row a backend, kind and feature set."""
    rows = []
    backends = (("cpu", "cpu"), ("cuda, sm80 and later", "sm80"), ("cuda, Hopper's own", "sm90"))
    for backend, arch in backends:
        for kind, title in SUPPORT_KINDS.items():
            chosen = [kernel for kernel in kernels(arch) if kernel.kind == kind]
            if not chosen or (arch == "sm90" and not kind.startswith("wgmma")):
                continue
            declared = [name for name in FEATURES if all(name in k.features for k in chosen)]
            rows.append(
                {
                    "arch": arch,
                    "backend": backend,
                    "pass": title,
                    "dtypes": ", ".join(dict.fromkeys(kernel.dtype for kernel in chosen)),
                    "head_dim": f"1-{max(kernel.head_dim for kernel in chosen)}",
                    "features": ", ".join(declared),
                }
            )
    return rows


def write_if_changed(path: Path, text: str) -> None:
    """Leaves an equal file alone, so that only what changed is compiled again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def generate(
    archs: list[str], out: Path, only: str = "", machine: str = platform.machine()
) -> list[dict]:
    """Writes the translation units of one library and returns them as {source, flags, isa}.

    `only` keeps the kernels whose name contains it: for building one kernel quickly.
    """
    rows = [kernel for kernel in kernels(archs, machine) if only in kernel.name]
    if not rows:
        raise ValueError(f"no kernel name of {', '.join(archs)} contains {only!r}")
    out.mkdir(parents=True, exist_ok=True)
    units = []
    for row in rows:
        write_if_changed(out / f"{row.name}{row.suffix}", row.source())
        units.append(
            {"source": f"{row.name}{row.suffix}", "flags": list(row.flags), "isa": row.isa}
        )
    write_if_changed(out / "kernel_table_data.cpp", table_source(rows))
    units.append({"source": "kernel_table_data.cpp", "flags": [], "isa": "generic"})
    for stale in {path.name for path in out.glob("*.c*")} - {unit["source"] for unit in units}:
        (out / stale).unlink()
    write_if_changed(out / "manifest.json", json.dumps(units, indent=1))
    return units


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archs", default="cpu", help="comma-separated: " + ",".join(ARCHS))
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--only", default="", help="keep kernels whose name contains this")
    parser.add_argument("--machine", default=platform.machine(), help="processor to build for")
    args = parser.parse_args()
    try:
        generate(args.archs.split(","), args.out, args.only, args.machine)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
