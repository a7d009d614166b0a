"""Wheels: which one a machine needs, what the command prints, and one built, installed and used."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import flash_ext
from flash_ext import machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import native_build  # noqa: E402

manifest = native_build.load_manifest()


def run(*command, **environment):
    """Standard output and error of a program that must succeed."""
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=environment.pop("PWD", ROOT),
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# ---- which wheel ---------------------------------------------------------------------------------


def test_the_architectures_are_the_manifests():
    assert machine.WHEELS == manifest.GPU_SMEM_KB
    assert machine.EXACT == manifest.EXACT_ARCHS


@pytest.mark.parametrize(
    "built, arch, expected",
    [
        (["sm90"], "sm90", True),
        (["sm80"], "sm90", True),  # the newest of a build carries PTX
        (["sm80", "sm120"], "sm90", False),  # PTX of sm120 alone
        (["sm90"], "sm80", False),
        (["sm86"], "sm89", True),
        (["sm86", "sm90"], "sm89", True),  # the same major version
        (["sm80"], "sm86", False),  # a block has less shared memory there
        (["sm80", "sm90"], "sm87", False),  # Tegra runs its own code alone
        (["sm100"], "sm103", True),
        (["sm120"], "sm121", True),
        (["sm90"], "sm120", False),  # less shared memory
        (["sm86"], "sm75", False),
        ([], "sm90", False),
    ],
)
def test_which_gpu_runs_what_was_built(built, arch, expected):
    assert machine.runs_on(built, arch) is expected


@pytest.mark.parametrize(
    "arch, wheel",
    [("sm90", "sm90"), ("sm87", "sm87"), ("sm103", "sm100"), ("sm121", "sm120"), ("sm75", None)],
)
def test_which_wheel_a_gpu_needs(arch, wheel):
    assert machine.wheel_for(arch) == wheel


def test_a_wheel_for_another_gpu_names_the_right_one():
    hopper, turing = machine.Gpu("NVIDIA H200", "sm90"), machine.Gpu("Tesla T4", "sm75")
    message = machine.wrong_build(["sm120"], [hopper])
    assert "GPU kernels for sm120 alone" in message
    assert f"take the wheel flash_ext-{flash_ext.__version__}+sm90" in message
    assert "FLASH_EXT_ARCHS=sm90" in message
    assert "no wheel has kernels for Tesla T4 (sm75)" in machine.wrong_build(["sm90"], [turing])
    assert machine.wrong_build(["sm90"], [turing, hopper]) is None, "one of them is served"
    assert machine.wrong_build(["sm90"], []) is None
    assert machine.wrong_build([], [hopper]) is None, "a CPU build promises nothing"


FAKE_NVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = (void*)(unsigned long)(index + 1);
  return 0;
}
int nvmlDeviceGetName(void* device, char* name, unsigned length) {
  strncpy(name, device == (void*)1 ? "First" : "Second", length);
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void* device, int* major, int* minor) {
  *major = device == (void*)1 ? 9 : 12, *minor = 0;
  return 0;
}
"""


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    """The environment of a process that finds a driver's library with two GPUs."""
    folder = tmp_path_factory.mktemp("nvml")
    source = folder / "nvml.c"
    source.write_text(FAKE_NVML)
    library = folder / "libnvidia-ml.so.1"
    run(native_build.compiler(), "-x", "c", "-shared", "-fPIC", source, "-o", library)
    return {"LD_LIBRARY_PATH": str(folder)}


def test_gpus_are_found_by_the_drivers_library(two_gpus):
    code = "from flash_ext import machine; print(*machine.nvidia_gpus(), sep='\\n')"
    printed = run(sys.executable, "-c", code, PYTHONPATH=str(ROOT), **two_gpus)
    assert printed.splitlines() == [
        "Gpu(name='First', arch='sm90')",
        "Gpu(name='Second', arch='sm120')",
    ]


def test_a_gpu_tensor_in_a_cpu_build_is_told_which_wheel(two_gpus, tmp_path):
    """The dispatch key that a GPU tensor would bring, in a copy that has no GPU library."""
    package = Path(flash_ext.__file__).parent
    ignore = shutil.ignore_patterns("_C_*.so", "__pycache__")
    shutil.copytree(package, tmp_path / "flash_ext", ignore=ignore)
    code = (
        "import torch; torch.version.cuda = '13.0'\n"
        "import flash_ext\n"
        "x = torch.zeros(1, 2, 1, 8)\n"
        "cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)\n"
        "try: torch.ops.flash.attn.default.redispatch(cuda, x, x, x)\n"
        "except RuntimeError as error: print(error)"
    )
    printed = run(sys.executable, "-c", code, PYTHONPATH=str(tmp_path), **two_gpus)
    assert f"for First (sm90) take the wheel flash_ext-{flash_ext.__version__}+sm90" in printed


# ---- python -m flash_ext -------------------------------------------------------------------------


def test_the_command_tells_what_is_here(two_gpus):
    printed = run(sys.executable, "-m", "flash_ext", PYTHONPATH=str(ROOT), **two_gpus)
    assert printed.startswith(f"flash_ext {flash_ext.__version__}")
    assert f"torch {torch.__version__}" in printed
    assert "_C.abi3.so (schemas, CPU kernels): loaded" in printed
    x = torch.zeros(1, 1, 1, 64)
    serves = flash_ext.explain(x, x, x).split("serves: ")[1].split("\n")[0]
    assert f"forward: {serves}" in printed
    assert "cpu backward: float32, bfloat16, float16, float64; head_dim to 256" in printed
    assert "the driver names First (sm90)" in printed
    if not torch.version.cuda:
        assert "needs a CUDA build of torch" in printed


# ---- a wheel -------------------------------------------------------------------------------------

SMOKE = """
import torch, flash_ext
q, k, v = (torch.randn(2, 70, 4, 64, requires_grad=True) for _ in range(3))
out = flash_ext.attention(q, k, v, causal=True)
ref = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, ref)]
torch.testing.assert_close(out, ref)
for x, y in zip(*grads):
    torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
print(flash_ext.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A CPU wheel of a few kernels, built by the tool in a copy of the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "results")
    for name in ("csrc", "flash_ext", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, copy)
    command = [copy / "tools" / "wheel.py", "cpu", "--out", folder / "dist"]
    printed = run(sys.executable, *command, FLASH_EXT_ONLY="fp32_generic", PWD=copy)
    (found,) = (folder / "dist").glob("*")
    assert str(found) in printed
    return found


@pytest.mark.slow
def test_the_wheels_name_says_what_it_is_for(wheel):
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version) == ("flash_ext", f"{flash_ext.__version__}+cpu")
    assert (python, abi) == ("cp310", "abi3")
    assert platform.startswith("manylinux_"), "what auditwheel found"


@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_environment(wheel, tmp_path):
    """Of this tree it sees nothing; torch comes from this environment, by a .pth file."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    install = ["--python", python, "install", "--no-index", "--no-deps", wheel]
    run(sys.executable, "-m", "pip", *install)
    site = "import sysconfig; print(sysconfig.get_path('purelib'))"
    (target,) = run(python, "-c", site).split()
    (Path(target) / "torch_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    printed = run(python, "-c", SMOKE, PYTHONPATH="", PWD=tmp_path)
    assert Path(printed.strip()).is_relative_to(target)
    printed = run(python, "-m", "flash_ext", PYTHONPATH="", PWD=tmp_path)
    assert printed.startswith(f"flash_ext {flash_ext.__version__}+cpu in {target}")
    assert "forward: cpu_fwd_fp32_generic" in printed


def other_pythons():
    """Interpreters of other versions on the path that have a torch which the wheel serves."""
    found = []
    for minor in range(10, 20):
        python = shutil.which(f"python3.{minor}")
        if python is None or minor == sys.version_info.minor:
            continue
        code = "import torch; assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 10)"
        if subprocess.run([python, "-c", code], capture_output=True).returncode == 0:
            found.append(python)
    return found


@pytest.mark.slow
def test_the_wheel_works_under_another_python_and_torch(wheel, tmp_path):
    pythons = other_pythons()
    if not pythons:
        pytest.skip("no other Python on the path has torch >= 2.10")
    for python in pythons:
        target = tmp_path / Path(python).name
        options = ["install", "--no-index", "--no-deps", "--target", target, wheel]
        run(sys.executable, "-m", "pip", "--python", python, *options)
        printed = run(python, "-W", "ignore", "-c", SMOKE, PYTHONPATH=str(target), PWD=tmp_path)
        assert Path(printed.strip()).is_relative_to(target)
