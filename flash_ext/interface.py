"""flash-attn 2.8's functions, over the same operators.

Parameters, order, defaults and results are flash-attn's; bias and sinks are added, by keyword.
Where the meaning differs (S_dmask holds true probabilities, lengths are clamped), semantics.md
wins. Long argument lists stand in starred rows, grouped as in the schema.
"""

from torch import Tensor

from . import ops
from .arguments import check_probs_size, operator_arguments, probs_arguments, type_error


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
    seqused_k = None
    if page_table is not None:
        if return_attn_probs:
            raise NotImplementedError(
                "return_attn_probs is True with block_table, but no kernel reads probabilities off "
                "pages; leave it out, or gather the pages into contiguous k and v"
            )
        if isinstance(cu_seqlens_k, Tensor) and cu_seqlens_k.dim() == 1:
            cu_seqlens_k, seqused_k = None, cu_seqlens_k.diff()
    args = operator_arguments(
        *(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k),
        *(None, seqused_k, page_table, None, max_seqlen_q, max_seqlen_k),
        *(softmax_scale, causal, window_size, softcap, dropout_p, deterministic, 0),
        window_name="window_size",
        probs=bool(return_attn_probs),
    )
    if not return_attn_probs:
        return ops.call_attn(args)[0]
    check_probs_size(args)
    out, lse = ops.call_attn(args)
    return out, lse, ops.attn_probs(*probs_arguments(args, lse))


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
        raise type_error(name, x, "a torch.Tensor", "stack its parts with torch.stack")
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
        block_table: (batch, max_pages) int32, `attention`'s page_table, as errors call it;
            cu_seqlens_k then gives the sequences' lengths alone, by its differences. Without
            gradients and return_attn_probs.
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
