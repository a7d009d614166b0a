"""Selective activation checkpointing, jagged nested tensors and DTensor."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import util
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flash_ext

# ---- selective activation checkpointing ----------------------------------------------------------


class CountAttention(TorchDispatchMode):
    """How often flash::attn runs."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is torch.ops.flash.attn.default
        return func(*args, **(kwargs or {}))


def keep_attention(ctx, op, *args, **kwargs):
    """The policy of docs/features.md: everything is computed again but attention."""
    keep = op is torch.ops.flash.attn.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def layer(x, weight):
    q, k, v = (x @ weight).unflatten(-1, (3, 4, 8)).unbind(-3)
    return flash_ext.attention(q, k, v, causal=True, dropout_p=0.25).flatten(-2)


@pytest.mark.parametrize("selective,calls", [(True, 1), (False, 2)])
def test_checkpointing_keeps_attention(selective, calls):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 20, 32, generator=generator, requires_grad=True)
    weight = torch.randn(32, 96, generator=generator, requires_grad=True)
    torch.manual_seed(1)
    expected = torch.autograd.grad(layer(x, weight).square().sum(), [x, weight])
    contexts = partial(create_selective_checkpoint_contexts, keep_attention)
    options = {"context_fn": contexts} if selective else {}
    torch.manual_seed(1)
    with CountAttention() as count:
        out = checkpoint(layer, x, weight, use_reentrant=False, **options)
        got = torch.autograd.grad(out.square().sum(), [x, weight])
    # An answer from memory does not reach the mode that counts.
    assert count.calls == calls
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


# ---- jagged nested tensors -----------------------------------------------------------------------

LENGTHS = (3, 1, 9, 4)


def jagged(heads, seed, lengths=LENGTHS, dim=8, device="cpu", dtype=torch.float32):
    parts = [
        torch.randn(n, heads, dim, generator=torch.Generator().manual_seed(seed + i))
        for i, n in enumerate(lengths)
    ]
    parts = [x.to(device, dtype) for x in parts]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def qkv(lengths_k=LENGTHS, **options):
    q = jagged(4, 0, **options)
    if lengths_k is LENGTHS:  # the same offsets: torch then knows that the lengths are the same
        k, v = (
            torch.nested.nested_tensor_from_jagged(
                torch.randn(sum(LENGTHS), 2, 8, generator=torch.Generator().manual_seed(s)).to(
                    q.device, q.dtype
                ),
                q.offsets(),
            ).requires_grad_()
            for s in (10, 20)
        )
        return q, k, v
    return q, jagged(2, 10, lengths_k, **options), jagged(2, 20, lengths_k, **options)


def alone(function, q, k, v):
    """function of every sequence, joined."""
    return torch.cat([function(*x)[0] for x in zip(*(y.unbind() for y in (q, k, v)), strict=True)])


@pytest.mark.parametrize("lengths_k", [LENGTHS, (5, 2, 1, 8)], ids=["self", "cross"])
def test_jagged_equals_every_sequence_alone(lengths_k):
    q, k, v = qkv(lengths_k)
    sinks = torch.randn(4)
    out, lse = flash_ext.attention(
        q, k, v, None, None, sinks, causal=True, window=(4, 0), return_lse=True
    )
    assert out.is_nested and out.shape[2:] == (4, 8) and lse.shape == (4, sum(LENGTHS))

    def dense(q, k, v):
        return flash_ext.attention(
            q[None], k[None], v[None], None, None, sinks, causal=True, window=(4, 0)
        )

    expected = alone(dense, q, k, v)
    torch.testing.assert_close(out.values(), expected)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for a, b in zip(
        torch.autograd.grad((out.values() * weights).sum(), [q, k, v]),
        torch.autograd.grad((expected * weights).sum(), [q, k, v]),
        strict=True,
    ):
        assert a.is_nested
        torch.testing.assert_close(a.values(), b.values())


def test_jagged_out_adds_to_its_input():
    """It has q's offsets, not some that are equal to them."""
    q, k, v = qkv()
    assert (q + flash_ext.attention(q, k, v)).shape == q.shape


def test_jagged_with_gaps():
    """Sequences cut short by narrow have lengths besides offsets."""
    dense = torch.randn(3, 6, 2, 8)
    starts, lengths = torch.zeros(3, dtype=torch.int64), torch.tensor([2, 6, 3])
    x = torch.nested.narrow(dense, 1, starts, lengths, layout=torch.jagged)
    assert x.lengths() is not None
    out = flash_ext.attention(x, x, x, causal=True)
    for got, part, n in zip(out.unbind(), dense, lengths, strict=True):
        y = part[None, :n]
        torch.testing.assert_close(got, flash_ext.attention(y, y, y, causal=True)[0])


@pytest.mark.parametrize("causal", [False, True])
def test_jagged_sdpa(causal):
    q, _, _ = qkv()
    x = [y.transpose(1, 2) for y in (q, q.sin(), q.cos())]
    with flash_ext.route_sdpa() as routing:
        got = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=causal)
    assert routing.served == 1 and got.shape == x[0].shape
    for out, *parts in zip(got.transpose(1, 2).unbind(), *(y.unbind() for y in x), strict=True):
        expected = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=causal)
        torch.testing.assert_close(out, expected.transpose(0, 1))


def test_jagged_under_compile():
    torch._dynamo.reset()
    q, k, v = qkv()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(q, k, v):
        return flash_ext.attention(2 * q, k, v, causal=True)

    expected = flash_ext.attention(2 * q, k, v, causal=True)
    torch.testing.assert_close(function(q, k, v).values(), expected.values())


def test_jagged_refusals():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="k is a dense tensor"):
        flash_ext.attention(q, k.values(), v)
    with pytest.raises(ValueError, match=r"q is a .*ragged in seqlen"):
        flash_ext.attention(q.transpose(1, 2), k, v)
    for given in ({"cu_seqlens_q": util.cumulative(LENGTHS)}, {"leftpad_k": util.lengths([0] * 4)}):
        with pytest.raises(ValueError, match="leave out cu_seqlens"):
            flash_ext.attention(q, k, v, **given)
    other = jagged(2, 20, (5, 2, 1, 8))
    with pytest.raises(ValueError, match="k and v have other offsets"):
        flash_ext.attention(q, k, other)
    x, y = q.transpose(1, 2), other.transpose(1, 2)
    with pytest.raises(ValueError, match="other offsets than key"):
        flash_ext.scaled_dot_product_attention(x, y, y, is_causal=True)
    with pytest.raises(ValueError, match="attn_mask"):
        flash_ext.scaled_dot_product_attention(x, x, x, torch.ones(1).bool())


# ---- DTensor -------------------------------------------------------------------------------------


def test_dtensor():
    """In a process of its own, whose threads stand for ranks; dtensor_worker.py has the cases."""
    pytest.importorskip("expecttest")  # torch.testing's process groups of threads import it
    worker = Path(__file__).with_name("dtensor_worker.py")
    command = [sys.executable, str(worker)]
    run = subprocess.run(
        command, env=util.environment(), capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "7 cases agree" in run.stdout
