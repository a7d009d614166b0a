"""reference.tiled_attention, the algorithm for readers, against the definition beside it."""

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).resolve().parent.parent / "flash_ext" / "reference.py"
SPEC = importlib.util.spec_from_file_location("flash_ext_reference_tiled", PATH)
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)

# batch, seqlen_q, seqlen_k, num_heads, head_dim, head_dim_v, causal, block_m, block_n
CASES = {
    "one tile": (1, 5, 7, 1, 4, 4, False, 64, 64),
    "whole tiles": (2, 8, 12, 2, 4, 4, False, 4, 4),
    "ragged tiles": (2, 9, 13, 2, 4, 3, False, 4, 5),
    "causal": (1, 11, 11, 2, 8, 8, True, 4, 3),
    "causal, more keys": (1, 5, 12, 2, 8, 8, True, 2, 5),
    "causal, rows without keys": (2, 12, 5, 2, 8, 2, True, 5, 2),
    "a tile of one": (1, 3, 4, 1, 2, 2, True, 1, 1),
    "no keys": (1, 3, 0, 1, 2, 2, False, 2, 2),
    "no rows": (1, 0, 3, 1, 2, 2, False, 2, 2),
}


def randn(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inputs_of(case, dtype=torch.float64):
    batch, seqlen_q, seqlen_k, num_heads, head_dim, head_dim_v, *_ = case
    q = randn(batch, seqlen_q, num_heads, head_dim, seed=1, dtype=dtype)
    k = randn(batch, seqlen_k, num_heads, head_dim, seed=2, dtype=dtype)
    v = randn(batch, seqlen_k, num_heads, head_dim_v, seed=3, dtype=dtype)
    return q, k, v


def tiled(case, q, k, v, **settings):
    causal, block_m, block_n = case[6:]
    return reference.tiled_attention(
        q, k, v, causal=causal, block_m=block_m, block_n=block_n, **settings
    )


def results(function, inputs):
    """out, lse, dq, dk, dv; the loss reads out and, where it is finite, lse."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, lse = function(*leaves)
    dout, dlse = randn(*out.shape, seed=4).to(out.dtype), randn(*lse.shape, seed=5).to(lse.dtype)
    seen = lse.detach() > -torch.inf
    loss = (out * dout).sum() + torch.where(seen, lse * dlse, 0).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_the_definitions(name):
    case = CASES[name]
    got = results(lambda *x: tiled(case, *x), inputs_of(case))
    expected = results(lambda *x: reference.attention(*x, causal=case[6]), inputs_of(case))
    for what, x, ref in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        torch.testing.assert_close(
            x, ref, rtol=1e-12, atol=1e-12, msg=lambda m, w=what: f"{w}: {m}"
        )


def test_gradcheck():
    case = CASES["ragged tiles"]
    inputs = [x.requires_grad_() for x in inputs_of(case)]
    assert torch.autograd.gradcheck(lambda *x: tiled(case, *x, softmax_scale=0.3), inputs)


def test_tile_sizes_change_rounding_alone():
    case = (1, 33, 40, 2, 16, 16, True)
    inputs = inputs_of(case)
    first = results(lambda *x: tiled((*case, 64, 64), *x), inputs)
    for blocks in itertools.product((1, 7, 32), (3, 16)):
        other = results(lambda *x, blocks=blocks: tiled((*case, *blocks), *x), inputs)
        for x, y in zip(first, other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


def test_the_running_maximum_keeps_large_scores_finite():
    """Scores of ±1e5 in fp32, the largest in the last tile: exp(score) alone overflows at 89."""
    q, k, v = inputs_of((1, 4, 12, 1, 4, 4), torch.float32)
    k = k.sort(dim=1).values * 1e5
    out, lse = reference.tiled_attention(q, k, v, block_n=4)
    ref, ref_lse = reference.attention(q, k, v)
    torch.testing.assert_close(out.double(), ref, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-5, atol=0)


def test_no_tensor_is_larger_than_the_inputs():
    """O(seqlen): nothing that either pass allocates has seqlen_q x seqlen_k elements."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            self.numel = max([self.numel, *sizes])
            return result

    q, k, v = (x.requires_grad_() for x in inputs_of((1, 512, 512, 1, 8, 8)))
    with Largest() as seen:
        out, _ = reference.tiled_attention(q, k, v, block_m=32, block_n=32)
        out.sum().backward()
    assert seen.numel == q.numel() < 512 * 512


def test_what_it_does_not_do_is_refused():
    q, k, v = inputs_of(CASES["one tile"])
    with pytest.raises(ValueError, match="cast them to one dtype"):
        reference.tiled_attention(q.float(), k, v)
    with pytest.raises(ValueError, match="repeat key heads"):
        reference.tiled_attention(q.repeat(1, 1, 2, 1), k, v)
    with pytest.raises(ValueError, match="v is"):
        reference.tiled_attention(q, k, v[:, :-1])
    with pytest.raises(ValueError, match="block_n 0"):
        reference.tiled_attention(q, k, v, block_n=0)
    out, _ = reference.tiled_attention(q.requires_grad_(), k, v)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
