"""Gradients against finite differences in fp64, with no reference in between.

Through out and lse, for every input that has a gradient and every feature, alone and together, and
for merge; and what differentiating twice or forward says.
"""

import math

import pytest
import torch
from util import GRADIENT_NAMES, Case, make_inputs

import flash_ext

FP64 = {"dtype": torch.float64, "heads_dtype": torch.float64}
TINY = {
    **{"seqlens_q": (3, 3), "seqlens_k": (5, 5), "num_heads": 2, "num_heads_k": 1},
    **{"head_dim": 2, "head_dim_v": 3, **FP64},
}
PACKED = {"layout": "varlen", "seqlens_q": (3, 0, 2), "seqlens_k": (4, 2, 1), "gap": (1, 1)}

CASES = {
    "plain": {},
    "mha": {"num_heads_k": 2},
    "causal": {"causal": True},
    "causal, rows without keys": {"causal": True, "seqlens_q": (6, 6)},
    "window": {"window": (1, 1)},
    "softcap": {"softcap": 0.7},
    "bias": {"bias": "bhqk"},
    "bias of heads": {"bias": "1h11"},
    "bias of keys": {"bias": "b11k"},
    "bias of rows": {"bias": "11q1"},
    "bias of nothing": {"bias": "1111"},
    "bias fp32": {"bias": "1hqk", "bias_dtype": torch.float32},
    "mask": {"bias": "bhqk", "bias_dtype": torch.bool, "sinks": "finite"},
    "alibi": {"alibi": "h"},
    "alibi of a batch": {"alibi": "bh", "causal": True},
    "sinks": {"sinks": "finite"},
    "sinks, rows without keys": {"sinks": "finite", "causal": True, "seqlens_q": (6, 6)},
    "dropout": {"dropout_p": 0.4},
    "seqused": {"seqused_q": (2, 3), "seqused_k": (5, 2)},
    "splits": {"num_splits": 2, "seqlens_k": (70, 70)},
    "softmax_scale": {"softmax_scale": -0.8},
    "tiles": {"seqlens_q": (66,), "seqlens_k": (65,), "head_dim": 1, "head_dim_v": 1},
    "varlen": PACKED,
    "varlen, everything": {
        **{**PACKED, "causal": True, "window": (2, 1), "softcap": 1.5, "bias": "bhqk"},
        **{"alibi": "bh", "sinks": "finite", "dropout_p": 0.3, "seqused_k": (3, 2, 1)},
    },
    "everything": {
        **{"causal": True, "window": (3, 0), "softcap": 1.5, "bias": "1hqk", "alibi": "h"},
        **{"sinks": "finite", "dropout_p": 0.3, "seqused_q": (3, 1), "seqused_k": (5, 4)},
        **{"softmax_scale": 0.9, "num_splits": 3},
    },
}


def finite(lse):
    """-inf has no finite differences."""
    return torch.where(torch.isneginf(lse), 0, lse)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_finite_differences(name):
    """All inputs at once, out and lse at once; non-contiguous q, k, v."""
    inputs = make_inputs(Case(**{**TINY, "strides": "transposed", **CASES[name]}))
    leaves = {n: x.detach().requires_grad_() for n, x in inputs.differentiable().items()}
    if inputs.bias is not None and inputs.bias.dtype == torch.float32:
        leaves.pop("bias")  # fp32 cannot be stepped by 1e-6; its values still count

    def call(*args):
        arguments = {n: getattr(inputs, n) for n in GRADIENT_NAMES} | dict(
            zip(leaves, args, strict=True)
        )
        out, lse = flash_ext.attention(**arguments, **inputs.options, return_lse=True)
        return out, finite(lse)

    large = max(x.numel() for x in leaves.values()) > 100
    assert torch.autograd.gradcheck(call, tuple(leaves.values()), fast_mode=large)


@pytest.mark.parametrize("needed", ["q", "k", "v", "bias", "alibi_slopes", "sinks"])
def test_one_gradient_alone(needed):
    inputs = make_inputs(Case(**{**TINY, **CASES["everything"]}))
    leaf = getattr(inputs, needed).detach().requires_grad_()
    others = {n: getattr(inputs, n) for n in GRADIENT_NAMES if n != needed}

    def call(x):
        out, lse = flash_ext.attention(**{needed: x}, **others, **inputs.options, return_lse=True)
        return out, finite(lse)

    assert torch.autograd.gradcheck(call, (leaf,))


@pytest.mark.parametrize("window", [(-1, -1), (1, 1)])
def test_merge(window):
    """The gradient through two parts, in some rows of which one of them is empty."""
    inputs = make_inputs(Case(**{**TINY, "seqlens_q": (4, 4), "seqlens_k": (4, 4)}))
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    rows, keys = torch.arange(4)[:, None], torch.arange(4)
    distance = keys - rows
    mask = (distance >= -window[0]) & (distance <= window[1]) if window[0] >= 0 else distance < 9
    mask = mask[None, None]

    def call(q, k, v):
        parts = [
            flash_ext.attention(
                q, k[:, part], v[:, part], mask[..., part].contiguous(), return_lse=True
            )
            for part in (slice(0, 1), slice(1, 4))
        ]
        out, lse = flash_ext.merge(*parts[0], *parts[1])
        return out, finite(lse)

    assert torch.autograd.gradcheck(call, leaves)
    whole = flash_ext.attention(*leaves, mask, return_lse=True)
    torch.testing.assert_close(call(*leaves), whole)


def test_a_gradient_of_minus_infinity_is_ignored():
    """lse = -inf hands nothing back, whatever comes in."""
    inputs = make_inputs(Case(**{**TINY, "causal": True, "seqlens_q": (7, 7)}))
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    _, lse = flash_ext.attention(*leaves, causal=True, return_lse=True)
    for value in (1.0, math.nan, math.inf):
        dlse = torch.zeros_like(lse)
        dlse[..., :2] = value
        grads = torch.autograd.grad(lse, leaves, dlse, retain_graph=True)
        assert all(grad.eq(0).all() for grad in grads)


def test_differentiating_twice_is_refused_by_name():
    leaves = [x.requires_grad_() for x in qkv_of(make_inputs(Case(**TINY)))]
    out, lse = flash_ext.attention(*leaves, return_lse=True)
    for result in (out, lse):
        (grad,) = torch.autograd.grad(result.sum(), leaves[:1], create_graph=True)
        with pytest.raises(NotImplementedError, match=r"flash::attn_backward.*double backward"):
            grad.sum().backward()


def test_forward_mode_is_refused_by_name():
    q, k, v = qkv_of(make_inputs(Case(**TINY)))
    with pytest.raises(NotImplementedError, match=r"flash::attn.*forward-mode"):
        torch.func.jvp(flash_ext.attention, (q, k, v), (q, k, v))
    with pytest.raises(NotImplementedError, match=r"flash::attn.*forward-mode"):
        torch.func.jvp(lambda q: flash_ext.attention(q, k, v), (q,), (q,))


def test_the_probabilities_have_no_gradient():
    q, k, v = qkv_of(make_inputs(Case(**TINY)))
    _, lse = flash_ext.attention(q, k, v, return_lse=True)
    p = flash_ext.attn_probs(q.requires_grad_(), k, lse)
    with pytest.raises(NotImplementedError, match="flash::attn_probs"):
        p.sum().backward()


def qkv_of(inputs):
    return inputs.q, inputs.k, inputs.v
