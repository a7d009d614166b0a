"""Memory is O(seqlen): semantics.md's operators never hold a score matrix.

Measured in a process of its own, because the peak of this one is some other test's. Linux keeps the
peak in /proc/self/status (VmHWM), which a write to /proc/self/clear_refs sets back to the present.
"""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")

ROOT = Path(__file__).resolve().parent.parent

# Prints the peak above what lies there before the call, in bytes, and the size of q, k, v, out and
# the gradients. A first small call loads every page of the library that a call needs.
PROGRAM = """
    import re, sys
    sys.path.insert(0, {root!r})
    import torch, flash_ext

    def memory(name):
        text = open("/proc/self/status").read()
        return int(re.search(name + r":\\s+(\\d+) kB", text)[1]) * 1024

    def inputs(seqlen):
        make = lambda: torch.randn(1, seqlen, 1, 64, dtype={dtype}).requires_grad_()
        return [make() for _ in range(3)]

    def call(tensors, backward):
        out = flash_ext.attention(*tensors, causal={causal}, num_splits={num_splits})
        if backward:
            out.backward(torch.ones_like(out))
            return [out, *(x.grad for x in tensors)]
        return [out]

    torch.set_num_threads({threads})
    for warm_up in range(2):
        call(inputs(256), {backward})
    tensors = inputs({seqlen})
    open("/proc/self/clear_refs", "w").write("5")
    before = memory("VmRSS")
    results = call(tensors, {backward})
    peak = memory("VmHWM") - before
    print(peak, sum(x.numel() * x.element_size() for x in tensors + results))
"""


def measure(seqlen, dtype="torch.float32", backward=True, causal=True, num_splits=0, threads=2):
    """(peak, size of inputs and results) in bytes."""
    program = textwrap.dedent(PROGRAM).format(root=str(ROOT), **locals())
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    peak, size = map(int, re.fullmatch(r"(\d+) (\d+)", done.stdout.strip()).groups())
    return peak, size


SEQLEN = 16 * 1024


def test_forward_and_backward_of_16k_rows():
    """Under four times (q, k, v, out, dq, dk, dv); one score matrix in fp32 would be 1 GiB.

    What the call adds: out, dq, dk, dv, dq's fp32 accumulators (one a chunk of keys), lse, delta
    and each thread's tiles.
    """
    peak, size = measure(SEQLEN)
    print(f"peak {peak / 2**20:.1f} MiB, tensors {size / 2**20:.1f} MiB")
    assert peak + size * 3 / 7 < 4 * size  # with q, k, v, which were there before
    assert peak > size / 7, "less than one result: the measurement is broken"


def test_forward_and_backward_in_16_bits():
    """dq's accumulators are fp32 here too."""
    peak, size = measure(SEQLEN, "torch.bfloat16")
    print(f"peak {peak / 2**20:.1f} MiB, tensors {size / 2**20:.1f} MiB")
    assert peak + size * 3 / 7 < 4 * size


@pytest.mark.parametrize("num_splits", [0, 4])
def test_forward_alone(num_splits):
    """out and lse; with splits one more fp32 out and lse a split."""
    peak, size = measure(SEQLEN, backward=False, num_splits=num_splits)
    out = size / 4
    print(f"peak {peak / 2**20:.1f} MiB, out {out / 2**20:.1f} MiB")
    assert peak < out * (1 + num_splits) * 65 / 64 + 2**22  # tiles and the heap's own
    assert peak > out / 2


def test_memory_grows_with_seqlen_not_its_square():
    small, large = (measure(n, threads=1)[0] for n in (SEQLEN, 2 * SEQLEN))
    print(f"peak {small / 2**20:.1f} MiB at 16k, {large / 2**20:.1f} MiB at 32k")
    assert large < 2.5 * small
