"""The CPU kernels under the compiler's sanitizers: tests/native/sanitize.cpp, built and run.

Only the generic instruction set: g++'s AddressSanitizer does not look at vectors above 16 bytes.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

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


def build(kernels, flags, directory):
    """The program with the kernels whose name contains `kernels`."""
    units = native_build.load_manifest().generate(["cpu"], directory / "generated", kernels)
    sources = [directory / "generated" / unit["source"] for unit in units]
    sources += [native_build.CSRC / "kernel_table.cpp", ROOT / "tests" / "native" / "sanitize.cpp"]
    cxx = [native_build.compiler(), "-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", *flags]

    def compile_unit(source):
        target = directory / f"{source.stem}.o"
        status, output = run([*cxx, f"-I{native_build.CSRC}", "-c", source, "-o", target])
        assert status == 0, output
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_unit, sources))
    program = directory / "sanitize"
    status, output = run([*cxx, *objects, "-pthread", "-o", program])
    assert status == 0, output
    return program


@pytest.mark.parametrize(
    "dtype, sanitizers",
    [("fp32", "address,undefined"), ("bf16", "address,undefined"), ("fp32", "thread")],
)
def test_cpu_kernels_are_clean(dtype, sanitizers, tmp_path):
    """Forward, backward, probabilities and appends: edges, features, lengths out of range."""
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    skip_without_runtime(flags, tmp_path)
    status, output = run([build(f"{dtype}_generic", flags, tmp_path)], timeout=120)
    assert status == 0 and output.endswith(" 0 failed\n"), output[-8000:]
