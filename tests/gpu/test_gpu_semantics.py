"""test_semantics.py's cases on a GPU, in fp16 and bf16, and those of its tests that run anywhere.

gpu_util.check compares what the kernel table declares and expects a refusal of the rest, so a
backward pass is tested as soon as there is a kernel for it.
"""

import math
from dataclasses import replace

import gpu_util
import pytest
import torch

# These have no backward pass, so they run here as they are.
from test_semantics import (  # noqa: F401
    EMPTY,
    HEADS,
    PAIRWISE,
    SINGLE,
    blind,
    broadcast_forms,
    test_dropout_keeps_what_the_generator_says,
    test_every_head_dim,
    test_masks_written_out,
    test_merge_of_parts_without_keys,
    test_merge_row_by_row,
)
from util import DTYPE_NAMES, Case, cumulative, lengths, make_inputs, run_inputs, same_bits

import flash_ext

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALF = pytest.mark.parametrize("dtype", [BF16, FP16], ids=DTYPE_NAMES.get)

# One case for each feature of the kernel table.
FEATURE_CASES = {
    "varlen": Case(layout="varlen", num_heads_k=4),
    "gqa": Case(),
    "window": Case(window=(9, 2), num_heads_k=4),
    "softcap": Case(softcap=5.0, num_heads_k=4),
    "bias": Case(bias="bhqk", num_heads_k=4),
    "bool_mask": Case(bias="bhqk", bias_dtype=torch.bool, num_heads_k=4),
    "alibi": Case(alibi="h", num_heads_k=4),
    "sinks": Case(sinks="finite", num_heads_k=4),
    "dropout": Case(dropout_p=0.3, num_heads_k=4),
    "seqused": Case(seqused_k=(70, 3), num_heads_k=4),
    "num_splits": Case(num_splits=3, num_heads_k=4),
    "head_dim_v": Case(head_dim_v=64, num_heads_k=4),
    "deterministic": Case(deterministic=True, num_heads_k=4),
}


def half(case):
    """The case in a dtype that GPUs take, without splits where no kernel has them.

    With dropout none has: the kernel that splits keys is one for inference.
    """
    dtype = BF16 if case.dtype == FP32 else case.dtype
    splits = 0 if case.dropout_p or not gpu_util.declares("num_splits") else case.num_splits
    return replace(case, dtype=dtype, num_splits=splits)


@HALF
@pytest.mark.parametrize("feature", FEATURE_CASES)
def test_a_feature_is_served_where_declared_and_refused_where_not(feature, dtype):
    """The table is believed: what a row declares serves, what none declares raises by name."""
    inputs = make_inputs(replace(FEATURE_CASES[feature], dtype=dtype), "cuda")
    if gpu_util.declares(feature):
        assert gpu_util.declared(inputs)
    else:
        with pytest.raises(RuntimeError, match=f"{gpu_util.REFUSAL}.*{feature}"):
            run_inputs(inputs, needed=())


def test_probabilities_are_served_where_declared_and_refused_where_not():
    inputs = make_inputs(Case(dtype=BF16), "cuda")
    lse = flash_ext.attention(inputs.q, inputs.k, inputs.v, return_lse=True)[1]
    if gpu_util.rows("probs"):
        probs = flash_ext.attn_probs(inputs.q, inputs.k, lse)
        torch.testing.assert_close(probs.float().sum(-1), torch.ones_like(lse), rtol=0, atol=2e-2)
    else:
        gpu_util.assert_refused(lambda: flash_ext.attn_probs(inputs.q, inputs.k, lse))


@HALF
@pytest.mark.parametrize("name", SINGLE)
def test_one_feature(name, dtype):
    gpu_util.check(Case(**SINGLE[name], dtype=dtype, name=name))


@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("form", broadcast_forms())
def test_bias_forms(form, layout):
    """As a bias of the case's dtype, of fp32, and as a mask; with rows that see nothing."""
    common = {"bias": form, "layout": layout, "sinks": "some", "softmax_scale": 0.3}
    gpu_util.check(Case(**common, dtype=BF16, bias_hides=0.1))
    gpu_util.check(Case(**common, dtype=BF16, bias_dtype=FP32, causal=True))
    gpu_util.check(Case(**common, dtype=FP16, bias_dtype=torch.bool, causal=True))


@HALF
@pytest.mark.parametrize("strides", ["transposed", "odd", "last"])
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_strides(layout, strides, dtype):
    """Of every input; odd ones and those of last stride 2 lie in bands of NaN."""
    features = {"bias": "bhqk", "alibi": "bh", "sinks": "finite", "dropout_p": 0.2}
    gpu_util.check(Case(layout=layout, strides=strides, dtype=dtype, **features))
    case = Case(layout=layout, strides=strides, dtype=dtype, head_dim=1, bias="11qk")
    gpu_util.check(case)
    gpu_util.check(replace(case, head_dim=128, causal=True))


@pytest.mark.parametrize("case", PAIRWISE, ids=lambda case: f"{case.seed}-{case}")
def test_two_features(case):
    gpu_util.check(half(case))


@pytest.mark.parametrize("features", [{}, {"causal": True}, HEADS], ids=str)
@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_empty(case, features):
    """Empty or zero results, and nothing is launched over nothing."""
    result = gpu_util.check(replace(case, dtype=BF16, bias="1hqk", **features))
    assert result.out.eq(0).all()
    if not features.get("sinks"):
        assert result.lse.isneginf().all()


@pytest.mark.parametrize("sink", [None, 0.5, -float("inf")])
@pytest.mark.parametrize("kind", ["causal", "window", "mask", "bias"])
def test_rows_without_keys(kind, sink):
    options, rows = blind(kind, "cuda")
    inputs = make_inputs(Case(seqlens_k=(30, 30), dtype=BF16), "cuda").replace(**options)
    if sink is not None:
        inputs = inputs.replace(sinks=torch.full((4,), sink, device="cuda"))
    result = gpu_util.check_inputs(inputs, kind)
    expected = -float("inf") if sink in (None, -float("inf")) else sink
    assert result.out[:, rows].eq(0).all() and result.lse[:, :, rows].eq(expected).all()
    assert torch.isfinite(result.out).all()


@HALF
@pytest.mark.parametrize("level", [1e5, -1e5, 3e4])
def test_scores_all_alike_are_uniform(level, dtype):
    """Softmax is shift invariant, at any height: 70 keys, each with the score `level`."""
    inputs = make_inputs(Case(seqlens_k=(70, 70), head_dim=4, dtype=dtype), "cuda")
    inputs.q.fill_(256.0 if level > 0 else -256.0)
    inputs.k.fill_(128.0)  # products of exactly 2**17
    result = run_inputs(inputs.replace(softmax_scale=abs(level) / 2**17), needed=())
    v = inputs.v.repeat_interleave(2, dim=2).double()
    mean = v.mean(1, keepdim=True).expand_as(result.out)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result.out.double(), mean, rtol=0, atol=2 * eps)
    expected = torch.full_like(result.lse, level) + torch.tensor(70.0).log().item()
    torch.testing.assert_close(result.lse, expected, rtol=2e-6, atol=1e-4)


@HALF
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_dropout_masks_equal_the_cpus(layout, dtype):
    """With the identity for v, out shows which probabilities are kept: the same on both."""
    n = 130
    case = Case((65, 65), (n, n), dropout_p=0.4, num_heads_k=4, layout=layout, dtype=dtype)
    inputs = make_inputs(case)
    v = torch.eye(n, dtype=dtype)[:, None].expand(n, 4, n)
    v = v.expand(2, n, 4, n) if layout == "dense" else v.repeat(2, 1, 1)
    kept = []
    for device in ("cpu", "cuda"):
        options = {
            name: x.to(device) if isinstance(x, torch.Tensor) else x
            for name, x in inputs.options.items()
        }
        q, k = inputs.q.to(device), inputs.k.to(device)
        kept.append(flash_ext.attention(q, k, v.to(device), **options).cpu() != 0)
    assert torch.equal(*kept)
    assert 0.35 < 1 - kept[0].double().mean() < 0.45


@HALF
def test_packed_sequences_equal_dense_ones(dtype):
    """Each with its own mask, slopes and sinks. A short sequence alone may have another kernel."""
    case = Case(
        **{"layout": "varlen", "seqlens_q": (65, 1, 0, 140), "seqlens_k": (100, 64, 7, 230)},
        **{"gap": (4, 3), "sinks": "some", "alibi": "bh", "softcap": 5.0, "dtype": dtype},
        causal=True,
    )
    inputs = make_inputs(case, "cuda")
    packed = run_inputs(inputs, needed=())
    row_ends, key_ends = (cumulative(n, 4).tolist() for n in (case.seqlens_q, case.seqlens_k))
    used = torch.zeros(inputs.q.shape[0], dtype=torch.bool, device="cuda")
    for b in range(case.batch):
        row = slice(row_ends[b], row_ends[b + 1])
        key = slice(key_ends[b], key_ends[b + 1])
        used[row] = True
        out, lse = flash_ext.attention(
            *(inputs.q[None, row], inputs.k[None, key], inputs.v[None, key]),
            **{"alibi_slopes": inputs.alibi_slopes[b], "sinks": inputs.sinks},
            **{"softcap": 5.0, "causal": True, "return_lse": True},
        )
        gpu_util.assert_close_results((packed.out[row], packed.lse[:, row]), (out[0], lse[0]))
    assert packed.out[~used].eq(0).all() and packed.lse[:, ~used].isneginf().all()


@HALF
def test_grouped_heads_equal_repeated_ones(dtype):
    inputs = make_inputs(Case(num_heads=6, num_heads_k=2, causal=True, dtype=dtype), "cuda")
    k, v = (x.repeat_interleave(3, dim=2) for x in (inputs.k, inputs.v))
    grouped = run_inputs(inputs, needed=())
    repeated = run_inputs(inputs.replace(k=k, v=v), needed=())
    assert same_bits(grouped.out, repeated.out) and same_bits(grouped.lse, repeated.lse)


@HALF
def test_seqused_equals_shorter_tensors(dtype):
    inputs = make_inputs(Case(causal=True, alibi="h", dtype=dtype), "cuda")
    used = inputs.replace(seqused_q=lengths((40, 40), "cuda"), seqused_k=lengths((70, 70), "cuda"))
    short = inputs.replace(q=inputs.q[:, :40], k=inputs.k[:, :70], v=inputs.v[:, :70])
    got, expected = run_inputs(used, needed=()), run_inputs(short, needed=())
    assert same_bits(got.out[:, :40], expected.out) and got.out[:, 40:].eq(0).all()
    assert same_bits(got.lse[:, :, :40], expected.lse) and got.lse[:, :, 40:].isneginf().all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("softmax_scale", [None, 1e-6])
def test_products_beyond_a_billion(head_dim, sign, softmax_scale):
    """All keys alike give a uniform row, however large q.k is (semantics.md, Edges)."""
    q = torch.full((1, 70, 2, head_dim), 8192.0 * sign, dtype=BF16, device="cuda")
    k = torch.full((1, 90, 2, head_dim), 8192.0, dtype=BF16, device="cuda")
    v = torch.randn(1, 90, 2, head_dim, dtype=BF16, device="cuda")
    out, lse = flash_ext.attention(q, k, v, softmax_scale=softmax_scale, return_lse=True)
    assert torch.isfinite(lse).all()
    mean = v.double().mean(1, keepdim=True).expand(out.shape)
    torch.testing.assert_close(out.double(), mean, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_row_of_nan_stays_one(head_dim):
    q, k, v = (torch.randn(1, 300, 2, head_dim, dtype=BF16, device="cuda") for _ in range(3))
    q[0, 5] = math.nan
    out, lse = flash_ext.attention(q, k, v, causal=True, return_lse=True)
    assert out[0, 5].isnan().all() and lse[0, :, 5].isnan().all()
    assert out[0, 128:].isfinite().all() and lse[0, :, 128:].isfinite().all()
