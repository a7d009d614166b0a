"""From the manifest to a library: generation, names, and what a source distribution holds.

Builds happen in a copy or a temporary directory; the tree itself is only read.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import flash_ext

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

sys.path.insert(0, str(ROOT / "tools"))
import native_build  # noqa: E402

manifest = native_build.load_manifest()
ALL_KERNELS = [kernel for arch in manifest.BUILT_ARCHS for kernel in manifest.kernels(arch)]
UNBUILT = [arch for arch in manifest.ARCHS if arch not in manifest.BUILT_ARCHS]


def run_python(*args, cwd=ROOT, **environment):
    """(exit status, stdout and stderr) of this Python with more environment variables."""
    env = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout


# ---- the manifest --------------------------------------------------------------------------------


def enumerators(header, pattern):
    return re.findall(pattern, (CSRC / header).read_text())


def test_feature_names_follow_the_header():
    """The bit, the manifest's order and the names of messages are one list in three places."""
    bits = enumerators("kernel_table.h", r"\b(k\w+) = 1u << (\d+)")
    assert [int(bit) for _, bit in bits] == list(range(len(bits)))
    assert list(manifest.FEATURES.values()) == [name for name, _ in bits]
    assert enumerators("kernel_table.h", r"kNumFeatures = (\d+)") == [str(len(bits))]
    (names,) = enumerators("kernel_table.cpp", r"(?s)kFeatureNames\[kNumFeatures\] = \{(.*?)\}")
    assert re.findall(r'"(\w+)"', names) == list(manifest.FEATURES)


def test_passes_and_dtypes_are_those_of_the_headers():
    (passes,) = enumerators("kernel_table.h", r"enum class Pass : int \{(.*?)\}")
    assert [enum for enum, _ in manifest.PASSES.values()] == passes.replace(" ", "").split(",")
    (dtypes,) = enumerators("common/number.h", r"enum class DType : int \{(.*?)\}")
    assert {enum for enum, _ in manifest.DTYPES.values()} <= set(dtypes.replace(" ", "").split(","))


def test_kernel_rows_are_sound():
    names = [kernel.name for kernel in ALL_KERNELS]
    assert len(names) == len(set(names)), "a name is a symbol: it must be unique"
    for kernel in ALL_KERNELS:
        assert kernel.features <= set(manifest.FEATURES), kernel.name
        assert re.fullmatch(r"\w+", kernel.name)


@pytest.mark.parametrize("arch", manifest.BUILT_ARCHS)
def test_a_feature_is_declared_or_its_lack_has_a_reason(arch):
    declared = set().union(*(kernel.features for kernel in manifest.kernels(arch)))
    reasons = {feature for where, feature in manifest.SKIP if where == arch}
    assert declared | reasons == set(manifest.FEATURES)
    assert declared & reasons == set()


def test_unknown_and_unbuilt_architectures_are_refused():
    with pytest.raises(ValueError, match=r"'sm75' is not one of cpu, .*sm90"):
        manifest.kernels("sm75")
    for arch in UNBUILT:
        with pytest.raises(ValueError, match=f"'{arch}' has no kernels yet"):
            manifest.kernels(arch)


def test_support_rows_say_what_every_kernel_declares():
    rows = manifest.support_rows()
    assert {row["arch"] for row in rows} == {"cpu", "sm80", "sm90"}

    def tile(arch):  # whose rows on sm80 stand for every sm
        return [k for k in manifest.kernels(arch) if not k.kind.startswith("wgmma")]

    for arch in manifest.GPU_SMEM_KB:
        assert {k.features for k in tile(arch)} == {k.features for k in tile("sm80")}
    for row in rows:
        features = row["features"].split(", ")
        assert features == [name for name in manifest.FEATURES if name in features]
        kernels = [
            kernel
            for kernel in manifest.kernels(row["arch"])
            if manifest.SUPPORT_KINDS[kernel.kind] == row["pass"]
            and kernel.kind.startswith("wgmma") == (row["arch"] == "sm90")
        ]
        assert all(set(features) <= kernel.features for kernel in kernels)
        assert row["dtypes"].split(", ") == list(dict.fromkeys(k.dtype for k in kernels))


def test_the_library_has_the_table_of_the_manifest():
    """A library built from an older manifest, or with FLASH_EXT_ONLY, shows here."""
    dtypes = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
    passes = {"fwd": "forward", "bwd": "backward"}
    expected = [
        {
            "name": kernel.name,
            "arch": kernel.arch,
            "pass": passes.get(kernel.pass_, kernel.pass_),
            "dtype": dtypes[kernel.dtype],
            "head_dim": kernel.head_dim,
            "head_dim_v": kernel.head_dim_v,
            "features": [name for name in manifest.FEATURES if name in kernel.features],
        }
        for kernel in manifest.kernels("cpu")
    ]
    rows = json.loads(torch.ops.flash.kernels())
    assert [row for row in rows if row["arch"] == "cpu"] == expected


# ---- generation ----------------------------------------------------------------------------------


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_generation_is_deterministic(tmp_path):
    units = manifest.generate(["cpu"], tmp_path / "a", machine="x86_64")
    assert manifest.generate(["cpu"], tmp_path / "b", machine="x86_64") == units
    files = contents(tmp_path / "a")
    assert files == contents(tmp_path / "b")
    assert files.keys() == {"manifest.json", *(unit["source"] for unit in units)}
    assert json.loads(files["manifest.json"]) == units


def test_unchanged_files_are_not_written_again(tmp_path):
    """ninja compiles what is newer: a write without a change would cost minutes."""
    manifest.generate(["cpu"], tmp_path)
    paths = sorted(tmp_path.iterdir())
    changed = paths[0]
    changed.write_text("// edited")
    for path in paths:
        os.utime(path, ns=(0, 0))
    manifest.generate(["cpu"], tmp_path)
    assert [path for path in paths if path.stat().st_mtime_ns] == [changed]
    ninja = [[(CSRC / "kernel_table.cpp", ())], tmp_path / "x.so", [], []]
    native_build.write_ninja(tmp_path, *ninja)
    os.utime(tmp_path / "build.ninja", ns=(0, 0))
    native_build.write_ninja(tmp_path, *ninja)
    assert (tmp_path / "build.ninja").stat().st_mtime_ns == 0


def test_only_keeps_the_named_kernels_and_removes_the_others(tmp_path):
    manifest.generate(["cpu"], tmp_path, machine="x86_64")
    units = manifest.generate(["cpu"], tmp_path, only="fwd_bf16", machine="x86_64")
    names = [f"cpu_fwd_bf16_{isa}" for isa in manifest.CPU_ISAS]
    assert [unit["source"] for unit in units] == [f"{name}.cpp" for name in names] + [
        "kernel_table_data.cpp"
    ]
    assert {path.stem for path in tmp_path.glob("*.cpp")} == {*names, "kernel_table_data"}
    table = (tmp_path / "kernel_table_data.cpp").read_text()
    assert re.findall(r'\{"(\w+)", "cpu"', table) == names
    assert "kKernelTableSize = 3;" in table
    with pytest.raises(ValueError, match="no kernel name of cpu contains 'nonsense'"):
        manifest.generate(["cpu"], tmp_path, only="nonsense")


def test_another_processor_gets_the_portable_kernels_only(tmp_path):
    units = manifest.generate(["cpu"], tmp_path, machine="aarch64")
    assert {unit["isa"] for unit in units} == {"generic"}
    assert not any(unit["flags"] for unit in units)
    x86 = manifest.kernels("cpu", "x86_64")
    portable = {kernel.name for kernel in x86 if kernel.isa == "generic"}
    assert {kernel.name for kernel in manifest.kernels("cpu", "aarch64")} == portable


# ---- setup.py ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "archs, message",
    [
        ("sm75", "FLASH_EXT_ARCHS names sm75; allowed are cpu, "),
        *(
            (arch, f"FLASH_EXT_ARCHS names {arch}, for which this version has no kernels")
            for arch in UNBUILT[:1]
        ),
    ],
)
def test_setup_refuses_architectures_by_name(tmp_path, archs, message):
    command = ["setup.py", "-q", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path]
    status, output = run_python(*command, FLASH_EXT_ARCHS=archs)
    assert status != 0 and message in output
    assert "Traceback" not in output


def test_the_version_stands_in_one_place():
    status, output = run_python("setup.py", "--version")
    assert (status, output.split()[-1]) == (0, flash_ext.__version__)
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "flash_ext/__init__.py"):
        assert flash_ext.__version__ not in re.findall(r'"([\d.]+)"', (ROOT / name).read_text()), (
            name
        )


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory):
    """The unpacked source distribution."""
    out = tmp_path_factory.mktemp("sdist")
    command = ["setup.py", "-q", "egg_info", "--egg-base", out, "sdist", "--dist-dir", out]
    status, output = run_python(*command)
    assert status == 0, output
    (archive,) = out.glob("*.tar.gz")
    assert archive.name == f"flash_ext-{flash_ext.__version__}.tar.gz"
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="data")
    return out / archive.name.removesuffix(".tar.gz")


def test_source_distribution_is_complete(source_distribution):
    """What builds, tests and documents; nothing compiled."""
    folders = ("csrc", "docs", "examples", "flash_ext", "requirements", "tests", "tools")
    wanted = {path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()}
    wanted = {str(path.relative_to(ROOT)) for path in wanted if "__pycache__" not in path.parts}
    wanted = {name for name in wanted if not name.endswith((".so", ".pyc"))}
    wanted |= {"CMakeLists.txt", "LICENSE", "Makefile", "README.md", "pyproject.toml", "setup.py"}
    got = {str(path.relative_to(source_distribution)) for path in source_distribution.rglob("*")}
    assert wanted <= got, sorted(wanted - got)
    assert [name for name in got if name.endswith((".so", ".o", ".pyc"))] == []


@pytest.mark.slow
def test_source_distribution_builds_a_library(source_distribution, tmp_path):
    """One small kernel, in a process that sees nothing of this tree."""
    command = ["setup.py", "-q", "build_ext", "--build-lib", tmp_path]
    status, output = run_python(
        *command,
        cwd=source_distribution,
        FLASH_EXT_ONLY="probs_fp64_generic",
        FLASH_EXT_ARCHS="cpu",
    )
    assert status == 0, output
    (library,) = tmp_path.rglob("_C.abi3.so")
    code = (
        f"import torch; torch.ops.load_library({str(library)!r}); print(torch.ops.flash.kernels())"
    )
    status, output = run_python("-c", code, cwd=tmp_path)
    assert status == 0, output
    assert [row["name"] for row in json.loads(output)] == ["cpu_probs_fp64_generic"]
