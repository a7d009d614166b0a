"""Tests of GPU kernels; `pytest tests/gpu -m gpu` runs them alone.

They are skipped, with the reason, where no kernel of the built libraries runs on the GPU. Memory
that a test has not written reads as NaN.
"""

import math

import gpu_util
import pytest
import torch


@pytest.fixture(scope="session")
def device():
    """These tests have no other."""
    return "cuda"


@pytest.fixture(scope="session")
def dtype():
    return torch.bfloat16


@pytest.fixture(autouse=True)
def served_gpu():
    """Skips what no kernel could serve; the parent's conftest skips where there is no GPU."""
    if gpu_util.arch() is None:
        pytest.skip(f"gpu: no kernel of this build runs on {torch.cuda.get_device_name()}")


@pytest.fixture(autouse=True)
def poisoned_allocator(served_gpu):
    """What torch's allocator hands out next holds NaN of bf16, fp16 and fp32 alike.

    16 blocks of the pool for up to 1 MiB, and one large block that others are split from.
    """
    torch.cuda.synchronize()
    shapes = [1 << 19] * 16 + [1 << 27]
    blocks = [torch.full((n,), math.nan, dtype=torch.bfloat16, device="cuda") for n in shapes]
    del blocks
    yield
    torch.cuda.synchronize()  # a fault belongs to the test that caused it
