"""What no row sees reaches nothing; nothing outside a tensor is touched (semantics.md, "Edges").

NaN and Inf are put where no row looks, and every output and gradient must keep its bits. Inputs lie
in bands of NaN. Lengths on the device may hold anything.
"""

import math

import pytest
import torch
from util import (
    ALL_FEATURES,
    GRADIENT_NAMES,
    Case,
    GuardBands,
    assert_close_to_reference,
    assert_same,
    make_inputs,
    reference_options,
    run_inputs,
    run_reference_inputs,
    same_bits,
)

import flash_ext

POISON = [math.nan, math.inf, -math.inf]

# ---- what no row sees ----------------------------------------------------------------------------

PACKED = {
    **{"layout": "varlen", "seqlens_q": (65, 0, 20, 3), "seqlens_k": (70, 9, 130, 0)},
    **{"gap": (5, 7)},
}
HIDDEN = {
    "seqused_k": Case(seqused_k=(70, 3)),
    "seqused_k 0": Case(seqused_k=(0, 100)),
    "seqused_q": Case(seqused_q=(64, 0)),
    "seqused, causal": Case(seqused_q=(40, 65), seqused_k=(100, 66), causal=True),
    "window left": Case(seqlens_k=(200, 200), seqlens_q=(10, 10), window=(5, -1)),
    "window over tiles": Case(seqlens_k=(300, 300), seqlens_q=(70, 70), window=(3, 2)),
    "window right of many rows": Case(seqlens_q=(3, 3), window=(-1, 0), seqused_k=(99, 1)),
    "splits": Case(seqlens_k=(300, 300), seqlens_q=(5, 5), window=(20, 0), num_splits=4),
    "varlen gaps": Case(**PACKED),
    "varlen gaps, causal": Case(**PACKED, causal=True, sinks="finite"),
    "varlen, seqused": Case(**PACKED, seqused_q=(60, 3, 0, 3), seqused_k=(1, 9, 64, 5)),
    "varlen, window": Case(**PACKED, window=(4, 1), seqused_k=(70, 9, 99, 0), num_splits=2),
    "gqa, bf16": Case(seqused_k=(70, 3), num_heads=6, dtype=torch.bfloat16),
    "fp16": Case(**PACKED, dtype=torch.float16),
    "everything": Case(**{**ALL_FEATURES, "window": (20, -1), "seqlens_q": (30, 30)}),
    "everything, varlen": Case(
        **{**ALL_FEATURES, **PACKED, "bias": "bhqk", "window": (9, 3), "seqused_k": (60, 9, 99, 0)}
    ),
    "broadcast bias": Case(bias="11q1", seqused_k=(70, 3), seqused_q=(64, 5)),
    "mask": Case(bias="b11k", bias_dtype=torch.bool, seqused_k=(70, 3)),
}


def seen_by_nobody(case):
    """Bool masks over rows and keys in their tensors' layout, and over the bias (or None)."""
    shape_q, shape_k = (
        [case.batch, n[0]] if not case.is_varlen else [sum(case.gap) + sum(n)]
        for n in (case.seqlens_q, case.seqlens_k)
    )
    rows, keys = torch.ones(shape_q, dtype=torch.bool), torch.ones(shape_k, dtype=torch.bool)
    bias = torch.ones(case.bias_size(), dtype=torch.bool)
    begin_q = begin_k = case.gap[0]
    for b in range(case.batch):
        length_q, length_k = case.seqlens_q[b], case.seqlens_k[b]
        m = min(length_q, case.seqused_q[b] if case.seqused_q else length_q)
        n = min(length_k, case.seqused_k[b] if case.seqused_k else length_k)
        offset = torch.arange(n)[None] - (torch.arange(m)[:, None] + n - m)
        seen = torch.ones(m, n, dtype=torch.bool)
        if case.causal:
            seen &= offset <= 0
        if case.window[0] >= 0:
            seen &= offset >= -case.window[0]
        if case.window[1] >= 0:
            seen &= offset <= case.window[1]
        bias[b, :, :m, :n] = ~seen
        at_q = slice(begin_q, begin_q + m) if case.is_varlen else (b, slice(0, m))
        at_k = slice(begin_k, begin_k + n) if case.is_varlen else (b, slice(0, n))
        rows[at_q] = False
        keys[at_k] = ~seen.any(0)
        begin_q, begin_k = begin_q + length_q, begin_k + length_k
    return rows, keys, bias


def broadcast_to(hidden, shape):
    """True where every entry that a broadcast bias stands for is hidden."""
    for dimension, size in enumerate(shape):
        if size == 1:
            hidden = hidden.all(dimension, keepdim=True)
    return hidden


def poisoned(inputs, case, value):
    """The inputs with `value` wherever nobody looks, in inputs and incoming gradients."""
    rows, keys, entries = (x.to(inputs.q.device) for x in seen_by_nobody(case))
    assert rows.any() or keys.any(), "the case hides nothing"
    changed = {
        "q": inputs.q.masked_fill(rows[..., None, None], value),
        "k": inputs.k.masked_fill(keys[..., None, None], value),
        "v": inputs.v.masked_fill(keys[..., None, None], value),
        "dout": inputs.dout.masked_fill(rows[..., None, None], value),
        "dlse": inputs.dlse.masked_fill(rows.unsqueeze(-2), value),
    }
    if inputs.bias is not None and inputs.bias.dtype != torch.bool:
        entries = broadcast_to(entries, inputs.bias.shape)
        changed["bias"] = inputs.bias.masked_fill(entries, value)
    return inputs.replace(**changed)


@pytest.mark.parametrize("name", HIDDEN)
def test_poison_that_no_row_sees(name, device):
    case = HIDDEN[name]
    if torch.device(device).type != "cpu" and case.dtype == torch.float32:
        case = Case(**{**vars(case), "dtype": torch.bfloat16})
    inputs = make_inputs(case, device)
    expected = run_inputs(inputs)
    assert all(torch.isfinite(x).all() for n, x in expected.tensors().items() if n != "lse")
    for value in POISON:
        assert_same(expected, run_inputs(poisoned(inputs, case, value)), f"{name}, {value}")


@pytest.mark.parametrize("name", ["seqused, causal", "varlen gaps", "window left", "everything"])
def test_poison_stays_out_of_the_probabilities(name, device, dtype):
    case = Case(**{**vars(HIDDEN[name]), "dtype": dtype})
    inputs = make_inputs(case, device)
    options = {n: x for n, x in inputs.options.items() if n not in ("deterministic", "num_splits")}
    lse = run_inputs(inputs).lse
    expected, got = (
        flash_ext.attn_probs(x.q, x.k, lse, x.bias, x.alibi_slopes, **options)
        for x in (inputs, poisoned(inputs, case, math.nan))
    )
    assert torch.isfinite(expected).all() and same_bits(expected, got)


@pytest.mark.parametrize("value", POISON)
def test_a_seen_value_reaches_no_further_than_its_query_tile_and_head(value, device, dtype):
    """Causal, 300 keys: key 290 is seen by the last ten rows of its head's group."""
    inputs = make_inputs(
        Case(seqlens_q=(300, 300), seqlens_k=(300, 300), causal=True, dtype=dtype), device
    )
    expected = run_inputs(inputs)
    bad = inputs.replace(k=inputs.k.clone(), v=inputs.v.clone())
    bad.v[1, 290, 1] = value
    bad.k[1, 290, 1, 0] = value
    got = run_inputs(bad)
    for name, x in (("out", got.out), ("q", got.grads["q"])):
        y = expected.out if name == "out" else expected.grads[name]
        assert same_bits(x[0], y[0]), f"{name}: another sequence"
        assert same_bits(x[1, :, :2], y[1, :, :2]), f"{name}: the other group's heads"
        assert same_bits(x[1, :256], y[1, :256]), f"{name}: other rows"
    for name in "kv":
        x, y = got.grads[name], expected.grads[name]
        assert same_bits(x[0], y[0]) and same_bits(x[1, :, 0], y[1, :, 0]), name
    assert not torch.isfinite(got.out[1, 290:, 2:]).all(), "what is seen must show"


# ---- guard bands ---------------------------------------------------------------------------------


@pytest.mark.parametrize("last_stride", [1, 2])
@pytest.mark.parametrize("name", HIDDEN)
def test_inputs_in_bands_of_nan(name, last_stride, device):
    """Odd strides and offsets, NaN right next to every row: the bits of a contiguous call."""
    case = HIDDEN[name]
    if torch.device(device).type != "cpu" and case.dtype == torch.float32:
        case = Case(**{**vars(case), "dtype": torch.bfloat16})
    inputs = make_inputs(case, device)
    bands = GuardBands()
    banded = inputs.replace(
        **{n: bands.wrap(x, last_stride, n) for n, x in inputs.tensors().items()}
    )
    assert_same(run_inputs(inputs), run_inputs(banded))
    bands.check()


def test_the_forwards_results_in_bands(device, dtype):
    """out and lse as the backward gets them."""
    inputs = make_inputs(Case(**ALL_FEATURES, dtype=dtype), device)
    first = [getattr(inputs, name) for name in GRADIENT_NAMES]
    options = {"page_table": None, **reference_options(inputs)}
    options |= dict(zip(GRADIENT_NAMES[3:], first[3:], strict=True))
    out, lse = torch.ops.flash.attn(*first, **reference_options(inputs))
    bands = GuardBands()
    plain, banded = (
        torch.ops.flash.attn_backward(
            *(wrap(inputs.dout), wrap(inputs.dlse), *first[:3], wrap(out), wrap(lse)),
            **options,
            needed=[True] * 6,
        )
        for wrap in (lambda x: x, bands.wrap)
    )
    assert all(same_bits(a, b) for a, b in zip(plain, banded, strict=True))
    bands.check()


def test_bands_notice():
    """What the bands are worth: a write next to the tensor, or in it, is seen."""
    for write in (
        lambda x: x.fill_(0),
        lambda x: x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(0),
        lambda x: x[1:].as_strided((1,), (1,), x[1:].storage_offset() + x.shape[1]).fill_(0),
    ):
        bands = GuardBands()
        x = bands.wrap(torch.ones(3, 4))
        bands.check()
        write(x)
        with pytest.raises(AssertionError, match="written"):
            bands.check()


# ---- lengths on the device that nobody checked ---------------------------------------------------

LOWEST, HIGHEST = -(2**31), 2**31 - 1
BAD_CU_SEQLENS = {
    "decreasing": (0, 40, 20, 60),
    "beyond the total": (0, 20, 60, 1000),
    "all beyond": (500, 600, 700, 800),
    "negative": (-5, 10, 20, 60),
    "all negative": (-9, -8, -7, -6),
    "extremes": (LOWEST, HIGHEST, LOWEST, HIGHEST),
    "extremes the other way": (HIGHEST, LOWEST, HIGHEST, 0),
    "overlapping": (0, 60, 0, 60),
}


def packed_inputs(device, dtype, **features):
    case = Case(
        **{"layout": "varlen", "seqlens_q": (20, 20, 20), "seqlens_k": (20, 20, 20)},
        **{"max_seqlen": "none", "strides": "odd", "dtype": dtype},
        **features,
    )
    return make_inputs(case, device)


def assert_harmless(result):
    """Every result is written and finite (lse: or -inf); run_inputs has checked the inputs."""
    for name, x in result.tensors().items():
        assert (torch.isfinite(x) | (torch.isneginf(x) & (name == "lse"))).all(), name


@pytest.mark.parametrize("side", ["q", "k", "qk"])
@pytest.mark.parametrize("name", BAD_CU_SEQLENS)
def test_bad_cu_seqlens(name, side, device, dtype):
    bad = torch.tensor(BAD_CU_SEQLENS[name], dtype=torch.int32, device=device)
    for features in ({}, {"causal": True, "sinks": "finite", "alibi": "bh", "num_splits": 3}):
        inputs = packed_inputs(device, dtype, **features)
        assert_harmless(run_inputs(inputs.replace(**{f"cu_seqlens_{s}": bad for s in side})))


@pytest.mark.parametrize("values", [(-5, 7, 20), (LOWEST, HIGHEST, 0), (1000, -1, 21)], ids=str)
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_bad_seqused_is_clamped(values, layout, device, dtype):
    """Negative lengths are 0 and long ones the sequence's own: the reference's results."""
    case = Case(
        **{"layout": layout, "seqlens_q": (20,) * 3, "seqlens_k": (30,) * 3, "causal": True},
        **{"seqused_q": values, "seqused_k": values[::-1], "bias": "1hqk", "dtype": dtype},
    )
    inputs = make_inputs(case, device)
    result = run_inputs(inputs)
    assert_harmless(result)
    assert_close_to_reference(result, *run_reference_inputs(inputs), inputs, f"{case}, seed 0")


@pytest.mark.parametrize("values", [(-3, 20, 99), (-9, 20, 2**30)], ids=str)
def test_bad_ends_are_clamped(values, device, dtype):
    """Below 0 is 0 and beyond the total is the total: the reference's results."""
    case = Case(layout="varlen", seqlens_q=(20, 20), seqlens_k=(20, 20), alibi="h", dtype=dtype)
    inputs = make_inputs(case, device)
    bad = torch.tensor(values, dtype=torch.int32, device=device)
    inputs = inputs.replace(cu_seqlens_q=bad, cu_seqlens_k=bad)
    result = run_inputs(inputs)
    assert_close_to_reference(result, *run_reference_inputs(inputs), inputs, f"{case}, seed 0")


@pytest.mark.parametrize("seed", range(20))
def test_random_lengths(seed, device, dtype):
    """Any 32-bit numbers, near the tensor's size more often than not; a bias of max_seqlen too."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        near = torch.randint(-10, 80, (count,), generator=generator)
        far = torch.randint(LOWEST, HIGHEST, (count,), generator=generator)
        return torch.where(torch.rand(count, generator=generator) < 0.8, near, far).int().to(device)

    features = {"bias": "bhqk", "dropout_p": 0.2} if seed % 2 else {"window": (9, 4)}
    inputs = packed_inputs(device, dtype, **features)
    for _ in range(4):
        lengths = {"cu_seqlens_q": draw(4), "cu_seqlens_k": draw(4)}
        lengths |= {"seqused_q": draw(3), "seqused_k": draw(3)} if seed % 3 else {}
        bad = inputs.replace(**lengths)
        result = run_inputs(bad)
        assert_harmless(result)
        options = {n: x for n, x in bad.options.items() if n not in ("deterministic", "num_splits")}
        probs = flash_ext.attn_probs(bad.q, bad.k, result.lse, bad.bias, **options)
        assert torch.isfinite(probs).all()
