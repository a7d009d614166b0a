"""What PyTorch must know of the operators `flash::*` besides their kernels.

The compiled library defines the schemas, with the only defaults, and the kernels. This file adds
the fake kernel, the gradient, the autocast rule, the vmap rule and the FLOP formula of each
operator, and nothing else. semantics.md, 'Gradients' and 'torch', says what they must do.

The dispatcher leaves off trailing arguments that equal their defaults, so a kernel written in
Python sees fewer arguments than the schema has; the missing ones are read off the schema.
"""

import importlib.abc
import importlib.util
import math
import sys

import torch
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

_lib = torch.library.Library("flash", "IMPL")

attn = torch.ops.flash.attn.default
attn_backward = torch.ops.flash.attn_backward.default
attn_probs = torch.ops.flash.attn_probs.default
cache_append = torch.ops.flash.cache_append.default
rotary = torch.ops.flash.rotary.default
merge = torch.ops.flash.merge.default
explain = torch.ops.flash.explain.default
kernels = torch.ops.flash.kernels.default

# flash::attn begins with the tensors that can have a gradient (q, k, v, bias, alibi_slopes,
# sinks), then come the other tensors (cu_seqlens_q … rng_state), then the scalars and leftpad_k.
NUM_DIFFERENTIABLE = 6
NUM_TENSORS = 12

_below_autograd = torch._C._AutoDispatchBelowAutograd
_after_autograd = torch._C._after_autograd_keyset
_any_requires_grad = torch._C._any_requires_grad
_functorch_active = torch._C._are_functorch_transforms_active


def _defaults_of(op):
    """A decorator: the function's parameters mirror op's first ones and take their defaults."""

    def set_defaults(function):
        arguments = op._schema.arguments[: function.__code__.co_argcount]
        function.__defaults__ = tuple(a.default_value for a in arguments if a.has_default_value())
        return function

    return set_defaults


def _fake(op):
    """A decorator: registers a fake kernel, whose parameters mirror the schema.

    One meta tensor among real ones is enough to bring a call here, where the others' results would
    be memory that nobody writes: tensors of two devices are refused.
    """
    names = [argument.name for argument in op._schema.arguments]

    def register(function):
        function = _defaults_of(op)(function)

        def fake(*args, **kwargs):
            tensors = [
                (name, x)
                for name, x in (*zip(names, args, strict=False), *kwargs.items())
                if isinstance(x, torch.Tensor)
            ]
            main = "q" if "q" in names else names[0]
            device = dict(tensors)[main].device
            for name, x in tensors:
                if x.device != device:
                    raise ValueError(
                        f"flash: {name} is on {x.device} and {main} on {device}; move it there "
                        f"with {name}.to({main}.device)"
                    )
            return function(*args, **kwargs)

        torch.library.register_fake(op.name(), fake, lib=_lib)
        return function

    return register


# ---- machinery shared by the operators: autograd -------------------------------------------------


def _redispatch(op, keyset, args):
    """Runs the kernel below Autograd."""
    with _below_autograd():
        return op.redispatch(keyset & _after_autograd, *args)


def _redispatch_from_function(op, keyset, args):
    """The same from inside a Function's forward, which has switched gradients off.

    Under torch.func the levels below this one still have their own gradients to record.
    """
    if not _functorch_active():
        return _redispatch(op, keyset, args)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return _redispatch(op, keyset, args)


def _apply_of(function):
    """`function.apply` for use in an Autograd kernel.

    Python's Function.apply hands the call back to torch.func when a transform is active. Here the
    dispatcher has already arrived at one level of the transforms, and the call is for that level
    alone. Without a transform this also leaves out 2 µs of checks (default arguments, dead
    wrappers) that the dispatcher has made.
    """
    apply = super(torch.autograd.Function, function).apply

    def apply_at_this_level(*args):
        if not _functorch_active():
            return apply(*args)
        with enable_single_level_autograd_function():
            return apply(*args)

    return apply_at_this_level


def _refuse_forward_mode(op, tensors) -> None:
    """NotImplementedError when a tensor carries a tangent, which would be dropped silently."""
    if forward_ad._current_level < 0:
        return
    for x in tensors:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{op.name()} has no forward-mode derivative (jvp, jacfwd, dual tensors); use "
                "reverse mode (backward, torch.func.vjp, jacrev) or flash_ext.reference.attention"
            )


class _NoGradient(torch.autograd.Function):
    """Runs an operator that has no derivative; differentiating its results raises by name."""

    @staticmethod
    def forward(ctx, op, advice, keyset, *args):
        ctx.message = f"{op.name()} has no derivative; {advice}"
        return _redispatch_from_function(op, keyset, args)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(ctx.message)


_apply_no_gradient = _apply_of(_NoGradient)


def _refuse_gradient(op, advice: str) -> None:
    """Puts in the Autograd kernel of an operator that has no derivative."""

    def kernel(keyset, *args):
        _refuse_forward_mode(op, args)
        if torch.is_grad_enabled() and _any_requires_grad(*args):
            return _apply_no_gradient(op, advice, keyset, *args)
        return _redispatch(op, keyset, args)

    _lib.impl(op.name(), kernel, "Autograd", with_keyset=True)


# ---- machinery shared by the operators: autocast -------------------------------------------------

_autocast_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | (
    torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
)


def _autocast(op, count: int) -> None:
    """Under autocast the first count arguments are cast when they are fp32; nothing else is.

    torch.library.register_autocast would cast every floating tensor (lse and fp64 too) to one
    dtype that is fixed at registration.
    """

    def kernel(*args):
        dtype = torch.get_autocast_dtype(args[0].device.type)
        cast = [x.to(dtype) if x.dtype == torch.float32 else x for x in args[:count]]
        with torch._C._ExcludeDispatchKeyGuard(_autocast_keys):
            return op(*cast, *args[count:])

    for key in ("AutocastCPU", "AutocastCUDA"):
        _lib.impl(op.name(), kernel, key)


# ---- machinery shared by the operators: vmap -----------------------------------------------------


def _vmap(op):
    """A decorator: rule(size, dims, *args) is op's vmap rule; its results are stacked along 0.

    size is the mapped dimension's length and dims holds, per argument, its place or None. args
    are as long as the schema.
    """
    defaults = tuple(a.default_value for a in op._schema.arguments)

    def register(rule):
        def adapt(info, dims, *args):
            missing = defaults[len(args) :]
            return rule(info.batch_size, dims + (None,) * len(missing), *args, *missing), 0

        def kernel(*args):
            interpreter = retrieve_current_functorch_interpreter()
            return custom_function_call_vmap_helper(interpreter, adapt, op, *args)

        _lib.impl(op.name(), kernel, "FuncTorchBatched")
        return rule

    return register


def _loop(op, size, dims, args):
    """Calls op once per slice and stacks the results.

    Without slices, one of zeros (the sum of none) says the results' shapes and takes gradients.
    """

    def part(x, d, i):
        if not isinstance(d, int):
            return x
        return x.select(d, i) if size else x.sum(d, dtype=x.dtype)

    calls = [
        op(*(part(x, d, i) for x, d in zip(args, dims, strict=True))) for i in range(max(size, 1))
    ]
    if isinstance(calls[0], Tensor):
        return torch.stack(calls)[:size]
    return tuple(None if x[0] is None else torch.stack(x)[:size] for x in zip(*calls, strict=True))


def _fold(x, size, batch):
    """(size|1, batch|1, …) to (size * batch, …)."""
    return x if x is None else x.expand(size, batch, *x.shape[2:]).flatten(0, 1)


def _batch_of(q, d):
    """The batch of one slice of q (batch, …), whose mapped dimension is at d, None for none."""
    return q.shape[1 if d == 0 else 0]


def _mapped_first(tensors, dims):
    """The mapped dimension first, of length 1 where there is none."""
    return [
        x if x is None else x.unsqueeze(0) if d is None else x.movedim(d, 0)
        for x, d in zip(tensors, dims, strict=True)
    ]


def _fold_into_batch(size, tensors, dims, scalars, needed=(False,) * NUM_DIFFERENTIABLE):
    """flash::attn's tensors with the mapped dimension as part of the batch; None where impossible.

    It is impossible when sequences are packed, paged or padded at the left; with dropout, whose
    mask depends on the place in the batch; and when a tensor that all of the batch shares differs,
    or needs its gradient, per slice.
    """
    q, k, v, bias, slopes, sinks, cu_q, cu_k, used_q, used_k, pages, _ = _mapped_first(
        tensors, dims
    )
    dropout_p, leftpad = scalars[7], scalars[10:]
    if any(x is not None for x in (cu_q, cu_k, pages, *leftpad)) or dropout_p > 0:
        return None
    batch = q.shape[1]
    *_, need_bias, need_slopes, need_sinks = needed
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes.unsqueeze(1)
    if need_sinks or (sinks is not None and sinks.shape[0] != 1):
        return None
    if (need_bias and bias.shape[1] != batch) or (need_slopes and slopes.shape[1] != batch):
        return None
    if bias is not None:
        shared = not need_bias and bias.shape[:2] == (1, 1)
        bias = bias[0] if shared else _fold(bias, size, batch)
    if slopes is not None:
        shared = not need_slopes and slopes.shape[:2] == (1, 1)
        slopes = slopes[0, 0] if shared else _fold(slopes, size, batch)
    sinks = None if sinks is None else sinks[0]
    q, k, v, used_q, used_k = (_fold(x, size, batch) for x in (q, k, v, used_q, used_k))
    return q, k, v, bias, slopes, sinks, None, None, used_q, used_k, None, None


# ---- flash::attn ---------------------------------------------------------------------------------


@_fake(attn)
def _attn_fake(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, *rest):
    """out (…, num_heads, head_dim_v); lse (batch, num_heads, seqlen_q) or (num_heads, total_q)."""
    *batch, seqlen_q, num_heads, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((*batch, seqlen_q, num_heads, v.shape[-1]))
    return out, q.new_empty((*batch, num_heads, seqlen_q), dtype=lse_dtype)


class _Attn(torch.autograd.Function):
    """The gradient of flash::attn: one call of flash::attn_backward for what is asked."""

    @staticmethod
    def forward(ctx, q, k, v, bias, alibi_slopes, sinks, keyset, rest):
        args = (q, k, v, bias, alibi_slopes, sinks, *rest)
        out, lse = _redispatch_from_function(attn, keyset, args)
        # rng_state is among the saved tensors: a change in place before backward is an error.
        ctx.save_for_backward(q, k, v, out, lse, *args[3:NUM_TENSORS])
        ctx.scalars = args[NUM_TENSORS:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * (NUM_DIFFERENTIABLE + 2)
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if dout is None:
            dout = out.new_zeros(()).expand(out.shape)
        *scalars, deterministic, num_splits, leftpad_k = ctx.scalars
        for name, x in (("page_table", tensors[-2]), ("leftpad_k", leftpad_k)):
            if x is not None:
                raise NotImplementedError(
                    f"flash::attn with {name} has no gradient, it serves caches: call it under "
                    "torch.no_grad(), or gather the keys into contiguous k and v"
                )
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        needed = ctx.needs_input_grad[:NUM_DIFFERENTIABLE]
        args = (dout, dlse, q, k, v, out, lse, *tensors)
        args += (*scalars, deterministic, num_splits, needed)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0 or _functorch_active():
            return *attn_backward(*args), None, None
        # Nothing differentiates the gradients: leave out their Autograd kernel (7 µs).
        with _below_autograd():
            return *attn_backward(*args), None, None


_apply_attn = _apply_of(_Attn)
_attn_defaults = tuple(a.default_value for a in attn._schema.arguments)


def _attn_autograd(keyset, *args):
    args += _attn_defaults[len(args) :]
    differentiable = args[:NUM_DIFFERENTIABLE]
    _refuse_forward_mode(attn, differentiable)
    if torch.is_grad_enabled() and _any_requires_grad(*differentiable):
        return _apply_attn(*differentiable, keyset, args[NUM_DIFFERENTIABLE:])
    return _redispatch(attn, keyset, args)


_lib.impl("attn", _attn_autograd, "Autograd", with_keyset=True)
_autocast(attn, 3)


def call_attn(args):
    """flash::attn, without its Autograd kernel (4 µs) where that has nothing to record."""
    if (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or forward_ad._current_level >= 0
        or _functorch_active()
    ):
        return attn(*args)
    with _below_autograd():
        return attn(*args)


@_vmap(attn)
def _attn_vmap(size, dims, *args):
    tensors, scalars = args[:NUM_TENSORS], args[NUM_TENSORS:]
    folded = _fold_into_batch(size, tensors, dims[:NUM_TENSORS], scalars)
    if folded is None:
        return _loop(attn, size, dims, args)
    batch = _batch_of(args[0], dims[0])
    return tuple(x.unflatten(0, (size, batch)) for x in attn(*folded, *scalars))


# ---- flash::attn_backward ------------------------------------------------------------------------


@_fake(attn_backward)
def _attn_backward_fake(dout, dlse, q, k, v, out, lse, bias, alibi_slopes, sinks, *rest):
    """Contiguous gradients, shaped and typed like their inputs; None where not needed."""
    inputs = (q, k, v, bias, alibi_slopes, sinks)
    return tuple(
        x.new_empty(x.shape) if need else None for x, need in zip(inputs, rest[-1], strict=True)
    )


_refuse_gradient(
    attn_backward,
    "double backward through attention is not supported: leave out create_graph, detach the "
    "gradient, or use flash_ext.reference.attention",
)


@_vmap(attn_backward)
def _attn_backward_vmap(size, dims, *args):
    def split(x):
        """dout, dlse, out, lse; flash::attn's tensors; its scalars, without needed."""
        rest = x[7 : 7 + NUM_TENSORS - 3]
        return (*x[:2], *x[5:7]), (*x[2:5], *rest), x[7 + NUM_TENSORS - 3 : -1]

    rows, tensors, scalars = split(args)
    rows_dims, tensors_dims, _ = split(dims)
    needed = args[-1]
    folded = _fold_into_batch(size, tensors, tensors_dims, scalars, needed)
    if folded is None:
        return _loop(attn_backward, size, dims, args)
    batch = _batch_of(tensors[0], tensors_dims[0])
    dout, dlse, out, lse = (_fold(x, size, batch) for x in _mapped_first(rows, rows_dims))
    grads = attn_backward(dout, dlse, *folded[:3], out, lse, *folded[3:], *scalars, needed)
    # alibi_slopes (num_heads,) went in as (1, num_heads) a slice.
    return tuple(
        g if g is None else g.reshape(size, *(n for j, n in enumerate(x.shape) if j != d))
        for g, x, d in zip(grads, tensors, tensors_dims, strict=False)
    )


# ---- flash::attn_probs ---------------------------------------------------------------------------


@_fake(attn_probs)
def _attn_probs_fake(
    q,
    k,
    lse,
    bias,
    alibi_slopes,
    sinks,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    rng_state,
    max_seqlen_q,
    max_seqlen_k,
    *rest,
):
    """p (batch, num_heads, seqlen_q, seqlen_k); packed: the last two are max_seqlen."""
    if cu_seqlens_q is None:
        return q.new_empty((q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    rows = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    keys = k.shape[0] if max_seqlen_k is None else max_seqlen_k
    return q.new_empty((cu_seqlens_q.shape[0] - 1, q.shape[1], rows, keys))


_refuse_gradient(
    attn_probs,
    "the probabilities are for inspection: detach them (inside the function that is compiled, if "
    "any) or use flash_ext.reference.attn_probs",
)
_autocast(attn_probs, 2)


@_vmap(attn_probs)
def _attn_probs_vmap(size, dims, *args):
    return _loop(attn_probs, size, dims, args)


# ---- flash::merge --------------------------------------------------------------------------------


def _merge(out_a, lse_a, out_b, lse_b):
    """Joins attention over two disjoint key sets: softmax-weighted mean of out, logaddexp of lse.

    out (batch, seqlen_q, num_heads, head_dim_v) with lse (batch, num_heads, seqlen_q), or out
    (total_q, num_heads, head_dim_v) with lse (num_heads, total_q). A part whose lse is -inf has
    weight and gradient 0, whatever its out holds; both -inf give out 0 and lse -inf. Written with
    plain differentiable operators: the weights never see -inf - (-inf).
    """
    for name, a, b in (("out", out_a, out_b), ("lse", lse_a, lse_b)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(
                f"{name}_b is {b.dtype} {tuple(b.shape)} but {name}_a is {a.dtype} "
                f"{tuple(a.shape)}; both parts must cover the same queries in one dtype"
            )
    rows = out_a.shape[:-1]
    if (*rows[:-2], rows[-1], rows[-2]) != tuple(lse_a.shape):
        raise ValueError(
            f"lse_a is {tuple(lse_a.shape)} for out_a {tuple(out_a.shape)}; it must be (batch, "
            "num_heads, seqlen_q), or (num_heads, total_q) for packed sequences, as attn returns it"
        )
    compute = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    lse_a, lse_b = lse_a.to(compute), lse_b.to(compute)
    largest = torch.maximum(lse_a, lse_b).detach()
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    weights = [torch.exp(lse - largest) for lse in (lse_a, lse_b)]
    total = weights[0] + weights[1]
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (largest + total.log()).masked_fill(empty, -math.inf)
    parts = [
        (w / total).transpose(-1, -2).unsqueeze(-1)
        * x.to(compute).masked_fill((w == 0).transpose(-1, -2).unsqueeze(-1), 0.0)
        for w, x in zip(weights, (out_a, out_b), strict=True)
    ]
    return (parts[0] + parts[1]).to(out_a.dtype).contiguous(), lse.contiguous()


_lib.impl("merge", _merge, "CompositeImplicitAutograd")
# vmap would run the composite as a black box, slice by slice, unless told to look inside.
_lib.impl("merge", _merge, "FuncTorchBatchedDecomposition")


# ---- flash::cache_append -------------------------------------------------------------------------


@_fake(cache_append)
def _cache_append_fake(k_cache, v_cache, k, v, cache_seqlens, *rest):
    """seqused_k (batch,): cache_seqlens and the new keys, at most the capacity."""
    return cache_seqlens.new_empty(cache_seqlens.shape)


def _cache_append_autograd(keyset, *args):
    _refuse_forward_mode(cache_append, args)
    if torch.is_grad_enabled() and _any_requires_grad(*args):
        raise NotImplementedError(
            "flash::cache_append has no derivative: call it under torch.no_grad() or "
            "torch.inference_mode(), or detach k, v, rotary_cos and rotary_sin"
        )
    torch.autograd.graph.increment_version(args[:2])
    return _redispatch(cache_append, keyset, args)


_lib.impl("cache_append", _cache_append_autograd, "Autograd", with_keyset=True)

# ---- flash::rotary -------------------------------------------------------------------------------


@_fake(rotary)
def _rotary_fake(x, *rest):
    return x.new_empty(x.shape)


class _Rotary(torch.autograd.Function):
    """The gradient of flash::rotary: the same turn backwards. cos and sin have none."""

    @staticmethod
    def forward(ctx, x, keyset, rest):
        ctx.save_for_backward(*rest[:4])
        ctx.interleaved, ctx.conjugate = rest[4:]
        return _redispatch_from_function(rotary, keyset, (x, *rest))

    @staticmethod
    def backward(ctx, grad):
        return rotary(grad, *ctx.saved_tensors, ctx.interleaved, not ctx.conjugate), None, None


_apply_rotary = _apply_of(_Rotary)
_rotary_defaults = tuple(a.default_value for a in rotary._schema.arguments)


def _rotary_autograd(keyset, *args):
    args += _rotary_defaults[len(args) :]
    _refuse_forward_mode(rotary, args[:3])
    if torch.is_grad_enabled():
        if _any_requires_grad(*args[1:3]):
            raise NotImplementedError(
                "flash::rotary has no gradient of cos and sin: detach them, or rotate with torch's "
                "own operators"
            )
        if _any_requires_grad(args[0]):
            return _apply_rotary(args[0], keyset, args[1:])
    return _redispatch(rotary, keyset, args)


_lib.impl("rotary", _rotary_autograd, "Autograd", with_keyset=True)


@_vmap(rotary)
def _rotary_vmap(size, dims, *args):
    return _loop(rotary, size, dims, args)


# ---- flash::explain ------------------------------------------------------------------------------

_autocast(explain, 3)

# ---- FLOP formulas -------------------------------------------------------------------------------
# As torch counts scaled_dot_product_attention: masks (causal, window, bias) take nothing off, the
# backward pass counts its five products, scores recomputed, whatever gradients are needed. Packed
# sequences count their lengths where those can be read, and max_seqlen each where they cannot.


def _lengths(cu_seqlens, max_seqlen, total):
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if isinstance(cu_seqlens, (FakeTensor, FunctionalTensor)) or cu_seqlens.is_meta:
        return [total if max_seqlen is None else max_seqlen] * (cu_seqlens.shape[0] - 1)
    return cu_seqlens.diff().tolist()


def _num_scores(q, k, cu_seqlens_q, cu_seqlens_k, page_table, max_seqlen_q, max_seqlen_k):
    """(query, key) pairs of one head, summed over the sequences."""
    if cu_seqlens_q is None:
        rows = [q.shape[1]] * q.shape[0]
    else:
        rows = _lengths(cu_seqlens_q, max_seqlen_q, q.shape[0])
    if page_table is not None:
        keys = [page_table.shape[1] * k.shape[1]] * len(rows)
    elif cu_seqlens_k is None:
        keys = [k.shape[1]] * len(rows)
    else:
        keys = _lengths(cu_seqlens_k, max_seqlen_k, k.shape[0])
    return sum(m * n for m, n in zip(rows, keys, strict=True))


def _attn_flop(q, k, v, *args, **kwargs):
    """2 FLOP × (head_dim + head_dim_v) a score: q k^T and p v."""
    args += _attn_defaults[3 + len(args) :]
    cu_seqlens_q, cu_seqlens_k, _, _, page_table, _, *max_seqlens = args[3:11]
    scores = _num_scores(q, k, cu_seqlens_q, cu_seqlens_k, page_table, *max_seqlens)
    return 2 * q.shape[-2] * scores * (q.shape[-1] + v.shape[-1])


def _attn_backward_flop(dout, dlse, q, k, v, out, lse, *args, **kwargs):
    """2 FLOP × (3 head_dim + 2 head_dim_v) a score: q k^T, dout v^T, p^T dout, ds k, ds^T q."""
    cu_seqlens_q, cu_seqlens_k, _, _, page_table, _, *max_seqlens = args[3:11]
    scores = _num_scores(q, k, cu_seqlens_q, cu_seqlens_k, page_table, *max_seqlens)
    return 2 * q.shape[-2] * scores * (3 * q.shape[-1] + 2 * v.shape[-1])


def _register_flop_formulas(flop_counter) -> None:
    register = flop_counter.register_flop_formula
    register(torch.ops.flash.attn, get_raw=True)(_attn_flop)
    register(torch.ops.flash.attn_backward, get_raw=True)(_attn_backward_flop)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Registers the formulas once torch.utils.flop_counter is imported.

    That module imports triton: 55 to 80 ms of the 100 that `import flash_ext` may cost.
    """

    name = "torch.utils.flop_counter"

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _register_flop_formulas(module)

        spec.loader.exec_module = exec_module
        return spec


if _WhenImported.name in sys.modules:
    _register_flop_formulas(sys.modules[_WhenImported.name])
else:
    sys.meta_path.insert(0, _WhenImported())
