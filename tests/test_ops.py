"""What ops.py adds to the operators: semantics.md, 'Gradients' and 'torch'.

Numbers are compared with flash_ext.reference in fp64 or with a loop over slices; how exact a kernel
is, is tested elsewhere.
"""

import math

import pytest
import torch
import util
from torch.autograd import forward_ad
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flash_ext
from flash_ext import reference

attn = torch.ops.flash.attn.default
attn_backward = torch.ops.flash.attn_backward.default
attn_probs = torch.ops.flash.attn_probs.default
merge = torch.ops.flash.merge.default

BATCH, SEQLEN_Q, SEQLEN_K, HEADS, HEADS_K, DIM = 2, 5, 6, 4, 2, 8


def make(*shape, requires_grad=False, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(requires_grad)


def make_qkv(requires_grad=False, dtype=torch.float32):
    lengths = [SEQLEN_Q] * BATCH, [SEQLEN_K] * BATCH
    qkv = util.make_qkv(*lengths, HEADS, HEADS_K, DIM, dtype=dtype)
    return [x.requires_grad_(requires_grad) for x in qkv]


def int32(*values):
    return util.lengths(values)


def assert_close(got, expected, what=""):
    torch.testing.assert_close(
        got.to(expected.dtype), expected, rtol=1e-4, atol=1e-4, msg=lambda m: f"{what}: {m}"
    )


def backward_arguments(needed, **kwargs):
    """Arguments of flash::attn_backward, after a forward with kwargs."""
    q, k, v = make_qkv()
    out, lse = attn(q, k, v, **kwargs)
    names = [a.name for a in attn._schema.arguments]
    defaults = {a.name: a.default_value for a in attn._schema.arguments}
    rest = [kwargs.get(name, defaults[name]) for name in names[3:-1]]  # leftpad_k is the forward's
    return [make(*out.shape, seed=7), make(*lse.shape, seed=8), q, k, v, out, lse, *rest, needed]


# ---- schemas, fakes ------------------------------------------------------------------------------

REST = (
    "Tensor? bias=None, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "Tensor? page_table=None, Tensor? rng_state=None, SymInt? max_seqlen_q=None, "
    "SymInt? max_seqlen_k=None, float? softmax_scale=None, bool causal=False, "
    "SymInt window_left=-1, SymInt window_right=-1, float softcap=0., float dropout_p=0., "
    "bool deterministic=False, int num_splits=0"
)
REST_WITHOUT_DEFAULTS = ", ".join(argument.split("=")[0] for argument in REST.split(", "))

SCHEMAS = {
    "attn": f"(Tensor q, Tensor k, Tensor v, {REST}, Tensor? leftpad_k=None) "
    "-> (Tensor out, Tensor lse)",
    "attn_backward": "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {REST_WITHOUT_DEFAULTS}, bool[6] needed) -> (Tensor? dq, Tensor? dk, Tensor? dv, "
    "Tensor? dbias, Tensor? dalibi_slopes, Tensor? dsinks)",
    "attn_probs": "(Tensor q, Tensor k, Tensor lse, Tensor? bias=None, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, Tensor? rng_state=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, float? softmax_scale=None, "
    "bool causal=False, SymInt window_left=-1, SymInt window_right=-1, float softcap=0., "
    "float dropout_p=0.) -> Tensor",
    "cache_append": "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
    "Tensor cache_seqlens, Tensor? page_table=None, Tensor? cu_seqlens=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=True) -> Tensor",
    "rotary": "(Tensor x, Tensor cos, Tensor sin, Tensor? seqlen_offsets=None, "
    "Tensor? cu_seqlens=None, bool interleaved=False, bool conjugate=False) -> Tensor",
    "merge": "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)",
    "explain": f"(Tensor q, Tensor k, Tensor v, {REST}, Tensor? leftpad_k=None, "
    "bool backward=False) -> str",
    "kernels": "() -> str",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_is_what_saved_programs_hold(name):
    assert str(getattr(torch.ops.flash, name).default._schema) == f"flash::{name}{SCHEMAS[name]}"


ATTN_CASES = {
    "plain": {},
    "causal_window": {"causal": True, "window_left": 3, "softcap": 5.0},
    "bias": {"bias": make(BATCH, 1, SEQLEN_Q, SEQLEN_K, requires_grad=True)},
    "bool_bias": {"bias": make(1, HEADS, SEQLEN_Q, SEQLEN_K) > -1},
    "alibi": {"alibi_slopes": make(HEADS, dtype=torch.float16, requires_grad=True)},
    "sinks": {"sinks": make(HEADS, requires_grad=True)},
    "dropout": {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2])},
    "seqused": {"seqused_q": int32(5, 2), "seqused_k": int32(3, 6)},
}


@pytest.mark.parametrize("case", ATTN_CASES)
def test_opcheck_attn(case):
    torch.library.opcheck(attn, make_qkv(requires_grad=True), ATTN_CASES[case])


def test_opcheck_attn_strides():
    q, k, v = (x.transpose(1, 2) for x in make_qkv())
    q, k, v = (x.contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    torch.library.opcheck(attn, (q, k, v[..., :5]))


@pytest.mark.parametrize("max_seqlens", [{}, {"max_seqlen_q": 3, "max_seqlen_k": 4}])
def test_opcheck_attn_varlen(max_seqlens):
    qkv = [x[0].detach().requires_grad_() for x in make_qkv()]
    lengths = {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k": int32(0, 2, 6)}
    torch.library.opcheck(attn, qkv, lengths | max_seqlens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_opcheck_attn_dtype(dtype):
    qkv = make_qkv(dtype=dtype)
    torch.library.opcheck(attn, qkv)
    assert [x.dtype for x in attn(*qkv)] == [
        dtype,
        torch.float64 if dtype == torch.float64 else torch.float32,
    ]


@pytest.mark.parametrize("needed", [[True] * 3 + [False] * 3, [False, True] + [False] * 4])
def test_opcheck_attn_backward(needed):
    torch.library.opcheck(attn_backward, backward_arguments(needed))


def test_opcheck_attn_backward_scores():
    scores = {"bias": make(1, 1, 1, SEQLEN_K), "alibi_slopes": make(HEADS), "sinks": make(HEADS)}
    torch.library.opcheck(attn_backward, backward_arguments([False] * 3 + [True] * 3, **scores))


def test_opcheck_attn_probs():
    q, k, v = make_qkv()
    torch.library.opcheck(attn_probs, (q, k, attn(q, k, v)[1]))
    q, k, v, cu_seqlens = q[0], k[0, :5], v[0, :5], int32(0, 2, 5)
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    lse = attn(q, k, v, **lengths)[1]
    max_seqlens = {"max_seqlen_q": 3, "max_seqlen_k": 4}
    for kwargs in (lengths, lengths | max_seqlens):
        torch.library.opcheck(attn_probs, (q, k, lse), kwargs)


def merge_parts(requires_grad=False, dtype=torch.float32):
    out, lse = (BATCH, SEQLEN_Q, HEADS, DIM), (BATCH, HEADS, SEQLEN_Q)
    return [
        make(*shape, requires_grad=requires_grad, dtype=dtype, seed=i)
        for i, shape in enumerate((out, lse, out, lse))
    ]


def test_opcheck_merge():
    torch.library.opcheck(merge, merge_parts(requires_grad=True))


# ---- gradients -----------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Records the calls of flash::* that reach a kernel."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flash":
            names = [a.name for a in func._schema.arguments]
            defaults = {a.name: a.default_value for a in func._schema.arguments}
            self.calls.append((func, defaults | dict(zip(names, args, strict=False))))
        return func(*args, **(kwargs or {}))


def test_gradients_equal_reference_through_out_and_lse():
    names = ("bias", "alibi_slopes", "sinks")
    scores = [make(1, HEADS, SEQLEN_Q, 1), make(HEADS), make(HEADS)]
    inputs = [x.requires_grad_() for x in (*make_qkv(), *scores)]
    weights = make(BATCH, SEQLEN_Q, HEADS, DIM, seed=3), make(BATCH, HEADS, SEQLEN_Q, seed=4)

    def grads(function, inputs):
        results = function(*inputs[:3], **dict(zip(names, inputs[3:], strict=True)), causal=True)
        loss = sum((x * w).sum() for x, w in zip(results, weights, strict=True))
        return torch.autograd.grad(loss, inputs)

    doubles = [x.detach().double().requires_grad_() for x in inputs]
    expected = grads(reference.attention, doubles)
    for x, got, want in zip(inputs, grads(attn, inputs), expected, strict=True):
        assert got.shape == x.shape and got.dtype == x.dtype and got.is_contiguous()
        assert_close(got, want)


def test_gradcheck_fp64():
    q, k, v = make_qkv(requires_grad=True, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *x: attn(*x, causal=True), (q, k, v), fast_mode=True)


def test_only_lse_used():
    inputs = make_qkv(requires_grad=True)
    with Calls() as mode:
        dq, dk, dv = torch.autograd.grad(attn(*inputs)[1].sum(), inputs)
    dout = mode.calls[-1][1]["dout"]
    assert set(dout.stride()) == {0} and dv.abs().max() == 0
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(reference.attention(*doubles)[1].sum(), doubles[:2])
    assert_close(dq, expected[0])
    assert_close(dk, expected[1])


def test_lse_unused_gives_the_same_bits():
    inputs = make_qkv(requires_grad=True)
    out, lse = attn(*inputs)
    with Calls() as mode:
        first = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    assert mode.calls[-1][1]["dlse"] is None
    zeroed = torch.autograd.grad(out.square().sum() + 0 * lse.sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, zeroed, strict=True))


@pytest.mark.parametrize("which", range(6))
def test_only_what_is_asked_is_computed(which):
    inputs = [*make_qkv(), make(1, 1, SEQLEN_Q, SEQLEN_K), make(HEADS), make(BATCH, HEADS)[0]]
    inputs[which].requires_grad_()
    with Calls() as mode:
        attn(*inputs)[0].sum().backward()
    needed = mode.calls[-1][1]["needed"]
    assert list(needed) == [i == which for i in range(6)]
    assert [x.grad is not None for x in inputs] == list(needed)


def test_nothing_is_saved_without_grad():
    packed = []

    def count():
        return torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, id)

    inputs = make_qkv(requires_grad=True)
    with count(), torch.no_grad():
        assert attn(*inputs)[0].grad_fn is None
    with count(), torch.inference_mode():
        assert attn(*inputs)[0].grad_fn is None
    with count():
        assert attn(*(x.detach() for x in inputs))[0].grad_fn is None
    assert not packed
    with count(), torch.no_grad(), torch.enable_grad():
        assert attn(*inputs)[0].grad_fn is not None
    assert packed


def test_checkpoint_draws_the_same_mask():
    inputs = make_qkv(requires_grad=True)

    def loss(*qkv):
        return flash_ext.attention(*qkv, dropout_p=0.5).square().sum()

    torch.manual_seed(3)
    expected = torch.autograd.grad(loss(*inputs), inputs)
    torch.manual_seed(3)
    value = checkpoint(loss, *inputs, use_reentrant=False)
    torch.randint(9, (5,))
    got = torch.autograd.grad(value, inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_backward_uses_the_forwards_mask():
    inputs = make_qkv(requires_grad=True)
    rng_state = torch.tensor([1, 2])
    out, _ = attn(*inputs, rng_state=rng_state, dropout_p=0.5)
    rng_state += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_deterministic_mode_is_read_in_forward_and_backward():
    inputs = make_qkv(requires_grad=True)
    with Calls() as mode:
        flash_ext.attention(*inputs).sum().backward()
    assert [args["deterministic"] for _, args in mode.calls] == [False, False]
    torch.use_deterministic_algorithms(True)
    try:
        with Calls() as mode:
            out = flash_ext.attention(*inputs)
        assert [args["deterministic"] for _, args in mode.calls] == [True]
        out, _ = attn(*inputs)
        with Calls() as mode:
            out.sum().backward()
        assert [args["deterministic"] for _, args in mode.calls] == [True]
    finally:
        torch.use_deterministic_algorithms(False)


# ---- what has no derivative refuses by name ------------------------------------------------------


def test_double_backward_is_refused_where_it_happens():
    inputs = make_qkv(requires_grad=True)
    loss = attn(*inputs)[0].square().sum()
    (dq,) = torch.autograd.grad(loss, inputs[:1], create_graph=True)
    (plain,) = torch.autograd.grad(attn(*inputs)[0].square().sum(), inputs[:1])
    assert torch.equal(dq.detach(), plain)
    with pytest.raises(NotImplementedError, match="flash::attn_backward has no derivative"):
        dq.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_forward_mode_is_refused(mode):
    q, k, v = make_qkv()
    with pytest.raises(NotImplementedError, match="flash::attn has no forward-mode"):
        torch.func.jvp(lambda q: flash_ext.attention(q, k, v), (q,), (q,))
    with (
        mode(),
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="flash::attn has no forward-mode"),
    ):
        flash_ext.attention(q, forward_ad.make_dual(k, k), v)
    with forward_ad.dual_level():
        assert_close(flash_ext.attention(q, k, v), attn(q, k, v)[0])


def test_forward_over_reverse_is_refused():
    q, k, v = make_qkv()
    out, vjp = torch.func.vjp(lambda q: flash_ext.attention(q, k, v), q)
    with pytest.raises(NotImplementedError, match="flash::attn_backward has no forward-mode"):
        torch.func.jvp(lambda dout: vjp(dout)[0], (out,), (out,))


def test_attn_probs_refuses_its_gradient():
    q, k, v = make_qkv(requires_grad=True)
    out, lse = attn(q, k, v)
    probs = attn_probs(q, k, lse)
    (out.sum() + probs.detach().sum()).backward(retain_graph=True)
    with pytest.raises(NotImplementedError, match="flash::attn_probs has no derivative"):
        probs.sum().backward()
    with pytest.raises(NotImplementedError, match="flash::attn_probs has no forward-mode"):
        torch.func.jvp(lambda q: attn_probs(q, k, lse), (q.detach(),), (q.detach(),))


# ---- torch.func ----------------------------------------------------------------------------------

SIZE = 3


def check_vmap(function, inputs, dims):
    """vmap, vmap(grad) and grad(vmap) of function equal a loop over slices."""

    def slices(inputs):
        for i in range(SIZE):
            yield [x if d is None else x.select(d, i) for x, d in zip(inputs, dims, strict=True)]

    def loss(*inputs):
        return sum(x.square().sum() for x in function(*inputs))

    every = tuple(range(len(inputs)))
    for name, f in (("vmap", function), ("vmap(grad)", grad(loss, every))):
        looped = zip(*(f(*x) for x in slices(inputs)), strict=True)
        for got, expected in zip(vmap(f, dims)(*inputs), looped, strict=True):
            assert_close(got, torch.stack(expected), name)
    got = grad(lambda *x: sum(y.square().sum() for y in vmap(function, dims)(*x)), every)(*inputs)
    expected = grad(lambda *x: sum(loss(*y) for y in slices(x)), every)(*inputs)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, "grad(vmap)")


def mapped_qkv():
    q, k, v = make_qkv()
    return [make(SIZE, *x.shape, seed=i) for i, x in enumerate((q, k, v))]


# name: the shape of one slice, and whether a mapped dimension is put before it.
VMAP_SCORES = {
    "bias_full": ("bias", (BATCH, HEADS, SEQLEN_Q, SEQLEN_K), True),
    "bias_broadcast": ("bias", (1, 1, SEQLEN_Q, SEQLEN_K), True),
    "bias_shared": ("bias", (1, 1, SEQLEN_Q, SEQLEN_K), False),
    "bias_shared_full": ("bias", (BATCH, 1, 1, SEQLEN_K), False),
    "slopes": ("alibi_slopes", (HEADS,), True),
    "slopes_batch": ("alibi_slopes", (BATCH, HEADS), True),
    "slopes_shared": ("alibi_slopes", (HEADS,), False),
    "sinks": ("sinks", (HEADS,), True),
    "sinks_shared": ("sinks", (HEADS,), False),
}


@pytest.mark.parametrize("case", VMAP_SCORES)
def test_vmap_scores(case):
    name, shape, mapped = VMAP_SCORES[case]
    x = make(SIZE, *shape, seed=5) if mapped else make(*shape, seed=5)

    def function(q, k, v, x):
        return attn(q, k, v, **{name: x})

    check_vmap(function, [*mapped_qkv(), x], (0, 0, 0, 0 if mapped else None))


def test_vmap_scores_of_one_sequence():
    q, k, v = (x[:, :1] for x in mapped_qkv())

    def function(q, k, v, bias, slopes):
        return attn(q, k, v, bias=bias, alibi_slopes=slopes)

    scores = [make(1, HEADS, 1, SEQLEN_K), make(HEADS)]
    check_vmap(function, [q, k, v, *scores], (0, 0, 0, None, None))


def test_vmap_dims():
    q, k, v = mapped_qkv()
    inputs = [q.movedim(0, 2), k[0], v.movedim(0, -1)]
    check_vmap(lambda *x: attn(*x, causal=True), inputs, (2, None, -1))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"seqused_k": int32(3, 6)},
        {"alibi_slopes": make(HEADS), "bias": make(BATCH, 1, SEQLEN_Q, 1)},
        {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2])},
    ],
    ids=["seqused", "constant_scores", "dropout"],
)
def test_vmap_constants(kwargs):
    check_vmap(lambda q, k, v: attn(q, k, v, **kwargs), mapped_qkv(), (0, 0, 0))


def test_vmap_varlen():
    q, k, v = (x[:, 0] for x in mapped_qkv())
    lengths = {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k": int32(0, 2, 6)}
    check_vmap(lambda q, k, v: attn(q, k, v, **lengths), [q, k, v], (0, 0, 0))


@pytest.mark.parametrize("kwargs", [{}, {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2])}])
def test_vmap_over_nothing(kwargs):
    """Empty results and gradients, folded into the batch and slice by slice."""
    inputs = [x[:0].requires_grad_() for x in mapped_qkv()]

    def function(q, k, v):
        out, lse = attn(q, k, v, **kwargs)
        return out, lse, attn_probs(q.detach(), k.detach(), lse.detach())

    out, lse, probs = vmap(function)(*inputs)
    assert out.shape == inputs[0].shape and lse.shape == (0, BATCH, HEADS, SEQLEN_Q)
    assert probs.shape == (0, BATCH, HEADS, SEQLEN_Q, SEQLEN_K)
    for x, g in zip(inputs, torch.autograd.grad(out.sum() + lse.sum(), inputs), strict=True):
        assert g.shape == x.shape
    each = vmap(grad(lambda *x: attn(*x, **kwargs)[0].sum(), (0, 1, 2)))(*inputs)
    assert [g.shape for g in each] == [x.shape for x in inputs]


def test_vmap_nested():
    q, k, v = make_qkv()
    queries = make(2, SIZE, *q.shape)
    got = vmap(vmap(lambda q: attn(q, k, v)[0]))(queries)
    expected = [torch.stack([attn(x, k, v)[0] for x in row]) for row in queries]
    assert_close(got, torch.stack(expected))


def test_vmap_merge_and_probs():
    parts = [torch.stack([x, 2 * x, x + 1]) for x in merge_parts()]
    check_vmap(merge, parts, (0, 0, 0, 0))
    q, k, v = make_qkv()
    queries = make(SIZE, *q.shape)
    got = vmap(lambda q: attn_probs(q, k, attn(q, k, v)[1]))(queries)
    expected = torch.stack([attn_probs(x, k, attn(x, k, v)[1]) for x in queries])
    assert_close(got, expected)


def test_func_grad_keeps_outer_gradients():
    q, k, v = make_qkv(requires_grad=True)
    out, _ = torch.func.vjp(lambda k: attn(q, k, v)[0], k.detach())
    (dq,) = torch.autograd.grad(out.square().sum(), q)
    (expected,) = torch.autograd.grad(attn(q, k, v)[0].square().sum(), q)
    assert_close(dq, expected)
    with pytest.raises(NotImplementedError, match="flash::attn_backward has no derivative"):
        grad(lambda q: grad(lambda q: attn(q, k, v)[0].square().sum())(q).sum())(q.detach())


def test_jacrev():
    q, k, v = (x[:1, :2] for x in make_qkv(dtype=torch.float64))
    jacobian = torch.func.jacrev(lambda q: attn(q, k, v)[0])(q)
    expected = torch.autograd.functional.jacobian(lambda q: reference.attention(q, k, v)[0], q)
    assert_close(jacobian, expected)


# ---- autocast ------------------------------------------------------------------------------------


def test_autocast_casts_fp32_qkv_alone():
    q, k, v = make_qkv(requires_grad=True)
    v = v.detach().bfloat16().requires_grad_()
    bias = make(1, 1, SEQLEN_Q, SEQLEN_K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), Calls() as mode:
        out, lse = attn(q, k, v, bias=bias)
    args = mode.calls[0][1]
    assert [args[n].dtype for n in ("q", "k", "v", "bias")] == [torch.bfloat16] * 3 + [bias.dtype]
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    out.float().square().sum().backward()
    for x in (q, k, v, bias):
        assert x.grad.dtype == x.dtype and x.grad.abs().max() > 0


def test_autocast_leaves_fp64_and_refuses_a_mixture():
    q, k, v = make_qkv(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert [x.dtype for x in attn(q, k, v)] == [torch.float64] * 2
        with pytest.raises(ValueError, match="bfloat16"):
            attn(q, k.float(), v)


def test_without_autocast_a_mixture_is_refused():
    q, k, v = make_qkv()
    with pytest.raises(ValueError, match="q has dtype float32 and v has bfloat16"):
        attn(q, k, v.bfloat16())


def test_autocast_reaches_probs_and_explain():
    q, k, v = make_qkv()
    with torch.autocast("cpu", torch.bfloat16):
        out, lse, probs = flash_ext.flash_attn_func(q, k, v, return_attn_probs=True)
        assert "bfloat16" in flash_ext.explain(q, k, v).splitlines()[0]
    assert (out.dtype, lse.dtype, probs.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)


# ---- merge ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_merge_joins_key_sets(packed):
    q, k, v = make_qkv()
    parts = [*attn(q, k[:, :2], v[:, :2]), *attn(q, k[:, 2:], v[:, 2:])]
    whole = attn(q, k, v)
    if packed:
        parts, whole = [x[0] for x in parts], [x[0] for x in whole]
    for got, expected in zip(merge(*parts), whole, strict=True):
        assert got.dtype == torch.float32 and got.is_contiguous()
        assert_close(got, expected)


def test_merge_of_empty_parts():
    out_a, lse_a, out_b, lse_b = merge_parts()
    lse_a[:, :, :2] = -math.inf
    lse_b[:, :, 1:3] = -math.inf
    out_a[:, 0] = math.nan
    parts = [x.requires_grad_() for x in (out_a, lse_a, out_b, lse_b)]
    out, lse = merge(*parts)
    assert torch.equal(out[:, 0], out_b[:, 0]) and torch.equal(lse[:, :, 0], lse_b[:, :, 0])
    assert torch.equal(out[:, 2], out_a[:, 2]) and torch.equal(lse[:, :, 2], lse_a[:, :, 2])
    assert (out[:, 1] == 0).all() and (lse[:, :, 1] == -math.inf).all()
    loss = out.square().sum() + lse.masked_fill(lse == -math.inf, 0).square().sum()
    grads = torch.autograd.grad(loss, parts)
    assert all(g.isfinite().all() for g in grads)
    assert all((g[:, 1] == 0).all() for g in grads[::2])
    assert all((g[:, :, 1] == 0).all() for g in grads[1::2])


def test_merge_gradcheck_and_dtype():
    parts = merge_parts(requires_grad=True, dtype=torch.float64)
    assert torch.autograd.gradcheck(merge, parts, fast_mode=True)
    out_a, lse_a, out_b, lse_b = merge_parts()
    out, lse = merge(out_a.bfloat16(), lse_a, out_b.bfloat16(), lse_b)
    expected, _ = merge(out_a.bfloat16().float(), lse_a, out_b.bfloat16().float(), lse_b)
    assert lse.dtype == torch.float32 and torch.equal(out, expected.bfloat16())


def test_merge_refuses_what_does_not_match():
    out_a, lse_a, out_b, lse_b = merge_parts()
    with pytest.raises(ValueError, match=r"out_b is torch\.bfloat16"):
        merge(out_a, lse_a, out_b.bfloat16(), lse_b)
    with pytest.raises(ValueError, match="lse_b is"):
        merge(out_a, lse_a, out_b, lse_b[:1])
    with pytest.raises(ValueError, match="lse_a is"):
        merge(out_a, lse_a.mT, out_b, lse_b.mT)


# ---- FLOP formulas -------------------------------------------------------------------------------


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_flop_counts()["Global"]


def test_flops_are_those_of_sdpa():
    q, k, v = make_qkv(requires_grad=True)
    v5 = v[..., :5]
    counts = flops(lambda: attn(q, k, v5, causal=True)[0].sum().backward())
    scores = BATCH * HEADS * SEQLEN_Q * SEQLEN_K
    assert counts == {
        torch.ops.flash.attn: 2 * scores * (DIM + 5),
        torch.ops.flash.attn_backward: 2 * scores * (3 * DIM + 2 * 5),
    }


def test_flops_of_packed_sequences():
    q, k, v = (x[0] for x in make_qkv())
    lengths = {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k": int32(0, 2, 6)}
    counts = flops(lambda: attn(q, k, v, **lengths))
    assert counts == {torch.ops.flash.attn: 2 * HEADS * (2 * 2 + 3 * 4) * 2 * DIM}
    meta = [x.to("meta") for x in (q, k, v)]
    lengths = {name: x.to("meta") for name, x in lengths.items()}
    counts = flops(lambda: attn(*meta, **lengths, max_seqlen_q=3, max_seqlen_k=4))
    assert counts == {torch.ops.flash.attn: 2 * HEADS * (2 * 3 * 4) * 2 * DIM}
