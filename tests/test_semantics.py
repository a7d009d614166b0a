"""semantics.md against reference.py: every feature alone, every two together, and the edges.

Forward, lse and every gradient are compared by the rule of "How close is right" (util.check).
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from util import (
    ALL_FEATURES,
    DTYPE_NAMES,
    GRADIENT_NAMES,
    Case,
    assert_close_to_reference,
    assert_lse_close,
    assert_same_specials,
    check,
    cumulative,
    lengths,
    make_inputs,
    make_qkv,
    pairwise,
    reference_options,
    run_inputs,
    run_reference_inputs,
    same_bits,
    skip_unless_served,
)

import flash_ext
from flash_ext import reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# ---- one feature at a time -----------------------------------------------------------------------

SINGLE = {
    "plain": {},
    "mha": {"num_heads_k": 4},
    "mqa": {"num_heads_k": 1},
    "gqa 6 to 2": {"num_heads": 6},
    "one row": {"seqlens_q": (1, 1)},
    "one key": {"seqlens_k": (1, 1)},
    "one row and key": {"seqlens_q": (1, 1), "seqlens_k": (1, 1)},
    "one tile": {"seqlens_q": (64, 64), "seqlens_k": (64, 64)},
    "before the tile's end": {"seqlens_q": (63, 63), "seqlens_k": (63, 63)},
    "after the tile's end": {"seqlens_q": (129, 129), "seqlens_k": (129, 129)},
    "more rows than keys": {"seqlens_q": (200, 200), "seqlens_k": (65, 65)},
    "causal": {"causal": True},
    "causal, more rows than keys": {"causal": True, "seqlens_q": (127, 127), "seqlens_k": (64, 64)},
    "causal, square": {"causal": True, "seqlens_q": (129, 129), "seqlens_k": (129, 129)},
    "window left": {"window": (10, -1)},
    "window right": {"window": (-1, 3)},
    "window both": {"window": (10, 3)},
    "window of the diagonal": {"window": (0, 0)},
    "window over tiles": {"window": (70, 66), "seqlens_q": (200, 200), "seqlens_k": (200, 200)},
    "window, more rows than keys": {"window": (5, 2), "seqlens_q": (130, 130)},
    "window and causal": {"causal": True, "window": (9, 9)},
    "softcap": {"softcap": 5.0},
    "softcap, saturated": {"softcap": 15.0, "magnitude": 5.0},
    "softcap, tiny": {"softcap": 0.1},
    "large scores": {"magnitude": 4.0},
    "mask": {"bias": "bhqk", "bias_dtype": torch.bool},
    "bias with -inf": {"bias": "bhqk", "bias_hides": 0.3},
    "alibi": {"alibi": "h"},
    "alibi of a batch": {"alibi": "bh"},
    "alibi, more rows than keys": {"alibi": "h", "seqlens_q": (130, 130)},
    "alibi fp16": {"alibi": "h", "heads_dtype": FP16},
    "sinks": {"sinks": "finite"},
    "sinks, some -inf": {"sinks": "some"},
    "sinks bf16": {"sinks": "finite", "heads_dtype": BF16},
    "sinks fp64": {"sinks": "finite", "heads_dtype": torch.float64},
    "sinks, rows without keys": {"sinks": "some", "causal": True, "seqlens_q": (130, 130)},
    "dropout": {"dropout_p": 0.25},
    "dropout, nearly all": {"dropout_p": 0.98},
    "seqused_q": {"seqused_q": (64, 3)},
    "seqused_k": {"seqused_k": (65, 0)},
    "seqused beyond": {"seqused_q": (1000, 5), "seqused_k": (1000, 64)},
    "seqused, causal": {"seqused_q": (50, 64), "seqused_k": (99, 20), "causal": True},
    "softmax_scale": {"softmax_scale": 0.5},
    "softmax_scale 0": {"softmax_scale": 0.0},
    "softmax_scale negative": {"softmax_scale": -0.25},
    "num_splits": {"num_splits": 2, "seqlens_k": (200, 200)},
    "more splits than tiles": {"num_splits": 7, "sinks": "finite"},
    "splits without keys": {"num_splits": 4, "seqlens_k": (256, 256), "window": (9, 0)},
    "head_dim_v larger": {"head_dim": 24, "head_dim_v": 72},
    "head_dim_v smaller": {"head_dim": 192, "head_dim_v": 128},
    "no lse gradient": {"lse_grad": False},
    "varlen": {"layout": "varlen", "seqlens_q": (65, 1, 20), "seqlens_k": (100, 64, 3)},
    "varlen, empty sequences": {
        **{"layout": "varlen", "seqlens_q": (65, 0, 7, 0), "seqlens_k": (100, 9, 0, 0)},
        **{"causal": True},
    },
    "varlen, gaps": {"layout": "varlen", "gap": (3, 5)},
    "varlen, no max_seqlen": {"layout": "varlen", "max_seqlen": "none", "window": (9, 0)},
    "varlen, max_seqlen too large": {"layout": "varlen", "max_seqlen": "loose"},
    "varlen, max_seqlen beyond the total": {
        **{"layout": "varlen", "seqlens_q": (9,), "seqlens_k": (20,), "max_seqlen": "loose"},
        **{"bias": "11qk", "causal": True},
    },
    "varlen, seqused": {"layout": "varlen", "seqused_q": (65, 7), "seqused_k": (30, 100)},
    "varlen, one sequence": {"layout": "varlen", "seqlens_q": (65,), "seqlens_k": (100,)},
    "varlen, bias": {
        **{"layout": "varlen", "seqlens_q": (65, 9), "seqlens_k": (3, 100), "bias": "bhqk"},
        **{"alibi": "bh"},
    },
}


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("name", SINGLE)
def test_one_feature(name, dtype, device):
    check(Case(**SINGLE[name], dtype=dtype, name=name), device)


def broadcast_forms():
    return ["".join(form) for form in itertools.product("b1", "h1", "q1", "k1")]


@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("form", broadcast_forms())
def test_bias_forms(form, layout, device):
    """As a bias of the case's dtype, of fp32, and as a mask; with rows that see nothing."""
    common = {"bias": form, "layout": layout, "sinks": "some", "softmax_scale": 0.3}
    check(Case(**common, bias_hides=0.1), device)
    check(Case(**common, dtype=BF16), device)
    check(Case(**common, dtype=BF16, bias_dtype=FP32, causal=True), device)
    check(Case(**common, dtype=FP16, bias_dtype=torch.bool, causal=True), device)


@pytest.mark.parametrize("strides", ["transposed", "odd", "last"])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_strides(layout, strides, device):
    """Of every input and of dout and dlse; odd ones lie in bands of NaN."""
    features = {"bias": "bhqk", "alibi": "bh", "sinks": "finite", "dropout_p": 0.2}
    for dtype in (FP32, BF16):
        check(Case(layout=layout, strides=strides, dtype=dtype, **features), device)
        check(Case(layout=layout, strides=strides, dtype=dtype, head_dim=1, bias="11qk"), device)


# ---- every two features together -----------------------------------------------------------------

LEVELS = {
    "layout": ["dense", "varlen"],
    "dtype": [FP32, BF16, FP16],
    "heads": [(4, 4), (4, 2), (3, 1), (6, 2)],
    "dims": [
        *((1, 1), (8, 8), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192)),
        *((256, 256), (192, 128), (64, 40), (33, 65)),
    ],
    "seqlens": [
        *((1, 1), (1, 200), (2, 63), (63, 64), (64, 64), (64, 129), (65, 127), (127, 65)),
        *((129, 129), (129, 2), (200, 1), (200, 200)),
    ],
    "causal": [False, True],
    "window": [(-1, -1), (16, -1), (-1, 5), (0, 0), (70, 3)],
    "softcap": [0.0, 4.0],
    "bias": [None, "bhqk", "1hqk", "b11k", "11q1", "b1qk bool", "1h1k fp32"],
    "alibi": [None, "h", "bh"],
    "sinks": [None, "finite", "some"],
    "dropout_p": [0.0, 0.2],
    "seqused": ["", "q", "k", "qk"],
    "softmax_scale": [None, 0.3],
    "num_splits": [0, 1, 3],
    "lse_grad": [True, False],
    "strides": ["plain", "transposed", "odd", "last"],
}


def case_of(row, seed):
    """A row of the covering set as a case of two dense or three packed sequences."""
    row = dict(row)
    (seqlen_q, seqlen_k), used = row.pop("seqlens"), row.pop("seqused")
    row["num_heads"], row["num_heads_k"] = row.pop("heads")
    row["head_dim"], row["head_dim_v"] = row.pop("dims")
    if row["layout"] == "dense":
        row["seqlens_q"], row["seqlens_k"] = (seqlen_q,) * 2, (seqlen_k,) * 2
    else:
        row["seqlens_q"], row["seqlens_k"] = (seqlen_q, 0, 3), (seqlen_k, 5, seqlen_k // 3)
        row["gap"] = (2, 1)
    for side in used:
        n = row[f"seqlens_{side}"]
        row[f"seqused_{side}"] = (max(n[0] - 1, 0), *(x // 2 for x in n[1:]))
    if row["bias"]:
        form, _, kind = row["bias"].partition(" ")
        row["bias"], row["bias_dtype"] = form, {"bool": torch.bool, "fp32": FP32}.get(kind)
    return Case(**row, seed=seed)


PAIRWISE = [case_of(row, seed) for seed, row in enumerate(pairwise(LEVELS))]


@pytest.mark.parametrize("case", PAIRWISE, ids=lambda case: f"{case.seed}-{case}")
def test_two_features(case, device):
    check(case, device)


@pytest.mark.parametrize("first", [1, 65, 129, 193])
def test_every_head_dim(first, device, dtype):
    """Forward; the default scale is that of the caller's head_dim. v goes through all dims too."""
    for head_dim in range(first, first + 64):
        dims = {"head_dim": head_dim, "head_dim_v": (head_dim * 37) % 256 + 1, "dtype": dtype}
        q, k, v = make_qkv((2,), (5,), 2, 1, **dims, seed=head_dim, device=device)
        out, lse = flash_ext.attention(q, k, v, return_lse=True)
        expected, expected_lse = reference.attention(q, k, v)
        tolerance = {"rtol": 0, "atol": 1e-5 if dtype == FP32 else 3e-2}
        torch.testing.assert_close(out.double(), expected, **tolerance, msg=f"head_dim {head_dim}")
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-4)


NOTICED = {
    "an entry of out": lambda result: result.out[0, 3, 1].mul_(1.05),
    "a row of out": lambda result: result.out[1, 40].zero_(),
    "lse": lambda result: result.lse[0, 1, 5].add_(0.01),
    "a missing row": lambda result: result.lse[0, 1, 5].fill_(-math.inf),
    **{
        f"d{name}": lambda result, name=name: result.grads[name].mul_(1.1)
        for name in GRADIENT_NAMES
    },
}


@pytest.mark.parametrize("what", NOTICED)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=DTYPE_NAMES.get)
def test_the_comparison_notices(what, dtype, device):
    """What the comparison is worth: small wrongs that it must not let pass."""
    case = Case(bias="1hqk", alibi="h", sinks="finite", softcap=8.0, causal=True, dtype=dtype)
    skip_unless_served(case, device)
    inputs = make_inputs(case, device)
    result = run_inputs(inputs)
    NOTICED[what](result)
    with pytest.raises(AssertionError, match=r"seed 0.*: (worst|-inf)"):
        assert_close_to_reference(result, *run_reference_inputs(inputs), inputs, "case, seed 0")


# ---- masks ---------------------------------------------------------------------------------------


def visible(seqlen_q, seqlen_k, causal, window):
    """semantics.md, "Masks", entry by entry."""
    mask = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for i, j in itertools.product(range(seqlen_q), range(seqlen_k)):
        diagonal = i + seqlen_k - seqlen_q
        mask[i, j] = not (
            (causal and j > diagonal)
            or (window[0] >= 0 and j < diagonal - window[0])
            or (window[1] >= 0 and j > diagonal + window[1])
        )
    return mask


@pytest.mark.parametrize("seqlens", [(8, 8), (5, 2), (2, 5), (1, 70), (70, 66)])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (0, 0), (3, -1), (-1, 1), (1, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_written_out(seqlens, window, causal, device, dtype):
    q, k, v = make_qkv((seqlens[0],), (seqlens[1],), dtype=dtype, device=device)
    mask = visible(*seqlens, causal, window).to(device)
    implied, written = (
        flash_ext.attention(q, k, v, **options, return_lse=True)
        for options in ({"causal": causal, "window": window}, {"bias": mask[None, None]})
    )
    # Two kernels on a GPU: sums of 16-bit products in another order.
    close = {} if dtype.itemsize > 2 else {"rtol": 2e-2, "atol": 4e-3}
    torch.testing.assert_close(implied[0], written[0], **close)
    torch.testing.assert_close(implied[1], written[1])
    unseen = ~mask.any(1)
    assert implied[0][:, unseen].eq(0).all() and implied[1][:, :, unseen].isneginf().all()
    assert torch.isfinite(implied[1][:, :, ~unseen]).all()


def test_a_window_of_w_tokens_is_w_minus_one_and_zero(device, dtype):
    """Eight tokens, window of 3: row i sees keys i - 2 to i."""
    q, k, v = make_qkv((8,), (8,), 1, 1, 8, dtype=dtype, device=device)
    _, lse = flash_ext.attention(q, k, v, window=(2, 0), return_lse=True)
    p = flash_ext.attn_probs(q, k, lse, window=(2, 0))
    for i in range(8):
        assert p[0, 0, i].nonzero().flatten().tolist() == list(range(max(0, i - 2), i + 1))


# ---- edges ---------------------------------------------------------------------------------------


def blind(kind, device):
    """Options under which the first 35 of 65 rows see none of the keys, and which rows."""
    rows = torch.zeros(65, dtype=torch.bool, device=device)
    rows[:35] = True
    mask = (~rows)[None, None, :, None].expand(1, 1, 65, 30).contiguous()
    return {
        "causal": {"causal": True},
        "window": {"window": (-1, 0)},
        "mask": {"bias": mask},
        "bias": {"bias": torch.zeros(mask.shape, device=device).masked_fill(~mask, -math.inf)},
    }[kind], rows


@pytest.mark.parametrize("sink", [None, 0.5, -math.inf])
@pytest.mark.parametrize("kind", ["causal", "window", "mask", "bias"])
def test_rows_without_keys(kind, sink, device, dtype):
    """out 0, lse -inf or the sink, no gradient, and nothing NaN even where dlse is."""
    options, rows = blind(kind, device)
    inputs = make_inputs(Case(seqlens_k=(30, 30), dtype=dtype), device).replace(**options)
    if sink is not None:
        inputs = inputs.replace(sinks=torch.full((4,), sink, device=device))
    empty = sink in (None, -math.inf)
    if empty:
        inputs.dlse[:, :, rows] = math.nan
    result = run_inputs(inputs)
    assert result.out[:, rows].eq(0).all() and result.grads["q"][:, rows].eq(0).all()
    assert result.lse[:, :, rows].eq(-math.inf if empty else sink).all()
    assert all(torch.isfinite(x).all() for x in (result.out, *result.grads.values()))
    if not empty:  # the sink still gets dlse
        seeing = inputs.replace(dlse=inputs.dlse.masked_fill(rows, 0))
        difference = result.grads["sinks"] - run_inputs(seeing).grads["sinks"]
        expected = inputs.dlse[:, :, rows].sum((0, 2))
        torch.testing.assert_close(difference, expected, rtol=1e-4, atol=1e-4)
    elif sink is not None:
        assert result.grads["sinks"].eq(0).all()


EMPTY = [
    *(Case(seqlens_q=(), seqlens_k=()), Case(seqlens_q=(0, 0)), Case(seqlens_k=(0, 0))),
    Case(seqlens_q=(0,), seqlens_k=(0,)),
    Case(seqlens_q=(), seqlens_k=(), layout="varlen"),
    Case(seqlens_q=(), seqlens_k=(), layout="varlen", gap=(0, 4)),
    Case(seqlens_q=(0, 0), seqlens_k=(0, 0), layout="varlen"),
    Case(seqlens_q=(3, 4), seqlens_k=(0, 0), layout="varlen"),
    Case(seqlens_q=(0, 0), seqlens_k=(3, 4), layout="varlen"),
    Case(seqused_q=(0, 0)),
    Case(seqused_k=(0, 0)),
]
HEADS = {"alibi": "bh", "sinks": "finite"}


@pytest.mark.parametrize("features", [{}, {"causal": True, "num_splits": 3}, HEADS], ids=str)
@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_empty(case, features, device, dtype):
    """Empty or zero results and zero gradients, but for what a sink still gets."""
    case = replace(case, dtype=dtype, bias="1hqk", **features)
    result = check(case, device)
    assert result.out.eq(0).all()
    if case.sinks is None:
        assert result.lse.isneginf().all()
    assert all(g.eq(0).all() for name, g in result.grads.items() if name != "sinks")


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, torch.float64], ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("level", [1e5, -1e5, 3e4])
def test_scores_all_alike_are_uniform(level, dtype, device):
    """Softmax is shift invariant, at any height: 70 keys, each with the score `level`."""
    skip_unless_served(Case(dtype=dtype), device)
    inputs = make_inputs(Case(seqlens_k=(70, 70), head_dim=4, dtype=dtype), device)
    inputs.q.fill_(math.copysign(256.0, level))
    inputs.k.fill_(128.0)  # products of exactly 2**17
    inputs = inputs.replace(softmax_scale=abs(level) / 2**17)
    result = run_inputs(inputs)
    v = inputs.v.repeat_interleave(2, dim=2)
    mean = v.double().mean(1, keepdim=True).to(dtype).expand_as(result.out)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result.out, mean, rtol=0, atol=2 * eps)
    expected = torch.full_like(result.lse, level + math.log(70))
    torch.testing.assert_close(result.lse, expected, rtol=2e-6, atol=1e-4)
    dv = inputs.dout.double().sum(1, keepdim=True).unflatten(2, (2, 2)).sum(3) / 70
    torch.testing.assert_close(
        result.grads["v"].double(), dv.expand(-1, 70, -1, -1), rtol=4 * eps, atol=4 * eps
    )


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, torch.float64], ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("bias_dtype", ["same", "fp32"])
def test_rows_of_finfo_min(dtype, bias_dtype, device):
    """A whole row of it is uniform over its keys; next to others such keys have no weight."""
    bias_dtype = FP32 if bias_dtype == "fp32" else dtype
    inputs = make_inputs(Case(dtype=dtype, bias="1hqk", bias_dtype=bias_dtype), device)
    skip_unless_served(Case(dtype=dtype), device)
    lowest = torch.finfo(bias_dtype).min
    inputs.bias[:, :, 3] = lowest
    inputs.bias[:, :, 5, :50] = lowest
    result = run_inputs(inputs)
    assert all(torch.isfinite(x).all() for x in result.tensors().values())
    if bias_dtype != FP16:  # -65504 leaves room for the scores
        v = inputs.v.repeat_interleave(2, dim=2)
        mean = v.double().mean(1).to(dtype)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(result.out[:, 3], mean, rtol=2 * eps, atol=2 * eps)
    hidden = inputs.replace(bias=inputs.bias.clone())
    hidden.bias[:, :, 5, :50] = -math.inf
    torch.testing.assert_close(result.out[:, 5], run_inputs(hidden).out[:, 5], rtol=0, atol=0)


def test_an_infinite_sink_value_of_a_row_that_sees_keys(device, dtype):
    """A large finite sink takes all the weight: out 0, lse = sink, its gradient dlse."""
    inputs = make_inputs(Case(dtype=dtype), device)
    inputs = inputs.replace(sinks=torch.full((4,), 1e4, device=device))
    result = run_inputs(inputs)
    assert result.out.eq(0).all() and result.lse.eq(1e4).all()
    torch.testing.assert_close(result.grads["sinks"], inputs.dlse.sum((0, 2)), rtol=1e-4, atol=1e-4)
    assert all(result.grads[name].eq(0).all() for name in "qkv")


# ---- gradients -----------------------------------------------------------------------------------


def test_the_operator_computes_what_is_needed_alone(device, dtype):
    inputs = make_inputs(Case(**ALL_FEATURES, dtype=dtype), device)
    options = reference_options(inputs)
    first = [getattr(inputs, name) for name in GRADIENT_NAMES]
    out, lse = torch.ops.flash.attn(*first, **options)
    for needed in itertools.product([False, True], repeat=6):
        grads = torch.ops.flash.attn_backward(
            *(inputs.dout, inputs.dlse, *first[:3], out, lse),
            **dict(zip(GRADIENT_NAMES[3:], first[3:], strict=True)),
            **{"page_table": None, **options},
            needed=needed,
        )
        assert [grad is not None for grad in grads] == list(needed)


def test_a_loss_of_lse_alone(device, dtype):
    inputs = make_inputs(Case(**{**ALL_FEATURES, "dropout_p": 0.0}, dtype=dtype), device)
    first = {name: x.clone().requires_grad_() for name, x in inputs.differentiable().items()}
    _, lse = flash_ext.attention(**first, **inputs.options, return_lse=True)
    torch.where(torch.isneginf(lse), 0, lse * inputs.dlse).sum().backward()
    expected = run_inputs(inputs.replace(dout=torch.zeros_like(inputs.dout)))
    for name, x in first.items():
        torch.testing.assert_close(x.grad, expected.grads[name], rtol=0, atol=0)
    assert first["v"].grad.eq(0).all()


def test_grouped_heads_equal_repeated_ones(device, dtype):
    inputs = make_inputs(Case(num_heads=6, num_heads_k=2, causal=True, dtype=dtype), device)
    k, v = (x.repeat_interleave(3, dim=2) for x in (inputs.k, inputs.v))
    grouped, repeated = run_inputs(inputs), run_inputs(inputs.replace(k=k, v=v))
    assert same_bits(grouped.out, repeated.out) and same_bits(grouped.lse, repeated.lse)
    for name in "kv":
        summed = repeated.grads[name].double().unflatten(2, (2, 3)).sum(3)
        tolerance = 1e-4 if dtype == FP32 else 5e-2
        torch.testing.assert_close(
            grouped.grads[name].double(), summed, rtol=tolerance, atol=tolerance
        )


def test_expanded_tensors(device, dtype):
    """Stride 0 over heads, rows or the batch: the values of a copy, the gradient summed."""
    case = Case(num_heads_k=1, bias="1111", alibi="h", dtype=dtype)
    inputs = make_inputs(case, device)
    shapes = {"k": (2, 100, 4, 32), "v": (2, 100, 4, 32), "bias": (2, 4, 65, 100)}
    shapes["alibi_slopes"] = (2, 4)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.differentiable().items()}
    wide = {name: x.expand(shapes.get(name, x.shape)) for name, x in leaves.items()}
    assert wide["k"].stride(2) == 0 and wide["bias"].stride() == (0, 0, 0, 0)
    out, lse = flash_ext.attention(**wide, **inputs.options, return_lse=True)
    grads = torch.autograd.grad([out, lse], list(leaves.values()), [inputs.dout, inputs.dlse])
    expected = run_inputs(inputs)
    assert same_bits(out, expected.out) and same_bits(lse, expected.lse)
    for name, grad in zip(leaves, grads, strict=True):
        tolerance = 1e-4 if dtype == FP32 else 5e-2
        other = expected.grads[name]
        scale = other.abs().max().item() + 1
        torch.testing.assert_close(grad, other, rtol=0, atol=tolerance * scale, msg=name)


# ---- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 2)}], ids=str)
def test_packed_sequences_equal_dense_ones(options, device, dtype):
    """Each sequence of a packed call, dropout aside, equals a dense call of its own."""
    case = Case(
        **{"layout": "varlen", "seqlens_q": (65, 1, 0, 40), "seqlens_k": (100, 64, 7, 30)},
        **{"gap": (4, 3), "sinks": "some", "alibi": "bh", "softcap": 5.0, "dtype": dtype},
        **options,
    )
    inputs = make_inputs(case, device)
    packed = run_inputs(inputs)
    rows, keys = (cumulative(n, 4).tolist() for n in (case.seqlens_q, case.seqlens_k))
    dense_options = {n: x for n, x in inputs.options.items() if not n.startswith(("cu_", "max_"))}
    used_rows = torch.zeros(inputs.q.shape[0], dtype=torch.bool)
    for b in range(case.batch):
        row, key = slice(rows[b], rows[b + 1]), slice(keys[b], keys[b + 1])
        used_rows[row] = True
        one = inputs.replace(
            q=inputs.q[None, row],
            k=inputs.k[None, key],
            v=inputs.v[None, key],
            alibi_slopes=inputs.alibi_slopes[b],
            dout=inputs.dout[None, row],
            dlse=inputs.dlse[None, :, row],
        )
        one.options = dense_options | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"))
        dense = run_inputs(one)
        assert same_bits(packed.out[row], dense.out[0])
        assert same_bits(packed.lse[:, row], dense.lse[0])
        tolerance = 1e-5 if dtype == FP32 else 2e-2
        for name, part in (("q", row), ("k", key), ("v", key)):
            torch.testing.assert_close(
                packed.grads[name][part], dense.grads[name][0], rtol=tolerance, atol=tolerance
            )
        slopes = packed.grads["alibi_slopes"][b]
        torch.testing.assert_close(slopes, dense.grads["alibi_slopes"], rtol=1e-3, atol=1e-2)
    assert packed.out[~used_rows].eq(0).all() and packed.lse[:, ~used_rows].isneginf().all()
    assert packed.grads["q"][~used_rows].eq(0).all()
    for name in "kv":
        assert packed.grads[name][: keys[0]].eq(0).all()
        assert packed.grads[name][keys[-1] :].eq(0).all()


def test_seqused_equals_shorter_tensors(device, dtype):
    """Rows beyond get out 0, lse -inf and no gradient; the others those of a smaller call."""
    inputs = make_inputs(Case(causal=True, alibi="h", dtype=dtype), device)
    used = inputs.replace(seqused_q=lengths((40, 40), device), seqused_k=lengths((70, 70), device))
    short = inputs.replace(
        q=inputs.q[:, :40],
        k=inputs.k[:, :70],
        v=inputs.v[:, :70],
        dout=inputs.dout[:, :40],
        dlse=inputs.dlse[:, :, :40],
    )
    got, expected = run_inputs(used), run_inputs(short)
    assert same_bits(got.out[:, :40], expected.out) and got.out[:, 40:].eq(0).all()
    assert same_bits(got.lse[:, :, :40], expected.lse) and got.lse[:, :, 40:].isneginf().all()
    for name, n in (("q", 40), ("k", 70), ("v", 70)):
        assert got.grads[name][:, n:].eq(0).all()
        torch.testing.assert_close(got.grads[name][:, :n], expected.grads[name])


# ---- dropout -------------------------------------------------------------------------------------


def test_dropout_keeps_what_the_generator_says(device, dtype):
    """With the identity for v, out shows the dropped probabilities themselves."""
    inputs = make_inputs(Case(seqlens_k=(130, 130), dropout_p=0.3, num_heads_k=4, dtype=dtype))
    rng_state = inputs.options["rng_state"]
    keep = reference.dropout_keep(rng_state, 0.3, 2, 4, 65, 130).to(device)
    q, k = inputs.q.to(device), inputs.k.to(device)
    v = torch.eye(130, dtype=dtype, device=device)[None, :, None].expand(2, 130, 4, 130)
    options = {"dropout_p": 0.3, "rng_state": rng_state.to(device)}
    out = flash_ext.attention(q, k, v, **options).transpose(1, 2)
    whole = flash_ext.attention(q, k, v).transpose(1, 2)
    assert torch.equal(out != 0, keep & (whole != 0))
    expected = torch.where(keep, whole.double() * 256 / (256 - 77), 0)
    tolerance = 1e-6 if dtype == FP32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    assert 0.28 < 1 - keep.double().mean() < 0.32


def test_dropout_leaves_lse_alone(device, dtype):
    inputs = make_inputs(Case(dropout_p=0.5, sinks="finite", dtype=dtype), device)
    assert same_bits(run_inputs(inputs).lse, run_inputs(inputs.replace(dropout_p=0.0)).lse)


@pytest.mark.parametrize("dropout_p", [1.0, 0.999])
def test_dropout_of_everything(dropout_p, device, dtype):
    inputs = make_inputs(Case(dropout_p=dropout_p, lse_grad=False, dtype=dtype), device)
    result = run_inputs(inputs)
    for x in (result.out, *result.grads.values()):
        assert x.eq(0).all()


@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_dropout_does_not_depend_on_the_tiling(num_splits, device, dtype):
    """Packed, split or shorter, a sequence in its place in the batch has the same kept set."""
    case = Case(seqlens_k=(200, 200), dropout_p=0.4, num_splits=num_splits, dtype=dtype)
    check(case, device)
    dense = make_inputs(case, device)
    packed = make_inputs(replace(case, layout="varlen"), device)
    packed = packed.replace(
        q=dense.q.flatten(0, 1),
        k=dense.k.flatten(0, 1),
        v=dense.v.flatten(0, 1),
        dout=dense.dout.flatten(0, 1),
        dlse=dense.dlse.transpose(0, 1).flatten(1),
    )
    a, b = run_inputs(dense), run_inputs(packed)
    torch.testing.assert_close(a.out.flatten(0, 1), b.out)
    for name in "qkv":
        torch.testing.assert_close(a.grads[name].flatten(0, 1), b.grads[name])


# ---- the probabilities and merging ---------------------------------------------------------------

PROBS = [
    Case(),
    Case(causal=True, num_heads=6, dtype=BF16),
    Case(layout="varlen", seqlens_q=(65, 0, 3), seqlens_k=(100, 5, 33), gap=(2, 3)),
    Case(layout="varlen", max_seqlen="none", dtype=FP16, window=(20, 5)),
    Case(layout="varlen", max_seqlen="loose", causal=True),
    Case(seqused_q=(50, 0), seqused_k=(100, 30), alibi="bh"),
    Case(softcap=3.0, bias="1hqk", bias_hides=0.2, seqlens_q=(130, 130), causal=True),
    Case(bias="b11k", bias_dtype=torch.bool, dtype=torch.float64, softmax_scale=0.4),
    Case(dropout_p=0.3, sinks="finite"),
    Case(dropout_p=0.3, layout="varlen", dtype=BF16, causal=True),
    Case(magnitude=30.0, head_dim=1),
]


@pytest.mark.parametrize("case", PROBS, ids=str)
def test_attn_probs(case, device):
    """exp(s - lse) with the sign set where dropout drops, 0 where nothing is seen."""
    skip_unless_served(case, device)
    inputs = make_inputs(case, device)
    options = {n: x for n, x in inputs.options.items() if n not in ("deterministic", "num_splits")}
    _, lse = flash_ext.attention(
        *(getattr(inputs, name) for name in GRADIENT_NAMES), **inputs.options, return_lse=True
    )
    first = (inputs.q, inputs.k)
    got = flash_ext.attn_probs(*first, lse, inputs.bias, inputs.alibi_slopes, **options)
    options = reference_options(inputs.replace())
    for name in ("deterministic", "num_splits"):
        options.pop(name)
    expected = reference.attn_probs(
        *first, run_reference_inputs(inputs)[0].lse, inputs.bias, inputs.alibi_slopes, **options
    )
    assert got.dtype == case.dtype and got.shape == expected.shape
    eps = torch.finfo(case.dtype).eps
    torch.testing.assert_close(
        got.double(), expected, rtol=4 * eps, atol=max(eps, 2e-5 * (eps < 1e-3))
    )
    seen = expected != 0
    assert torch.equal(torch.signbit(got)[seen], torch.signbit(expected)[seen])
    if case.dropout_p > 0:
        assert torch.signbit(got).any()
    if case.sinks is None and not case.is_varlen and case.seqused_q is None:
        total = got.double().abs().sum(-1)
        seeing = ~torch.isneginf(lse)
        tolerance = 1e-4 if eps < 1e-6 else 1e-2
        torch.testing.assert_close(total, seeing.double(), rtol=0, atol=tolerance)


def split_keys(inputs, at):
    """Two Inputs of the keys before and after `at`; the second without sinks."""
    first = inputs.replace(k=inputs.k[:, :at], v=inputs.v[:, :at])
    return first, inputs.replace(k=inputs.k[:, at:], v=inputs.v[:, at:], sinks=None)


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64], ids=DTYPE_NAMES.get)
def test_merge_of_two_key_sets_is_attention_over_both(dtype, device):
    """out, lse and the gradients of everything through both parts."""
    skip_unless_served(Case(dtype=dtype), device)
    inputs = make_inputs(Case(sinks="some", dtype=dtype), device)
    ref, pt = run_reference_inputs(inputs)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.differentiable().items()}
    parts = split_keys(inputs.replace(**leaves), 37)
    results = [flash_ext.attention(p.q, p.k, p.v, sinks=p.sinks, return_lse=True) for p in parts]
    out, lse = flash_ext.merge(*results[0], *results[1])
    assert out.dtype == dtype and lse.dtype == results[0][1].dtype
    assert_lse_close(lse, ref.lse, inputs, "lse")
    grads = torch.autograd.grad([out, lse], list(leaves.values()), [inputs.dout, inputs.dlse])
    # Two roundings, of the parts and of their sum: twice the rule for one.
    for name, x in (("out", out), *zip(leaves, grads, strict=True)):
        exact, rounded = ((r.out if name == "out" else r.grads[name]).double() for r in (ref, pt))
        error = (x.double() - exact).abs().max()
        limit = 4 * (rounded - exact).abs().max() + 8 * torch.finfo(x.dtype).eps
        assert error <= limit, f"{name}: error {error:.3g}, allowed {limit:.3g}"


def test_merge_of_parts_without_keys(device, dtype):
    """-inf parts count nothing, whatever their out holds; two of them give out 0 and lse -inf."""
    inputs = make_inputs(Case(dtype=dtype), device)
    out, lse = flash_ext.attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    out, lse = out.requires_grad_(), lse.requires_grad_()
    blank = torch.full_like(out, math.nan).requires_grad_()
    never = torch.full_like(lse, -math.inf).requires_grad_()
    for parts in ((out, lse, blank, never), (blank, never, out, lse)):
        merged = flash_ext.merge(*parts)
        assert same_bits(merged[0], out) and same_bits(merged[1], lse)
        grads = torch.autograd.grad(merged, [out, lse, blank, never], [inputs.dout, inputs.dlse])
        assert torch.equal(grads[0], inputs.dout)
        torch.testing.assert_close(grads[1], inputs.dlse, rtol=1e-5, atol=1e-5)
        assert grads[2].eq(0).all() and grads[3].eq(0).all()
    merged = flash_ext.merge(blank, never, blank, never)
    assert merged[0].eq(0).all() and merged[1].isneginf().all()
    grads = torch.autograd.grad(merged, [blank, never], [inputs.dout, inputs.dlse])
    assert grads[0].eq(0).all() and grads[1].eq(0).all()


def test_merge_row_by_row(device, dtype):
    """Rows that one part does not see: causal over a first part of few keys; packed layout too."""
    inputs = make_inputs(Case(seqlens_q=(65,), seqlens_k=(100,), dtype=dtype), device)
    mask = visible(65, 100, False, (20, 5)).to(device)[None, None]
    whole = flash_ext.attention(inputs.q, inputs.k, inputs.v, mask, return_lse=True)
    parts = [
        flash_ext.attention(p.q, p.k, p.v, m.contiguous(), return_lse=True)
        for p, m in zip(split_keys(inputs, 50), (mask[..., :50], mask[..., 50:]), strict=True)
    ]
    assert any(torch.isneginf(lse).any() for _, lse in parts)
    dense = flash_ext.merge(*parts[0], *parts[1])
    assert_same_specials(dense[1], whole[1], "lse")
    tolerance = 1e-5 if dtype == FP32 else 2e-2
    torch.testing.assert_close(dense, whole, rtol=tolerance, atol=tolerance)
    packed = flash_ext.merge(*(x[0] for part in parts for x in part))
    assert same_bits(packed[0], dense[0][0]) and same_bits(packed[1], dense[1][0])
