"""Which calls give the same bits, semantics.md: "Gradients", "Masks" and num_splits.

Repeated runs and any number of threads; a sequence whatever its batchmates; arguments that hide or
change nothing; any subset of gradients; inputs of other strides.
"""

import math
from dataclasses import replace

import pytest
import torch
from util import (
    ALL_FEATURES,
    GRADIENT_NAMES,
    Case,
    assert_same,
    cumulative,
    lengths,
    make_inputs,
    reference_options,
    run,
    run_inputs,
    same_bits,
)

import flash_ext

# ---- runs and threads ----------------------------------------------------------------------------

LONG = {"seqlens_q": (200, 200), "seqlens_k": (300, 300)}
CALLS = {
    "plain": Case(),
    "one head, many tiles": Case(
        **{"seqlens_q": (700,), "seqlens_k": (700,), "num_heads": 1, "num_heads_k": 1}
    ),
    "bf16": Case(dtype=torch.bfloat16, causal=True, **LONG),
    "fp16, mqa": Case(dtype=torch.float16, num_heads_k=1, **LONG),
    "fp64": Case(dtype=torch.float64, softcap=2.0),
    "everything": Case(**ALL_FEATURES),
    "broadcast bias": Case(bias="111k", sinks="finite", alibi="h", **LONG),
    "bias of rows": Case(bias="1hq1", bias_dtype=torch.float32, dtype=torch.bfloat16, **LONG),
    "splits": Case(num_splits=3, **LONG),
    "varlen": Case(
        **{"layout": "varlen", "seqlens_q": (200, 0, 65, 1), "seqlens_k": (300, 5, 0, 64)},
        **{"alibi": "bh", "sinks": "some", "dropout_p": 0.1, "gap": (3, 2)},
    ),
}


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_any_number_of_threads_and_every_run(name, deterministic, device, restored_threads):
    on_cpu = torch.device(device).type == "cpu"
    if not on_cpu and (not deterministic or CALLS[name].dtype.itemsize > 2):
        pytest.skip("gpu: deterministic only when asked, and in fp16 and bf16 alone")
    inputs = make_inputs(replace(CALLS[name], deterministic=deterministic), device)
    torch.set_num_threads(1)
    expected = run_inputs(inputs, fill=False)
    for threads in (1, 2, 2, 5):
        torch.set_num_threads(threads)
        assert_same(expected, run_inputs(inputs, fill=False), f"{name}, {threads} threads")


def test_attn_probs_and_merge(device, dtype, restored_threads):
    inputs = make_inputs(Case(dropout_p=0.2, dtype=dtype, **LONG), device)
    dropout = {name: inputs.options[name] for name in ("dropout_p", "rng_state")}
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        part = flash_ext.attention(inputs.q, inputs.k, inputs.v, return_lse=True, **dropout)
        probs = flash_ext.attn_probs(inputs.q, inputs.k, part[1], **dropout)
        results.append((*part, probs, *flash_ext.merge(*part, *part)))
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_torchs_own_switch_counts(device, dtype):
    """torch.use_deterministic_algorithms(True) is deterministic=True, by explain's account."""
    inputs = make_inputs(Case(dtype=dtype), device)
    first = (inputs.q, inputs.k, inputs.v)
    asked = flash_ext.explain(*first, deterministic=True)
    assert "deterministic" in asked
    torch.use_deterministic_algorithms(True)
    try:
        assert flash_ext.explain(*first) == asked
    finally:
        torch.use_deterministic_algorithms(False)
    assert "deterministic" not in flash_ext.explain(*first)


# ---- batchmates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (70, -1)}], ids=str)
def test_a_sequence_is_independent_of_its_batchmates(options, num_splits, device, dtype):
    """With a fixed num_splits: dense alone or in a batch, packed among longer and empty ones."""
    case = Case(
        **{"seqlens_q": (65, 65, 65), "seqlens_k": (200, 200, 200), "sinks": "some"},
        **{"num_splits": num_splits, "dtype": dtype, "dropout_p": 0.1, "softcap": 5.0},
        **options,
    )
    inputs = make_inputs(case, device)
    batch = run_inputs(inputs)
    alone = run_inputs(
        inputs.replace(
            **{name: getattr(inputs, name)[:1] for name in ("q", "k", "v", "dout", "dlse")}
        )
    )
    assert same_bits(batch.out[:1], alone.out) and same_bits(batch.lse[:1], alone.lse)
    # The same first sequence, then an empty one and the third's rows on the second's keys.
    packed = inputs.replace(
        q=torch.cat([inputs.q[0], inputs.q[2, :40]]),
        k=inputs.k[:2].flatten(0, 1),
        v=inputs.v[:2].flatten(0, 1),
        dout=torch.cat([inputs.dout[0], inputs.dout[2, :40]]),
        dlse=torch.cat([inputs.dlse[0], inputs.dlse[2, :, :40]], dim=1),
        cu_seqlens_q=cumulative((65, 0, 40), device=device),
        cu_seqlens_k=cumulative((200, 0, 200), device=device),
    )
    got = run_inputs(packed)
    assert same_bits(got.out[:65], alone.out[0]) and same_bits(got.lse[:, :65], alone.lse[0])


def test_the_place_of_a_sequence_matters_to_dropout_alone(device, dtype):
    case = Case(seqlens_q=(65,) * 3, seqlens_k=(100,) * 3, dtype=dtype, num_splits=2)
    inputs = make_inputs(case, device)
    names = ("q", "k", "v", "dout", "dlse")
    flipped = inputs.replace(**{name: getattr(inputs, name).flip(0) for name in names})
    a, b = run_inputs(inputs), run_inputs(flipped)
    assert same_bits(a.out, b.out.flip(0)) and same_bits(a.lse, b.lse.flip(0))
    for name in "qkv":
        assert same_bits(a.grads[name], b.grads[name].flip(0))
    state = {"dropout_p": 0.3, "rng_state": torch.tensor([3, 4], device=device)}
    a, b = run_inputs(inputs.replace(**state)), run_inputs(flipped.replace(**state))
    assert not torch.equal(a.out, b.out.flip(0)) and same_bits(a.lse, b.lse.flip(0))


# ---- arguments that change nothing ---------------------------------------------------------------

NOTHING_HIDDEN = [
    {"window": (99, -1)},
    {"window": (-1, 64)},
    {"window": (99, 64)},
    {"window": (2**31, 2**31 - 1)},
    {"window": (2**40, 2**62)},
]


@pytest.mark.parametrize("layout", ["dense", "varlen"])
@pytest.mark.parametrize("options", NOTHING_HIDDEN, ids=str)
def test_a_window_that_hides_nothing_leaves_the_bits(options, layout, device, dtype):
    for features in ({}, {"softcap": 3.0, "bias": "11qk", "alibi": "h"}):
        case = Case(layout=layout, dtype=dtype, **features)
        assert_same(run(case, device), run(replace(case, **options), device))


@pytest.mark.parametrize("seqlens", [(65, 100), (100, 65)])
def test_causal_is_a_right_window_of_zero(seqlens, device, dtype):
    case = Case(seqlens_q=seqlens[:1], seqlens_k=seqlens[1:], causal=True, dtype=dtype)
    expected = run(case, device)
    assert_same(expected, run(replace(case, causal=False, window=(-1, 0)), device))
    assert_same(expected, run(replace(case, window=(2**20, 7)), device))


def off_values():
    """Arguments that are given and do nothing."""
    return {
        "sinks -inf": {"sinks": torch.full((4,), -math.inf)},
        "slopes 0": {"alibi_slopes": torch.zeros(4)},
        "bias 0": {"bias": torch.zeros(1, 1, 1, 1)},
        "mask true": {"bias": torch.ones(1, 1, 65, 100, dtype=torch.bool)},
        "softcap 0": {"softcap": 0.0},
        "dropout below 1/512": {"dropout_p": 0.0019, "rng_state": torch.tensor([1, 2])},
        "rng_state without dropout": {"rng_state": torch.tensor([1, 2])},
        "default scale": {"softmax_scale": 32**-0.5},
        "seqused of all": {"seqused_k": lengths((100, 100)), "seqused_q": lengths((65, 65))},
        "deterministic": {"deterministic": True},
    }


@pytest.mark.parametrize("name", off_values())
def test_an_argument_that_does_nothing_leaves_the_bits(name, device, dtype):
    inputs = make_inputs(Case(dtype=dtype), device)
    options = {
        n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in off_values()[name].items()
    }
    expected = run_inputs(inputs)
    assert_same(expected, run_inputs(inputs.replace(**options), needed=("q", "k", "v")))


def test_max_seqlen_shortens_sequences(device, dtype):
    case = Case(layout="varlen", seqlens_q=(20, 70), seqlens_k=(90, 10), dtype=dtype, causal=True)
    inputs = make_inputs(case, device)
    short = run_inputs(inputs.replace(max_seqlen_q=40, max_seqlen_k=64))
    used = {"seqused_q": lengths((20, 40), device), "seqused_k": lengths((64, 10), device)}
    assert_same(run_inputs(inputs.replace(**used)), short)
    assert short.out[60:].eq(0).all() and short.lse[:, 60:].isneginf().all()


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [{}, ALL_FEATURES, {**ALL_FEATURES, "bias": "b11k"}], ids=str)
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_any_subset_of_gradients_has_the_same_bits(features, layout, device, dtype):
    case = Case(**features, layout=layout, dtype=dtype)
    inputs = make_inputs(case, device)
    expected = run_inputs(inputs)
    names = list(inputs.differentiable())
    subsets = [{name} for name in names] + [{*names} - {name} for name in names] + [set()]
    for subset in subsets:
        result = run_inputs(inputs, needed=subset)
        assert set(result.grads) == subset
        assert_same(expected, result, f"only {subset}")


def test_an_unused_lse_leaves_the_bits(device, dtype):
    for features in ({}, ALL_FEATURES):
        inputs = make_inputs(Case(**features, dtype=dtype), device)
        unused = run_inputs(inputs.replace(dlse=None))
        zero = run_inputs(inputs.replace(dlse=torch.zeros_like(inputs.dlse)))
        used = run_inputs(inputs)
        assert_same(unused, zero)
        assert same_bits(unused.out, used.out) and same_bits(unused.lse, used.lse)
        assert same_bits(unused.grads["v"], used.grads["v"])  # dv does not know of dlse
        assert not torch.equal(unused.grads["q"], used.grads["q"])


# ---- strides -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda x: x.expand(2, 65, 4, 32), lambda x: x.contiguous()])
def test_dout_of_stride_zero(make, device, dtype):
    inputs = make_inputs(Case(dtype=dtype), device)
    ones = torch.ones((), dtype=dtype, device=device).expand(2, 65, 4, 32)
    expected = run_inputs(inputs.replace(dout=ones.contiguous()))
    assert_same(expected, run_inputs(inputs.replace(dout=make(ones))))


def test_backward_takes_out_and_lse_of_any_strides(device, dtype):
    inputs = make_inputs(Case(sinks="finite", dtype=dtype), device)
    first = [getattr(inputs, name) for name in GRADIENT_NAMES]
    options = {"page_table": None, **reference_options(inputs)}
    options |= dict(zip(GRADIENT_NAMES[3:], first[3:], strict=True))
    out, lse = torch.ops.flash.attn(*first, **reference_options(inputs))
    needed = [True, True, True, False, False, True]

    def backward(arrange):
        tensors = (inputs.dout, inputs.dlse, *first[:3], out, lse)
        tensors = (arrange(x) for x in tensors)
        return torch.ops.flash.attn_backward(*tensors, **options, needed=needed)

    def last_stride_two(x):
        return torch.stack([x, torch.full_like(x, math.nan)], dim=-1)[..., 0]

    def backwards_in_memory(x):
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))

    expected = backward(lambda x: x)
    for arrange in (last_stride_two, backwards_in_memory):
        for a, b in zip(expected, backward(arrange), strict=True):
            assert (a is None and b is None) or same_bits(a, b)
