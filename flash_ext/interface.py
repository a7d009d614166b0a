"""The functions that users call; their arguments become one call of an operator `flash::*`.

Only what the operator cannot see is checked here: Python types, the form of a window, packed
layouts. Everything else is the operator's to refuse. semantics.md says what the arguments mean.

Long argument lists stand in starred rows, grouped as in the schema, since the formatter gives any
other list of that length a line per argument.
"""

import json
import numbers
import operator
import sys

import torch
from torch import Tensor

from . import ops

# flash-attn's return_attn_probs is for inspection: 2**28 elements are 512 MiB in bf16.
MAX_PROBS = 2**28

_TENSOR_NAMES = (
    *("bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k"),
    *("seqused_q", "seqused_k", "page_table", "rng_state"),
)


def _type_error(name: str, got, allowed: str, advice: str) -> TypeError:
    return TypeError(f"{name} is a {type(got).__name__}; it must be {allowed}: {advice}")


def _as_int(name: str, x):
    """An int or SymInt as it is; whatever else stands for one (NumPy's integers) as an int."""
    if type(x) is int or isinstance(x, torch.SymInt):
        return x
    try:
        if isinstance(x, bool):
            raise TypeError
        return operator.index(x)
    except TypeError:
        raise _type_error(name, x, "an int", "convert it with int()") from None


def _as_float(name: str, x):
    """A Python or symbolic number as it is; another real number (NumPy's) as a float."""
    if isinstance(x, (float, int, torch.SymFloat, torch.SymInt)) and not isinstance(x, bool):
        return x
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise _type_error(name, x, "a float", "convert it with float()")
    return float(x)


def _as_bool(name: str, x) -> bool:
    """A bool; NumPy's too, which whoever passes one has imported."""
    if isinstance(x, bool):
        return x
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(x, numpy.bool_):
        raise _type_error(name, x, "True or False", "convert it with bool()")
    return bool(x)


def _window(name: str, window) -> tuple:
    """(left, right) out of a pair of ints, -1 for unbounded."""
    if not isinstance(window, (tuple, list)):
        raise _type_error(
            name, window, "a pair (left, right) of ints", "write (-1, -1) for no window"
        )
    if len(window) != 2:
        raise ValueError(
            f"{name} has {len(window)} entries; it must have two, (left, right): write (-1, -1) "
            "for no window and (w - 1, 0) for the last w keys"
        )
    left, right = window
    return _as_int(f"{name}[0]", left), _as_int(f"{name}[1]", right)


def _max_seqlen(name: str, max_seqlen, cu_seqlens, seqused, bias, bias_dim: int, probs: bool):
    """max_seqlen as the operator takes it, and seqused.

    A tensor of one integer is read back, except by a compiler, which could not go on: there its
    value joins seqused, since a sequence's length is the smallest of the two and cu_seqlens'
    difference. The price is a launch sized by the total, and no probabilities (probs), whose
    shape it is.
    """
    if max_seqlen is None or type(max_seqlen) is int:
        return max_seqlen, seqused
    if not isinstance(max_seqlen, Tensor):
        return _as_int(name, max_seqlen), seqused
    if max_seqlen.numel() != 1 or max_seqlen.is_floating_point():
        raise TypeError(
            f"{name} is a {max_seqlen.dtype} tensor of shape {tuple(max_seqlen.shape)}; it must "
            "be an int or a tensor of one integer: take its max()"
        )
    if cu_seqlens is None or not torch.compiler.is_compiling():
        return int(max_seqlen), seqused
    # Refused in this very function: where a graph break makes the compiler retry without it, the
    # call goes on eagerly from here, with the value read back.
    if probs:
        raise ValueError(
            f"{name} is a tensor while compiling, but it is the shape of the probabilities "
            "(attn_probs, return_attn_probs); it must be an int: pass the longest sequence's "
            "length as an int, or call this outside torch.compile"
        )
    bound = max_seqlen.reshape(1).to(cu_seqlens.device, torch.int32)
    seqused = bound.expand(cu_seqlens.shape[0] - 1) if seqused is None else seqused.minimum(bound)
    if bias is not None and bias.shape[bias_dim] != 1:
        return bias.shape[bias_dim], seqused
    return None, seqused


def _draw_rng_state(q: Tensor) -> Tensor:
    """A new dropout mask's state: on q's device, so that a CUDA graph draws anew every replay."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device)


def _arguments(
    q,
    k,
    v,
    bias,
    alibi_slopes,
    sinks,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_q,
    seqused_k,
    page_table,
    rng_state,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window,
    softcap,
    dropout_p,
    deterministic,
    num_splits,
    window_name="window",
    draw_rng_state=_draw_rng_state,
    probs=False,
):
    """flash::attn's arguments, in its order, after the checks that are Python's."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise _type_error(name, x, "a torch.Tensor", "convert it with torch.as_tensor")
    optional = (
        *(bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k),
        *(seqused_q, seqused_k, page_table, rng_state),
    )
    for name, x in zip(_TENSOR_NAMES, optional, strict=True):
        if x is not None and not isinstance(x, Tensor):
            raise _type_error(name, x, "a torch.Tensor or None", "convert it with torch.as_tensor")
    causal = _as_bool("causal", causal)
    deterministic = _as_bool("deterministic", deterministic)
    if softmax_scale is not None:
        softmax_scale = _as_float("softmax_scale", softmax_scale)
    softcap = _as_float("softcap", softcap)
    dropout_p = _as_float("dropout_p", dropout_p)
    window_left, window_right = _window(window_name, window)
    if max_seqlen_q is not None:
        max_seqlen_q, seqused_q = _max_seqlen(
            "max_seqlen_q", max_seqlen_q, cu_seqlens_q, seqused_q, bias, -2, probs
        )
    if max_seqlen_k is not None:
        max_seqlen_k, seqused_k = _max_seqlen(
            "max_seqlen_k", max_seqlen_k, cu_seqlens_k, seqused_k, bias, -1, probs
        )
    if dropout_p > 0 and rng_state is None:
        rng_state = draw_rng_state(q)
    return (
        *(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k),
        *(seqused_q, seqused_k, page_table, rng_state, max_seqlen_q, max_seqlen_k),
        *(softmax_scale, causal, window_left, window_right, softcap, dropout_p),
        deterministic or torch.are_deterministic_algorithms_enabled(),
        _as_int("num_splits", num_splits),
    )


def attention(
    q,
    k,
    v,
    bias=None,
    alibi_slopes=None,
    sinks=None,
    *,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    dropout_p=0.0,
    rng_state=None,
    deterministic=False,
    num_splits=0,
    return_lse=False,
):
    """Exact attention, dense or over packed sequences: softmax(scale q k^T + …) v.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim); packed (total_q, num_heads, head_dim).
            transpose(1, 2) SDPA's (batch, heads, seqlen, head_dim).
        k: (batch, seqlen_k, num_heads_k, head_dim); packed (total_k, num_heads_k, head_dim).
            num_heads is a multiple of num_heads_k, and query head h reads key head
            h // (num_heads // num_heads_k).
        v: as k, with head_dim_v. Head dims are 1 to 256. q, k and v have one dtype: fp16 or bf16,
            on the CPU also fp32 and fp64. Under autocast fp32 is cast, and only these three.
        bias: (batch|1, num_heads|1, seqlen_q|1, seqlen_k|1) of q's dtype or fp32, added to the
            scores; or bool, True = take part. Packed: the last two are max_seqlen.
        alibi_slopes: (num_heads,) or (batch, num_heads), any float dtype: the score loses
            slope * |i + seqlen_k - seqlen_q - j|.
        sinks: (num_heads,), any float dtype: a logit that takes part in the softmax alone.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, where the packed sequences begin and end.
        seqused_q, seqused_k: (batch,) int32, shorten sequences without moving them.
        page_table: (batch, max_pages) int32; k and v are then (num_pages, page_size, …). Refused
            for now: paged keys are not built yet.
        max_seqlen_q, max_seqlen_k: the longest sequence, an int or a tensor of one integer
            (read back). None: the total.
        softmax_scale: default 1 / sqrt(head_dim).
        causal: key j is visible to row i when j <= i + seqlen_k - seqlen_q (bottom right).
        window: (left, right), inclusive around i + seqlen_k - seqlen_q; -1 is unbounded.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        dropout_p: in steps of 1/256; kept probabilities are scaled up. Below 1/512 nothing is
            dropped, from 511/512 on everything.
        rng_state: (2,) int64, the state of the dropout mask; drawn from torch's generator of q's
            device when None. The same state gives the same mask on every backend.
        deterministic: the backward gives the same bits in every run; also on under
            torch.use_deterministic_algorithms(True).
        num_splits: parts that the keys are split into, 0 to choose from the shapes.
        return_lse: whether to return lse too.

    Returns:
        out (…, num_heads, head_dim_v) in q's dtype; with return_lse (out, lse), lse being the
        natural log of the softmax denominator, fp32 (fp64 for fp64): (batch, num_heads, seqlen_q),
        packed (num_heads, total_q). A row that sees no key gives out 0 and lse -inf. Both have
        gradients, in reverse mode, once.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or value, by name.
        RuntimeError: a feature that the device's kernels do not have, by name.
        NotImplementedError: double backward, forward-mode derivatives.

    Lengths on the device are not read back; flash_ext.check_inputs does. Source: Dao et al.,
    FlashAttention (2022) and FlashAttention-2 (2023); ALiBi: Press et al. (2021).
    """
    out, lse = ops.call_attn(
        _arguments(
            *(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k),
            *(seqused_q, seqused_k, page_table, rng_state, max_seqlen_q, max_seqlen_k),
            *(softmax_scale, causal, window, softcap, dropout_p, deterministic, num_splits),
        )
    )
    return (out, lse) if return_lse else out


def merge(out_a, lse_a, out_b, lse_b):
    """Joins attention over two disjoint key sets into attention over both.

    Args:
        out_a, out_b: (batch, seqlen_q, num_heads, head_dim_v); packed (total_q, num_heads,
            head_dim_v).
        lse_a, lse_b: (batch, num_heads, seqlen_q); packed (num_heads, total_q).

    Returns:
        (out, lse) shaped like a part; out in the parts' dtype, accumulated in fp32. A part whose
        lse is -inf counts nothing; two such give out 0, lse -inf. Differentiable. At most one part
        may have been computed with the sinks.

    Raises:
        TypeError: an argument is no tensor of a floating dtype, by name.
        ValueError: the parts' shapes or dtypes do not match.
    """
    parts = (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b))
    for name, x in parts:
        if not isinstance(x, Tensor):
            raise _type_error(name, x, "a torch.Tensor", "pass what attention returned")
        if not x.is_floating_point():
            raise TypeError(
                f"{name} is a {x.dtype} tensor; it must be of a floating dtype: pass what "
                "attention returned"
            )
    return ops.merge(out_a, lse_a, out_b, lse_b)


def attn_probs(
    q,
    k,
    lse,
    bias=None,
    alibi_slopes=None,
    sinks=None,
    *,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    dropout_p=0.0,
    rng_state=None,
):
    """The attention probabilities exp(s - lse), for inspection; O(seqlen_q * seqlen_k) memory.

    The arguments are `attention`'s, and lse is what it returned for them. With dropout pass the
    rng_state that attention got.

    Returns:
        (batch, num_heads, seqlen_q, seqlen_k) in q's dtype; packed: the last two are max_seqlen_q
        and max_seqlen_k, padded with 0. Not scaled for dropout; the sign bit is set where dropout
        dropped the entry. Differentiating it raises NotImplementedError.

    Raises:
        TypeError, ValueError, RuntimeError: as `attention`.
        ValueError: the result would have more than 2**28 elements; dropout_p without rng_state; a
            tensor max_seqlen under torch.compile.
    """
    if not isinstance(lse, Tensor):
        raise _type_error("lse", lse, "a torch.Tensor", "pass the lse that attention returned")
    dropout_p = _as_float("dropout_p", dropout_p)
    if dropout_p > 0 and rng_state is None:
        raise ValueError(
            f"dropout_p is {dropout_p} but rng_state is None; pass the rng_state that attention "
            "got, since another one means another mask"
        )
    args = _arguments(
        *(q, k, k, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k),
        *(seqused_q, seqused_k, None, rng_state, max_seqlen_q, max_seqlen_k),
        *(softmax_scale, causal, window, softcap, dropout_p, False, 0),
        probs=True,
    )
    _check_probs_size(args)
    return ops.attn_probs(*_probs_arguments(args, lse))


def _probs_arguments(args, lse):
    """flash::attn_probs' arguments out of flash::attn's."""
    q, k, _, bias, alibi_slopes, sinks, *lengths, _, rng_state = args[:12]
    return q, k, lse, bias, alibi_slopes, sinks, *lengths, rng_state, *args[12:20]


def _check_probs_size(args) -> None:
    """ValueError when the probabilities would have more than MAX_PROBS elements."""
    q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k = args[0], args[1], args[6], *args[12:14]
    rank = 4 if cu_seqlens_q is None else 3
    if q.dim() != rank or k.dim() != rank or (rank == 3 and cu_seqlens_q.dim() != 1):
        return  # the operator says so
    if cu_seqlens_q is None:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    else:
        batch = cu_seqlens_q.shape[0] - 1
        seqlen_q = q.shape[0] if max_seqlen_q is None else max_seqlen_q
        seqlen_k = k.shape[0] if max_seqlen_k is None else max_seqlen_k
    num_heads = q.shape[-2]
    if batch * num_heads * seqlen_q * seqlen_k > MAX_PROBS:
        raise ValueError(
            f"the probabilities (batch {batch}, num_heads {num_heads}, seqlen_q {seqlen_q}, "
            f"seqlen_k {seqlen_k}) would have more than {MAX_PROBS} elements; leave out "
            "return_attn_probs, or ask for fewer heads or rows at a time; for lse alone call "
            "flash_ext.attention(…, return_lse=True)"
        )


def explain(
    q,
    k,
    v,
    bias=None,
    alibi_slopes=None,
    sinks=None,
    *,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    dropout_p=0.0,
    rng_state=None,
    deterministic=False,
    num_splits=0,
    backward=False,
) -> str:
    """Which kernel serves `attention` on these arguments and, for the others, why not.

    The arguments are `attention`'s; backward asks about the backward pass. Nothing is computed,
    and no dropout mask is drawn.

    Returns:
        Lines: "required: " and the pass, dtype, head dims and features; "serves: " and a kernel's
        name, or "no kernel"; then, for each other kernel of the pass, "not <name>: <reason>".

    Raises:
        TypeError, ValueError: as `attention`. A call that no kernel serves is described, not
            refused, but for page_table, which is a RuntimeError.
    """
    args = _arguments(
        *(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k),
        *(seqused_q, seqused_k, page_table, rng_state, max_seqlen_q, max_seqlen_k),
        *(softmax_scale, causal, window, softcap, dropout_p, deterministic, num_splits),
        draw_rng_state=lambda q: q.new_zeros(2, dtype=torch.int64),
    )
    return ops.explain(*args, backward)


def kernels() -> list[dict]:
    """Every kernel of the loaded libraries, as a dict of name, arch, pass, dtype, head_dim, …"""
    return json.loads(ops.kernels())


# ---- flash-attn 2.8's functions ------------------------------------------------------------------
# Parameters, order, defaults and results are flash-attn's; bias and sinks are added, by keyword.
# Where the meaning differs (S_dmask holds true probabilities, lengths are clamped), semantics.md
# wins.


def _flash_attn(
    q,
    k,
    v,
    bias,
    alibi_slopes,
    sinks,
    cu_seqlens_q,
    cu_seqlens_k,
    page_table,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    softcap,
    dropout_p,
    deterministic,
    return_attn_probs,
):
    """out, or (out, softmax_lse, S_dmask)."""
    args = _arguments(
        *(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k),
        *(None, None, page_table, None, max_seqlen_q, max_seqlen_k),
        *(softmax_scale, causal, window_size, softcap, dropout_p, deterministic, 0),
        window_name="window_size",
        probs=bool(return_attn_probs),
    )
    if not return_attn_probs:
        return ops.call_attn(args)[0]
    _check_probs_size(args)
    out, lse = ops.call_attn(args)
    return out, lse, ops.attn_probs(*_probs_arguments(args, lse))


def _require_cu_seqlens(**cu_seqlens) -> None:
    """ValueError when one is None, by the caller's own name for it."""
    for name, x in cu_seqlens.items():
        if x is None:
            raise ValueError(
                f"{name} is None; {' and '.join(cu_seqlens)} must be given, (batch + 1,) int32: "
                "pass where the packed sequences begin and end, or call the function without varlen"
            )


def _unpack(name: str, x, count: int, packed_ndim: int):
    """The parts of a tensor that stacks count of them: (batch, seqlen|total, count, …)."""
    if not isinstance(x, Tensor):
        raise _type_error(name, x, "a torch.Tensor", "stack its parts with torch.stack")
    if x.dim() != packed_ndim or x.shape[-3] != count:
        layout = "(batch, seqlen, " if packed_ndim == 5 else "(total, "
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; it must be {layout}{count}, num_heads, head_dim): "
            f"stack its parts with torch.stack(…, dim=-3)"
        )
    return x.unbind(-3)


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    bias=None,
    sinks=None,
):
    """Dense attention with flash-attn 2.8's signature; `attention` says what the arguments mean.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim); transpose(1, 2) SDPA's (batch, heads, seqlen,
            head_dim).
        k, v: (batch, seqlen_k, num_heads_k, head_dim), v may have another head_dim.
        dropout_p: 0.0 during evaluation.
        window_size: (left, right), inclusive, -1 = unbounded.
        return_attn_probs: return the probabilities too; refused above 2**28 elements. For lse
            alone call flash_ext.attention(…, return_lse=True).

    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v); with return_attn_probs (out, softmax_lse,
        S_dmask): softmax_lse (batch, num_heads, seqlen_q) fp32 and S_dmask (batch, num_heads,
        seqlen_q, seqlen_k), the probabilities before dropout, negative where dropped.

    Raises:
        TypeError, ValueError, RuntimeError: as `attention`.
    """
    return _flash_attn(
        *(q, k, v, bias, alibi_slopes, sinks, None, None, None, None, None, softmax_scale),
        *(causal, window_size, softcap, dropout_p, deterministic, return_attn_probs),
    )


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    bias=None,
    sinks=None,
):
    """`flash_attn_func` with k and v in one tensor kv (batch, seqlen_k, 2, num_heads_k, head_dim).

    The gradient of kv is one tensor. Errors may name its parts, k and v.
    """
    k, v = _unpack("kv", kv, 2, 5)
    return _flash_attn(
        *(q, k, v, bias, alibi_slopes, sinks, None, None, None, None, None, softmax_scale),
        *(causal, window_size, softcap, dropout_p, deterministic, return_attn_probs),
    )


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    bias=None,
    sinks=None,
):
    """`flash_attn_func` with q, k and v in one tensor qkv (batch, seqlen, 3, num_heads, head_dim).

    The gradient of qkv is one tensor. Errors may name its parts, q, k and v.
    """
    q, k, v = _unpack("qkv", qkv, 3, 5)
    return _flash_attn(
        *(q, k, v, bias, alibi_slopes, sinks, None, None, None, None, None, softmax_scale),
        *(causal, window_size, softcap, dropout_p, deterministic, return_attn_probs),
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    *,
    bias=None,
    sinks=None,
):
    """Attention over packed sequences with flash-attn 2.8's signature.

    Args:
        q: (total_q, num_heads, head_dim).
        k, v: (total_k, num_heads_k, head_dim), v may have another head_dim; with block_table
            (num_pages, page_size, num_heads_k, head_dim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, where the sequences begin and end.
        max_seqlen_q, max_seqlen_k: the longest sequence, an int or a tensor of one integer. A
            longer one is cut to it.
        return_attn_probs: as `flash_attn_func`, but refused under torch.compile with a tensor
            max_seqlen, which would not be the shape's. For lse alone call
            flash_ext.attention(…, return_lse=True).
        block_table: (batch, max_pages) int32, `attention`'s page_table, as errors call it; refused
            for now: paged keys are not built yet.
        The others: as `flash_attn_func`.

    Returns:
        out (total_q, num_heads, head_dim_v); with return_attn_probs (out, softmax_lse, S_dmask):
        softmax_lse (num_heads, total_q) fp32 and S_dmask (batch, num_heads, max_seqlen_q,
        max_seqlen_k), the probabilities before dropout, negative where dropped, 0 where padded.

    Raises:
        TypeError, ValueError, RuntimeError: as `attention`.
    """
    _require_cu_seqlens(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return _flash_attn(
        *(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, block_table),
        *(max_seqlen_q, max_seqlen_k, softmax_scale),
        *(causal, window_size, softcap, dropout_p, deterministic, return_attn_probs),
    )


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    bias=None,
    sinks=None,
):
    """`flash_attn_varlen_func` with k and v in one tensor kv (total_k, 2, num_heads_k, head_dim).

    The gradient of kv is one tensor. Errors may name its parts, k and v.
    """
    _require_cu_seqlens(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    k, v = _unpack("kv", kv, 2, 4)
    return _flash_attn(
        *(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, None),
        *(max_seqlen_q, max_seqlen_k, softmax_scale),
        *(causal, window_size, softcap, dropout_p, deterministic, return_attn_probs),
    )


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    bias=None,
    sinks=None,
):
    """`flash_attn_varlen_func` with q, k and v in one tensor qkv (total, 3, num_heads, head_dim).

    cu_seqlens (batch + 1,) int32 and max_seqlen hold for queries and keys. The gradient of qkv is
    one tensor. Errors may say cu_seqlens_q, max_seqlen_q, q, k or v for the part of these.
    """
    _require_cu_seqlens(cu_seqlens=cu_seqlens)
    q, k, v = _unpack("qkv", qkv, 3, 4)
    return _flash_attn(
        *(q, k, v, bias, alibi_slopes, sinks, cu_seqlens, cu_seqlens, None),
        *(max_seqlen, max_seqlen, softmax_scale),
        *(causal, window_size, softcap, dropout_p, deterministic, return_attn_probs),
    )
