"""The CPU kernels under the compiler's sanitizers: tests/native/sanitize.cpp, built and run.

Every instruction set that this processor has. Whether the compiler instruments vectors of 32 and 64
bytes at all is asked first, of a program with an access that goes one element too far.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import flash_ext

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "tools"))
import native_build  # noqa: E402

pytestmark = pytest.mark.slow


def run(command, **options):
    done = subprocess.run(
        [*map(str, command)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )
    return done.returncode, done.stdout


def skip_without_runtime(flags, directory):
    """Skips when the compiler cannot link, or this machine not run, a sanitized program."""
    source, program = directory / "empty.cpp", directory / "empty"
    source.write_text("int main() {}\n")
    status, output = run([native_build.compiler(), *flags, source, "-o", program])
    if status == 0:
        status, output = run([program])
    if status != 0:
        last = (output.strip() or "no message").splitlines()[-1]
        pytest.skip(f"{native_build.compiler()} {' '.join(flags)} does not work here: {last}")


def cxx(flags):
    """The compiler at -O1, so that traces name lines."""
    common = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", f"-I{native_build.CSRC}"]
    return [native_build.compiler(), *common, *flags]


def build(kernels, flags, directory):
    """The program with the kernels whose name contains `kernels`."""
    units = native_build.load_manifest().generate(["cpu"], directory / "generated", kernels)
    sources = {directory / "generated" / unit["source"]: unit["flags"] for unit in units}
    sources[native_build.CSRC / "kernel_table.cpp"] = []
    sources[ROOT / "tests" / "native" / "sanitize.cpp"] = []

    def compile_unit(source):
        target = directory / f"{source.stem}.o"
        command = [*cxx([*flags, *sources[source]]), "-c", source, "-o", target]
        status, output = run(command)
        assert status == 0, output
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_unit, sources))
    program = directory / "sanitize"
    status, output = run([*cxx(flags), *objects, "-pthread", "-o", program])
    assert status == 0, output
    return program


def instruction_sets():
    """Those that this processor has, best first: the one whose kernel serves, and all after it."""
    x = torch.zeros(1, 1, 1, 1)
    serves = re.search(r"serves: cpu_fwd_fp32_(\w+)", flash_ext.explain(x, x, x))[1]
    known = list(native_build.load_manifest().CPU_ISAS)
    return known[known.index(serves) :]


ISAS = instruction_sets()


@pytest.mark.parametrize("isa", ISAS)
def test_the_compiler_sees_a_vector_that_reaches_too_far(isa, tmp_path):
    """Without this a clean run of the kernels would mean nothing."""
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    skip_without_runtime(flags, tmp_path)
    flags += native_build.load_manifest().CPU_ISAS[isa]
    program = tmp_path / "overrun"
    source = ROOT / "tests" / "native" / "overrun.cpp"
    status, output = run([*cxx(flags), source, "-o", program])
    assert status == 0, output
    width = {"generic": 16, "avx2": 32, "avx512": 64}[isa]
    end = 64 - width // 4  # of the block of 64 floats: the last place where a vector fits
    for access in ("load", "store"):
        for at in (0, end):
            assert run([program, access, at]) == (0, "")
        for at in (-1, end + 1):
            status, output = run([program, access, at])
            assert status != 0 and f"of size {width}" in output, (access, at, output)


# fp64 and fp16 take the same code as fp32 and bf16 with another number type.
RUNS = [(f"{dtype}_{isa}", "address,undefined") for isa in ISAS for dtype in ("fp32", "bf16")]
RUNS += [("fp32_generic", "thread")]


@pytest.mark.parametrize("kernels, sanitizers", RUNS)
def test_cpu_kernels_are_clean(kernels, sanitizers, tmp_path):
    """Forward, backward, probabilities and appends: edges, features, lengths out of range."""
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    skip_without_runtime(flags, tmp_path)
    status, output = run([build(kernels, flags, tmp_path)], timeout=300)
    assert status == 0 and output.endswith(" 0 failed\n"), output[-8000:]
