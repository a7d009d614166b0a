"""Where the suite runs and what it leaves out there.

`pytest --device cuda` runs the same tests on a GPU. Tests marked `gpu` need one in any case.
"""

import atexit
import os
import shutil
import tempfile

import hypothesis
import pytest

# Before torch loads its OpenMP: threads that wait for each other sleep instead of spinning. On a
# machine with other work than these small cases spinning takes twenty times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# torch keeps compiled programs over runs and does not see that an operator's schema has changed.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="flash_ext_inductor_")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import torch

hypothesis.settings.register_profile(
    "flash_ext", deadline=None, derandomize=True, print_blob=False, database=None
)
hypothesis.settings.load_profile("flash_ext")


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="the device that the tests run on")


@pytest.fixture(scope="session")
def device(request):
    """The device that inputs are made on."""
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def dtype(device):
    """The most precise dtype that the device's kernels take, fp64 aside."""
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="gpu: this machine has none"))


@pytest.fixture
def restored_threads():
    """torch's number of threads is put back after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
