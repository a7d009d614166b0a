"""Wrong calls: each is refused before anything is allocated or computed, and the message says which
argument, what it got, and what is allowed (semantics.md, "Errors").

A row is the call's name, what differs from a right call, and what the message must contain.
"""

import math

import pytest
import torch

import flash_ext

NAN, INF = math.nan, math.inf
BATCH, SEQLEN_Q, SEQLEN_K, HEADS, HEADS_K, DIM = 2, 5, 7, 4, 2, 8


def dense(**changes):
    """The arguments of a right call, some replaced."""
    right = {
        "q": torch.randn(BATCH, SEQLEN_Q, HEADS, DIM),
        "k": torch.randn(BATCH, SEQLEN_K, HEADS_K, DIM),
        "v": torch.randn(BATCH, SEQLEN_K, HEADS_K, DIM),
    }
    return right | changes


def packed(**changes):
    right = {
        "q": torch.randn(5, HEADS, DIM),
        "k": torch.randn(7, HEADS_K, DIM),
        "v": torch.randn(7, HEADS_K, DIM),
        "cu_seqlens_q": int32(0, 2, 5),
        "cu_seqlens_k": int32(0, 3, 7),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }
    return right | changes


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def refused(call, error, *fragments):
    """Runs call, which must raise, name every fragment, and allocate no result.

    Returns the message.
    """
    with (
        torch.autograd.profiler.profile() as profile,
        pytest.raises(error) as raised,
    ):
        call()
    message = str(raised.value)
    for fragment in fragments:
        assert fragment in message, f"{fragment!r} is missing: {message}"
    names = [event.name for event in profile.function_events]
    inside = names[next((i for i, n in enumerate(names) if "flash::" in n), len(names)) :]
    made = [
        name for name in inside if name in ("aten::new_empty", "aten::new_zeros", "aten::fill_")
    ]
    assert not made, f"{made} ran before the refusal"
    return message


# ---- values that the operator refuses ------------------------------------------------------------

OPERATOR = {
    # dtypes
    "q int64": (
        lambda: dense(q=zeros(2, 5, 4, 8, dtype=torch.int64)),
        ("q has dtype int64", "float16, bfloat16, float32 and float64"),
    ),
    "q bool": (
        lambda: dense(q=zeros(2, 5, 4, 8, dtype=torch.bool)),
        ("q has dtype bool", "float16"),
    ),
    "q fp8": (
        lambda: {n: x.to(torch.float8_e4m3fn) for n, x in dense().items()},
        ("q has dtype", "allowed are float16, bfloat16"),
    ),
    "k fp64": (
        lambda: dense(k=zeros(2, 7, 2, 8, dtype=torch.float64)),
        ("q has dtype float32 and k has float64", "convert with k.to(q.dtype)"),
    ),
    "v bf16": (
        lambda: dense(v=zeros(2, 7, 2, 8, dtype=torch.bfloat16)),
        ("q has dtype float32 and v has bfloat16", "convert with v.to(q.dtype)"),
    ),
    # shapes
    "q of 3 dimensions": (
        lambda: dense(q=zeros(5, 4, 8)),
        ("q has 3 dimensions", "(5, 4, 8)", "(batch, seqlen_q, num_heads, head_dim)"),
    ),
    "q of 5 dimensions": (lambda: dense(q=zeros(1, 2, 5, 4, 8)), ("q has 5 dimensions", "4 dim")),
    "k of 3 dimensions": (
        lambda: dense(k=zeros(7, 2, 8)),
        ("k has 3 dimensions", "(batch, seqlen_k, num_heads_k, head_dim)"),
    ),
    "v of 3 dimensions": (lambda: dense(v=zeros(7, 2, 8)), ("v has 3 dimensions", "4 dimensions")),
    "packed q of 4 dimensions": (
        lambda: packed(q=zeros(1, 5, 4, 8)),
        ("q has 4 dimensions", "(total_q, num_heads, head_dim) with cu_seqlens_q"),
    ),
    "packed v of 4 dimensions": (
        lambda: packed(v=zeros(1, 7, 2, 8)),
        ("v has 4 dimensions", "(total_k, num_heads_k, head_dim) with cu_seqlens_k"),
    ),
    "no heads": (lambda: dense(q=zeros(2, 5, 0, 8)), ("q has 0 heads", "at least 1")),
    "no key heads": (
        lambda: dense(k=zeros(2, 7, 0, 8), v=zeros(2, 7, 0, 8)),
        ("k has 0", "at least 1"),
    ),
    "heads no multiple": (
        lambda: dense(q=zeros(2, 5, 3, 8)),
        ("num_heads 3 of q", "no multiple", "2 of k"),
    ),
    "heads of v": (lambda: dense(v=zeros(2, 7, 4, 8)), ("v has 4 heads and k has 2", "equal")),
    "head_dim of k": (
        lambda: dense(k=zeros(2, 7, 2, 16)),
        ("k has head_dim 16 and q has 8", "equal"),
    ),
    "head_dim 0": (
        lambda: dense(q=zeros(2, 5, 4, 0), k=zeros(2, 7, 2, 0)),
        ("head_dim is 0", "1 to 256"),
    ),
    "head_dim_v 0": (lambda: dense(v=zeros(2, 7, 2, 0)), ("head_dim_v is 0", "1 to 256")),
    "head_dim 320": (
        lambda: dense(q=zeros(2, 5, 4, 320), k=zeros(2, 7, 2, 320)),
        ("head_dim 320 is above 256", "split the heads"),
    ),
    "head_dim_v 257": (
        lambda: dense(v=zeros(2, 7, 2, 257)),
        ("head_dim_v 257 is above 256", "split the heads"),
    ),
    "batch of k": (
        lambda: dense(k=zeros(3, 7, 2, 8)),
        ("batch sizes of q, k, v are 2, 3, 2", "equal", "expand"),
    ),
    "batch of v": (lambda: dense(v=zeros(1, 7, 2, 8)), ("batch sizes of q, k, v are 2, 2, 1",)),
    "keys of v": (lambda: dense(v=zeros(2, 6, 2, 8)), ("v has 6 keys and k has 7", "equal")),
    "packed keys of v": (lambda: packed(v=zeros(6, 2, 8)), ("v has 6 keys and k has 7", "equal")),
    # lengths
    "cu_seqlens_q alone": (
        lambda: packed(cu_seqlens_k=None),
        ("cu_seqlens_q and cu_seqlens_k come together", "only cu_seqlens_q"),
    ),
    "cu_seqlens_k alone": (
        lambda: packed(cu_seqlens_q=None),
        ("cu_seqlens_q and cu_seqlens_k come together", "only cu_seqlens_k"),
    ),
    "dense max_seqlen_q": (
        lambda: dense(max_seqlen_q=5),
        ("max_seqlen_q is 5 without cu_seqlens", "seqused_q"),
    ),
    "dense max_seqlen_k": (
        lambda: dense(max_seqlen_k=7),
        ("max_seqlen_k is 7 without cu_seqlens",),
    ),
    "negative max_seqlen_q": (
        lambda: packed(max_seqlen_q=-1),
        ("max_seqlen_q is -1", "0 or more"),
    ),
    "negative max_seqlen_k": (lambda: packed(max_seqlen_k=-3), ("max_seqlen_k is -3", "0 or more")),
    "cu_seqlens_q of 2 dimensions": (
        lambda: packed(cu_seqlens_q=int32(0, 2, 5)[None]),
        ("cu_seqlens_q has shape (1, 3)", "(batch + 1,)"),
    ),
    "cu_seqlens_q of nothing": (
        lambda: packed(cu_seqlens_q=int32()),
        ("cu_seqlens_q has shape (0,)", "(batch + 1,)"),
    ),
    "cu_seqlens_q int64": (
        lambda: packed(cu_seqlens_q=int32(0, 2, 5).long()),
        ("cu_seqlens_q has dtype int64", "int32", "cu_seqlens_q.int()"),
    ),
    "cu_seqlens_k float": (
        lambda: packed(cu_seqlens_k=int32(0, 3, 7).float()),
        ("cu_seqlens_k has dtype float32", "int32"),
    ),
    "cu_seqlens_k longer": (
        lambda: packed(cu_seqlens_k=int32(0, 3, 5, 7)),
        ("cu_seqlens_k has shape (4,)", "(3,)", "cu_seqlens_q"),
    ),
    "seqused_q int64": (
        lambda: dense(seqused_q=torch.tensor([1, 2])),
        ("seqused_q has dtype int64", "int32"),
    ),
    "seqused_k int64": (
        lambda: dense(seqused_k=torch.tensor([1, 2])),
        ("seqused_k has dtype int64", "int32"),
    ),
    "seqused_q too long": (
        lambda: dense(seqused_q=int32(1, 2, 3)),
        ("seqused_q has shape (3,)", "(2,)", "(batch,)"),
    ),
    "seqused_k of one": (lambda: packed(seqused_k=int32(1)), ("seqused_k has shape (1,)", "(2,)")),
    # scalars
    "softmax_scale inf": (lambda: dense(softmax_scale=INF), ("softmax_scale is inf", "finite")),
    "softmax_scale NaN": (lambda: dense(softmax_scale=NAN), ("softmax_scale is nan", "finite")),
    "softcap negative": (lambda: dense(softcap=-1.0), ("softcap is -1", "0 (off)", "positive")),
    "softcap NaN": (lambda: dense(softcap=NAN), ("softcap is nan", "0 (off)")),
    "softcap inf": (lambda: dense(softcap=INF), ("softcap is inf", "finite")),
    "window left": (
        lambda: dense(window=(-2, 0)),
        ("window_left is -2", "-1 (unbounded)", "(W - 1, 0)"),
    ),
    "window right": (lambda: dense(window=(0, -7)), ("window_right is -7", "-1 (unbounded)")),
    "num_splits negative": (lambda: dense(num_splits=-1), ("num_splits is -1", "0 (chosen", "256")),
    "num_splits 257": (lambda: dense(num_splits=257), ("num_splits is 257", "to 256")),
    "dropout_p negative": (lambda: dense(dropout_p=-0.1), ("dropout_p is -0.1", "from 0 to 1")),
    "dropout_p 1.5": (lambda: dense(dropout_p=1.5), ("dropout_p is 1.5", "from 0 to 1")),
    "dropout_p NaN": (lambda: dense(dropout_p=NAN), ("dropout_p is nan", "from 0 to 1")),
    "rng_state int32": (
        lambda: dense(dropout_p=0.1, rng_state=int32(1, 2)),
        ("rng_state has dtype int32", "int64"),
    ),
    "rng_state of three": (
        lambda: dense(rng_state=torch.tensor([1, 2, 3])),
        ("rng_state has shape (3,)", "(2,)", "(seed, offset)"),
    ),
    # bias, slopes, sinks
    "bias of 3 dimensions": (
        lambda: dense(bias=zeros(4, 5, 7)),
        ("bias has 3 dimensions", "(batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k or 1)"),
    ),
    "bias int32": (
        lambda: dense(bias=zeros(1, 1, 5, 7, dtype=torch.int32)),
        ("bias has dtype int32", "q's dtype float32", "bool"),
    ),
    "bias fp64": (
        lambda: dense(bias=zeros(1, 1, 5, 7, dtype=torch.float64)),
        ("bias has dtype float64", "q's dtype float32"),
    ),
    "bias fp16 for bf16": (
        lambda: (
            {n: x.bfloat16() for n, x in dense().items()}
            | {"bias": zeros(1, 1, 5, 7, dtype=torch.float16)}
        ),
        ("bias has dtype float16", "q's dtype bfloat16", "float32 and bool"),
    ),
    "bias batch": (
        lambda: dense(bias=zeros(3, 1, 1, 1)),
        ("bias", "(3, 1, 1, 1)", "0 may be 2 or 1"),
    ),
    "bias heads": (lambda: dense(bias=zeros(1, 2, 1, 1)), ("bias has shape", "1 may be 4 or 1")),
    "bias rows": (lambda: dense(bias=zeros(1, 1, 7, 5)), ("bias has shape", "2 may be 5 or 1")),
    "bias keys": (lambda: dense(bias=zeros(1, 1, 5, 8)), ("bias has shape", "3 may be 7 or 1")),
    "packed bias of the totals": (
        lambda: packed(bias=zeros(1, 1, 5, 7)),
        ("bias has shape (1, 1, 5, 7)", "2 may be 3 or 1", "max_seqlen_q and max_seqlen_k"),
    ),
    "alibi_slopes int64": (
        lambda: dense(alibi_slopes=torch.ones(4).long()),
        ("alibi_slopes has dtype int64", "any float dtype"),
    ),
    "alibi_slopes of key heads": (
        lambda: dense(alibi_slopes=torch.ones(2)),
        ("alibi_slopes has shape (2,)", "(4,)", "(num_heads,), or (batch, num_heads)"),
    ),
    "alibi_slopes of another batch": (
        lambda: dense(alibi_slopes=torch.ones(3, 4)),
        ("alibi_slopes has shape (3, 4)", "(batch, num_heads)"),
    ),
    "alibi_slopes of 3 dimensions": (
        lambda: dense(alibi_slopes=torch.ones(2, 4, 1)),
        ("alibi_slopes has shape (2, 4, 1)",),
    ),
    "sinks bool": (
        lambda: dense(sinks=torch.ones(4).bool()),
        ("sinks has dtype bool", "any float dtype"),
    ),
    "sinks of key heads": (
        lambda: dense(sinks=torch.ones(2)),
        ("sinks has shape (2,)", "(4,)", "(num_heads,)"),
    ),
    "sinks of a batch": (lambda: dense(sinks=torch.ones(2, 4)), ("sinks has shape (2, 4)", "(4,)")),
}


@pytest.mark.parametrize("name", OPERATOR)
def test_the_operator_refuses(name):
    """attention, with gradients to record or not, and explain refuse with the same words."""
    make, fragments = OPERATOR[name]
    arguments = make()
    message = refused(lambda: flash_ext.attention(**arguments), ValueError, *fragments)
    assert message.startswith("flash: ")
    assert refused(lambda: flash_ext.explain(**arguments), ValueError, *fragments) == message
    leaves = {
        n: x.detach().requires_grad_()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for n, x in arguments.items()
    }
    assert refused(lambda: flash_ext.attention(**leaves), ValueError, *fragments) == message


def test_the_operator_asks_for_rng_state():
    """The Python functions draw one; the operator itself refuses."""
    refused(
        lambda: torch.ops.flash.attn(*dense().values(), dropout_p=0.1),
        *(ValueError, "dropout_p is 0.1 without rng_state", "int64 tensor (seed, offset)"),
    )


def test_a_feature_that_no_kernel_has_is_refused_by_name():
    """RuntimeError, not ValueError: the call is right, this backend lacks it."""
    q, k, v = zeros(2, 1, 4, 8), zeros(3, 16, 2, 8), zeros(3, 16, 2, 8)
    pages = {"page_table": zeros(2, 2, dtype=torch.int32), "seqused_k": int32(20, 3)}
    arguments = {n: None for n in ("dlse", "bias", "alibi_slopes", "sinks", "cu_seqlens_q")}
    arguments |= dict.fromkeys(("cu_seqlens_k", "seqused_q", "rng_state", "max_seqlen_q"))
    arguments |= dict.fromkeys(("max_seqlen_k", "softmax_scale"))
    arguments |= {"causal": False, "window_left": -1, "window_right": -1, "softcap": 0.0}
    arguments |= {"dropout_p": 0.0, "deterministic": False, "num_splits": 0}
    message = refused(
        lambda: torch.ops.flash.attn_backward(
            dout=q, q=q, k=k, v=v, out=q, lse=zeros(2, 4, 1), needed=[True] * 3 + [False] * 3,
            **arguments, **pages,
        ),
        *(RuntimeError, "no kernel of this build serves backward", "lacks page_table"),
    )  # fmt: skip
    assert "cpu" in message
    assert "serves: no kernel" in flash_ext.explain(q, k, v, **pages, backward=True)


NOT_Q = ("k", "v", "bias", "alibi_slopes", "sinks", "seqused_k", "rng_state")


def with_everything():
    return dense(
        bias=zeros(1, 1, 1, 1),
        alibi_slopes=zeros(4),
        sinks=zeros(4),
        seqused_k=int32(1, 2),
        rng_state=torch.tensor([1, 2]),
    )


@pytest.mark.parametrize("name", NOT_Q)
def test_a_meta_tensor_among_others(name):
    """It must not make the call a fake one, whose results are uninitialised memory."""
    arguments = with_everything()
    arguments[name] = arguments[name].to("meta")
    with pytest.raises((ValueError, RuntimeError), match=name):
        flash_ext.attention(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NOT_Q)
def test_a_tensor_of_another_device_than_q(name):
    arguments = {n: x.cuda() for n, x in with_everything().items()}
    arguments |= {n: arguments[n].bfloat16() for n in "qkv"}
    arguments[name] = arguments[name].cpu()
    refused(lambda: flash_ext.attention(**arguments), ValueError, name, "device")


@pytest.mark.gpu
def test_fp32_on_a_gpu_is_refused_with_the_ways_out():
    on_gpu = {n: x.cuda() for n, x in dense().items()}
    refused(lambda: flash_ext.attention(**on_gpu), RuntimeError, "float32", "bfloat16", "autocast")


# ---- attn_backward -------------------------------------------------------------------------------

SCALARS = {
    **{"softmax_scale": None, "causal": False, "window_left": -1, "window_right": -1},
    **{"softcap": 0.0, "dropout_p": 0.0, "deterministic": False, "num_splits": 0},
}
NO_TENSORS = dict.fromkeys(
    [
        *("bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_q"),
        *("seqused_k", "page_table", "rng_state", "max_seqlen_q", "max_seqlen_k"),
    ]
)


def backward(**changes):
    right = dense() | {
        "dout": zeros(2, 5, 4, 8),
        "dlse": zeros(2, 4, 5),
        "out": zeros(2, 5, 4, 8),
        "lse": zeros(2, 4, 5),
        "needed": [True] * 3 + [False] * 3,
    }
    return torch.ops.flash.attn_backward(**{**right, **NO_TENSORS, **SCALARS, **changes})


def needing(index):
    return [i == index for i in range(6)]


BACKWARD = {
    "dout shape": (lambda: {"dout": zeros(2, 5, 4, 9)}, ("dout has shape", "(2, 5, 4, 8)")),
    "dout dtype": (
        lambda: {"dout": zeros(2, 5, 4, 8, dtype=torch.bfloat16)},
        ("dout has dtype bfloat16", "as the forward gives it"),
    ),
    "out shape": (lambda: {"out": zeros(2, 4, 5, 8)}, ("out has shape (2, 4, 5, 8)",)),
    "out dtype": (
        lambda: {"out": zeros(2, 5, 4, 8, dtype=torch.float64)},
        ("out has dtype float64", "as the forward gives it"),
    ),
    "lse shape": (lambda: {"lse": zeros(2, 5, 4)}, ("lse has shape (2, 5, 4)", "(2, 4, 5)")),
    "lse dtype": (
        lambda: {"lse": zeros(2, 4, 5, dtype=torch.float64)},
        ("lse has dtype float64", "as the forward gives it"),
    ),
    "dlse shape": (lambda: {"dlse": zeros(4, 5)}, ("dlse has shape (4, 5)", "(2, 4, 5)")),
    "dlse dtype": (
        lambda: {"dlse": zeros(2, 4, 5, dtype=torch.float16)},
        ("dlse has dtype float16", "as the forward gives it"),
    ),
    "no bias": (lambda: {"needed": needing(3)}, ("needed asks for dbias", "bias is None")),
    "a mask": (
        lambda: {"needed": needing(3), "bias": zeros(1, 1, 5, 7, dtype=torch.bool)},
        ("needed asks for dbias", "bool mask", "no gradient"),
    ),
    "no slopes": (
        lambda: {"needed": needing(4)},
        ("needed asks for dalibi_slopes", "alibi_slopes is None"),
    ),
    "no sinks": (lambda: {"needed": needing(5)}, ("needed asks for dsinks", "sinks is None")),
    "the forward's checks": (lambda: {"softcap": -1.0}, ("softcap is -1",)),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_attn_backward_refuses(name):
    make, fragments = BACKWARD[name]
    changes = make()
    message = refused(lambda: backward(**changes), ValueError, *fragments)
    assert message.startswith("flash: ")


@pytest.mark.parametrize("count", [0, 5, 7])
def test_attn_backward_refuses_another_number_of_needed(count):
    with pytest.raises((ValueError, RuntimeError), match=r"needed|bool"):
        backward(needed=[True] * count)


# ---- attn_probs and merge ------------------------------------------------------------------------


def probs(**changes):
    right = {"q": zeros(2, 5, 4, 8), "k": zeros(2, 7, 2, 8), "lse": zeros(2, 4, 5)}
    return flash_ext.attn_probs(**{**right, **changes})


PROBS = {
    "lse shape": (lambda: {"lse": zeros(4, 5)}, ValueError, ("lse has shape (4, 5)", "(2, 4, 5)")),
    "lse dtype": (
        lambda: {"lse": zeros(2, 4, 5).half()},
        ValueError,
        ("lse has dtype float16", "as the forward gives it"),
    ),
    "no lse": (lambda: {"lse": None}, TypeError, ("lse is a NoneType", "attention returned")),
    "k head_dim": (lambda: {"k": zeros(2, 7, 2, 4)}, ValueError, ("k has head_dim 4", "q has 8")),
    "bias": (lambda: {"bias": zeros(5, 7)}, ValueError, ("bias has 2 dimensions",)),
    "window": (lambda: {"window": (-5, 0)}, ValueError, ("window_left is -5", "-1 (unbounded)")),
    "no rng_state": (
        lambda: {"dropout_p": 0.5},
        ValueError,
        ("dropout_p is 0.5 but rng_state is None", "attention"),
    ),
    "too many": (
        lambda: {
            **{"q": zeros(1, 1, 1, 1).expand(1, 2**15, 1, 1), "lse": zeros(1, 1, 2**15)},
            **{"k": zeros(1, 1, 1, 1).expand(1, 2**15, 1, 1)},
        },
        ValueError,
        ("seqlen_q 32768", "more than 268435456 elements", "fewer heads or rows"),
    ),
}


@pytest.mark.parametrize("name", PROBS)
def test_attn_probs_refuses(name):
    make, error, fragments = PROBS[name]
    changes = make()
    refused(lambda: probs(**changes), error, *fragments)


MERGE = {
    "out_b shape": ("out_b", (2, 5, 4, 4), torch.float32, ("out_b is", "out_a", "same queries")),
    "out_b dtype": ("out_b", (2, 5, 4, 8), torch.float16, ("out_b is torch.float16", "one dtype")),
    "lse_b shape": ("lse_b", (2, 4, 6), torch.float32, ("lse_b is", "(2, 4, 6)", "lse_a")),
    "lse_b dtype": ("lse_b", (2, 4, 5), torch.float64, ("lse_b is torch.float64", "lse_a")),
}


@pytest.mark.parametrize("name", MERGE)
def test_merge_refuses(name):
    argument, shape, dtype, fragments = MERGE[name]
    parts = {"out_a": zeros(2, 5, 4, 8), "lse_a": zeros(2, 4, 5)}
    parts |= {
        "out_b": zeros(2, 5, 4, 8),
        "lse_b": zeros(2, 4, 5),
        argument: zeros(*shape).to(dtype),
    }
    refused(lambda: flash_ext.merge(**parts), ValueError, *fragments)


def test_merge_refuses_an_lse_of_another_layout():
    out, lse = zeros(2, 5, 4, 8), zeros(2, 5, 4)
    refused(
        lambda: flash_ext.merge(out, lse, out, lse), ValueError, "lse_a is (2, 5, 4)", "num_heads"
    )


# ---- types that the Python functions refuse ------------------------------------------------------

TYPES = {
    "q": ([1.0], "torch.Tensor", "as_tensor"),
    "v": (None, "torch.Tensor", "as_tensor"),
    "bias": (0.5, "torch.Tensor or None", "as_tensor"),
    "alibi_slopes": ([0.5] * 4, "torch.Tensor or None", "as_tensor"),
    "sinks": (1.0, "torch.Tensor or None", "as_tensor"),
    "cu_seqlens_q": ([0, 5], "torch.Tensor or None", "as_tensor"),
    "seqused_k": ([5, 5], "torch.Tensor or None", "as_tensor"),
    "page_table": ([[0]], "torch.Tensor or None", "as_tensor"),
    "rng_state": ((1, 2), "torch.Tensor or None", "as_tensor"),
    "causal": (1, "True or False", "bool()"),
    "deterministic": (None, "True or False", "bool()"),
    "softmax_scale": ("0.5", "a float", "float()"),
    "softcap": (None, "a float", "float()"),
    "dropout_p": (True, "a float", "float()"),
    "num_splits": (1.0, "an int", "int()"),
    "max_seqlen_q": (5.0, "an int", "int()"),
    "max_seqlen_k": (torch.ones(1), "a tensor of one integer", "max()"),
    "window": (3, "a pair (left, right)", "(-1, -1)"),
}


@pytest.mark.parametrize("name", TYPES)
def test_another_type(name):
    value, allowed, advice = TYPES[name]
    arguments = (packed if "seqlen" in name else dense)(**{name: value})
    got = "tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    refused(
        lambda: flash_ext.attention(**arguments), TypeError, f"{name} is a ", got, allowed, advice
    )


@pytest.mark.parametrize("window", [(0.0, 1), (1, True), (None, 0)], ids=str)
def test_window_entries_of_another_type(window):
    index = 0 if window[0] != 1 else 1
    refused(
        lambda: flash_ext.attention(**dense(window=window)),
        *(TypeError, f"window[{index}] is a {type(window[index]).__name__}", "an int"),
    )


@pytest.mark.parametrize("window", [(), (1,), (1, 2, 3)], ids=str)
def test_a_window_is_a_pair(window):
    refused(
        lambda: flash_ext.attention(**dense(window=window)),
        *(ValueError, f"window has {len(window)} entries", "must have two", "(w - 1, 0)"),
    )


@pytest.mark.parametrize("name", ["dropout", "scale", "window_size", "is_causal"])
def test_an_unknown_argument(name):
    """Nothing is swallowed by **kwargs."""
    with pytest.raises(TypeError, match=name):
        flash_ext.attention(**dense(), **{name: 0.5})
    with pytest.raises(TypeError):
        flash_ext.attention(*dense().values(), None, None, None, None)  # the rest is by keyword


def test_a_refusal_ends_nothing():
    """After a refusal the next right call works, and the threads of torch are alive."""
    right = dense()
    expected = flash_ext.attention(**right)
    for _ in range(3):
        with pytest.raises(ValueError, match="softcap"):
            flash_ext.attention(**right, softcap=-1.0)
        assert torch.equal(flash_ext.attention(**right), expected)
