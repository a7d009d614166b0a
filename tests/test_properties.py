"""Random calls against the reference and against each other, drawn by hypothesis.

The examples are the same in every run (derandomize) and no later run replays old ones.
"""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from util import (
    Case,
    assert_close_to_reference,
    assert_lse_close,
    check,
    make_inputs,
    max_score,
    run_inputs,
    run_reference_inputs,
    same_bits,
    skip_unless_served,
)

import flash_ext
from flash_ext import reference

DTYPES = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])
HEADS = st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (3, 1), (5, 5)])
# Edges of tiles and what lies between.
SEQLENS = st.one_of(st.integers(0, 12), st.sampled_from([63, 64, 65, 127, 128, 129]))
SIDES = st.one_of(st.just(-1), st.integers(0, 8), st.integers(0, 140))
HEAD_DIMS = st.one_of(st.integers(1, 40), st.sampled_from([64, 80, 96, 128, 256]))


@st.composite
def cases(draw, layout=None, **fixed):
    """Any case, but for the fields that are given."""
    layout = layout or draw(st.sampled_from(["dense", "varlen"]))
    if layout == "dense":
        batch = draw(st.integers(1, 2))
        seqlens_q, seqlens_k = (draw(SEQLENS),) * batch, (draw(SEQLENS),) * batch
        layout_fields = {}
    else:
        batch = draw(st.integers(1, 4))
        seqlens_q, seqlens_k = (tuple(draw(SEQLENS) for _ in range(batch)) for _ in "qk")
        layout_fields = {
            "gap": draw(st.tuples(st.integers(0, 3), st.integers(0, 3))),
            "max_seqlen": draw(st.sampled_from(["exact", "none", "loose"])),
        }
    used = st.one_of(st.none(), st.tuples(*[st.integers(0, 140)] * batch))
    bias = draw(st.one_of(st.none(), st.tuples(*map(st.sampled_from, ("b1", "h1", "q1", "k1")))))
    num_heads, num_heads_k = draw(HEADS)
    head_dim = draw(HEAD_DIMS)
    case = {
        "layout": layout,
        "seqlens_q": seqlens_q,
        "seqlens_k": seqlens_k,
        "num_heads": num_heads,
        "num_heads_k": num_heads_k,
        "head_dim": head_dim,
        "head_dim_v": draw(st.one_of(st.just(head_dim), HEAD_DIMS)),
        "dtype": draw(DTYPES),
        "causal": draw(st.booleans()),
        "window": (draw(SIDES), draw(SIDES)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.0, 8.0])),
        "bias": bias and "".join(bias),
        "bias_dtype": draw(st.sampled_from([None, torch.float32, torch.bool])),
        "bias_hides": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "alibi": draw(st.sampled_from([None, None, "h", "bh"])),
        "sinks": draw(st.sampled_from([None, None, "finite", "some"])),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0])),
        "seqused_q": draw(used),
        "seqused_k": draw(used),
        "softmax_scale": draw(st.sampled_from([None, 0.2, 1.0])),
        "num_splits": draw(st.sampled_from([0, 0, 1, 2, 5])),
        "lse_grad": draw(st.booleans()),
        "strides": draw(st.sampled_from(["plain", "transposed", "odd", "last"])),
        "seed": draw(st.integers(0, 2**20)),
        **layout_fields,
    }
    return Case(**{**case, **fixed})


@settings(max_examples=500)
@given(case=cases())
def test_any_call_equals_the_reference(case, device):
    check(case, device)


PLAIN = {"dropout_p": 0.0, "strides": "plain"}


@settings(max_examples=200)
@given(case=cases("dense", sinks=None, **PLAIN), at=st.integers(0, 130), share=st.floats(0, 1))
def test_two_key_sets_merge_into_one(case, at, share, device):
    """Masks go by the whole key set, so here they are one that is written out."""
    skip_unless_served(case, device)
    inputs = make_inputs(case, device)
    q, k, v = inputs.q, inputs.k, inputs.v
    options = {"softcap": case.softcap, "softmax_scale": case.softmax_scale}
    generator = torch.Generator().manual_seed(case.seed)
    shape = (q.shape[0], 1, q.shape[1], k.shape[1])
    mask = (torch.rand(shape, generator=generator) < share).to(device)
    whole = flash_ext.attention(q, k, v, mask, **options, return_lse=True)
    parts = [
        flash_ext.attention(q, k[:, part], v[:, part], mask[..., part], **options, return_lse=True)
        for part in (slice(0, at), slice(at, None))
    ]
    out, lse = flash_ext.merge(*parts[0], *parts[1])
    torch.testing.assert_close(lse, whole[1], rtol=2e-6, atol=2e-5)
    tolerance = 1e-4 if case.dtype == torch.float32 else 8 * torch.finfo(case.dtype).eps
    torch.testing.assert_close(out, whole[0], rtol=tolerance, atol=tolerance)


@settings(max_examples=200)
@given(case=cases("dense"))
def test_the_probabilities_make_the_output(case, device):
    """out = sum_j p_ij v_j with the dropped entries out and the kept ones scaled."""
    skip_unless_served(case, device)
    inputs = make_inputs(case, device)
    first = (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.alibi_slopes, inputs.sinks)
    out, lse = flash_ext.attention(*first, **inputs.options, return_lse=True)
    options = {n: x for n, x in inputs.options.items() if n not in ("deterministic", "num_splits")}
    p = flash_ext.attn_probs(inputs.q, inputs.k, lse, *first[3:5], **options).double()
    if case.dropout_p > 0:
        threshold = int(256 * case.dropout_p + 0.5)
        p = torch.where(torch.signbit(p), 0, p * 256 / max(256 - threshold, 1))
    v = inputs.v.double().repeat_interleave(case.num_heads // case.num_heads_k, dim=2)
    expected = torch.einsum("bhij,bjhd->bihd", p, v)
    eps = torch.finfo(case.dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=8 * eps, atol=max(8 * eps, 1e-4))


@settings(max_examples=150)
@given(
    case=cases(bias=None, sinks=None, dtype=torch.float32, strides="plain"),
    shift=st.sampled_from([-1e4, -3.0, 7.0, 1e4]),
)
def test_a_shift_of_all_scores_moves_lse_alone(case, shift, device):
    """A bias of one number: out as it was, lse + shift."""
    skip_unless_served(case, device)
    inputs = make_inputs(case, device)
    plain = run_inputs(inputs)
    bias = torch.full((1, 1, 1, 1), shift, device=device)
    shifted = run_inputs(inputs.replace(bias=bias), needed=("q", "k", "v"))
    tolerance = 2e-6 * max(abs(shift), 50)
    torch.testing.assert_close(shifted.out, plain.out, rtol=0, atol=10 * tolerance)
    torch.testing.assert_close(shifted.lse, plain.lse + shift, rtol=2e-6, atol=tolerance)


def flip(name, x, case):
    """x with the batch in reverse, where it has one."""
    has_batch = name in ("q", "k", "v", "dout", "dlse", "seqused_q", "seqused_k")
    has_batch = has_batch or (name == "bias" and x.shape[0] == case.batch)
    has_batch = has_batch or (name == "alibi_slopes" and x.dim() == 2)
    return x.flip(0) if has_batch else x


@settings(max_examples=150)
@given(case=cases("dense", num_splits=2, **PLAIN))
def test_the_order_of_the_batch_does_not_matter(case, device):
    """Without dropout, whose mask knows the place in the batch."""
    skip_unless_served(case, device)
    inputs = make_inputs(case, device)
    flipped = inputs.replace(**{n: flip(n, x, case) for n, x in inputs.tensors().items()})
    a, b = run_inputs(inputs), run_inputs(flipped)
    assert same_bits(a.out, b.out.flip(0)) and same_bits(a.lse, b.lse.flip(0))
    for name in "qkv":
        assert same_bits(a.grads[name], b.grads[name].flip(0))


@settings(max_examples=100)
@given(
    dropout_p=st.floats(0, 1),
    words=st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 70), st.integers(1, 140)),
)
def test_the_kept_set_is_the_generators(dropout_p, words, shape, device):
    batch, num_heads, seqlen_q, seqlen_k = shape
    state = torch.tensor(words, dtype=torch.int64)
    keep = reference.dropout_keep(state, dropout_p, batch, num_heads, seqlen_q, seqlen_k)
    q = torch.zeros(batch, seqlen_q, num_heads, 1, dtype=torch.bfloat16, device=device)
    k = torch.zeros(batch, seqlen_k, num_heads, 1, dtype=torch.bfloat16, device=device)
    lse = torch.full((batch, num_heads, seqlen_q), math.log(seqlen_k), device=device)
    options = {"dropout_p": dropout_p, "rng_state": state.to(device)}
    p = flash_ext.attn_probs(q, k, lse, **options)
    assert torch.equal(~torch.signbit(p).cpu(), keep)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**20),
    extreme=st.sampled_from([1e-30, 1e-8, 30.0, 1e3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    causal=st.booleans(),
)
def test_extreme_magnitudes(seed, extreme, dtype, causal, device):
    """Scores from 0 to one-hot softmax: no NaN; where the dtype can say it, right."""
    case = Case(
        seqlens_q=(70,), seqlens_k=(70,), head_dim=16, dtype=dtype, seed=seed, causal=causal
    )
    skip_unless_served(case, device)
    inputs = make_inputs(case, device)
    inputs = inputs.replace(q=inputs.q * extreme, k=inputs.k * min(extreme, 30.0))
    result = run_inputs(inputs)
    assert all(torch.isfinite(x).all() for x in result.tensors().values())
    ref, pt = run_reference_inputs(inputs)
    label = f"{case}, times {extreme}, seed {seed}"
    assert_lse_close(result.lse, ref.lse, inputs, label)
    if extreme > 100:
        return  # step by step fp16 overflows
    if dtype != torch.float32 or extreme < 1:
        assert_close_to_reference(result, ref, pt, inputs, label)
        return
    # A score is off by some roundings of its terms, and where two are near a row's top so is p.
    limit = 8 * torch.finfo(dtype).eps * max_score(inputs, ref.lse) * inputs.v.abs().max()
    assert (result.out - ref.out).abs().max() <= limit, label
