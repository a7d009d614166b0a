"""Jagged nested tensors: packed sequences that torch.nested keeps together with their offsets.

A jagged tensor is (batch, seqlen, num_heads, head_dim) to the eye and (total, num_heads, head_dim)
with offsets (batch + 1,) in memory, which is what attention over packed sequences takes: nothing is
padded and nothing copied.
"""

import torch

from .arguments import operator_arguments
from .ops import call_attn


def _jagged(name: str, x):
    """x, or ValueError unless it is (batch, seqlen, num_heads, head_dim), ragged in seqlen."""
    if not x.is_nested or x.layout != torch.jagged or x.dim() != 4 or x._ragged_idx != 1:
        what = f"{x.layout} nested" if x.is_nested else "dense"
        raise ValueError(
            f"{name} is a {what} tensor of shape {tuple(x.shape)}; with nested tensors q, k and v "
            "must all be jagged (batch, seqlen, num_heads, head_dim), ragged in seqlen: make them "
            "with torch.nested.nested_tensor(…, layout=torch.jagged)"
        )
    return x


def refuse_lengths(*given) -> None:
    """ValueError when a length is given besides those that nested tensors have."""
    if any(x is not None for x in given):
        raise ValueError(
            "q is a nested tensor, which has its lengths; leave out cu_seqlens, seqused, "
            "max_seqlen, page_table and leftpad_k, or pass q.values()"
        )


def _lengths(x):
    """(cu_seqlens, seqused, max_seqlen) of a jagged tensor; seqused where rows have gaps."""
    seqused = x.lengths()
    # A compiler can't read the longest off the device; None is the total.
    longest = x._maybe_max_seqlen if torch.compiler.is_compiling() else x._get_max_seqlen()
    return (
        x.offsets().to(torch.int32),
        None if seqused is None else seqused.to(torch.int32),
        longest,
    )


def attention(
    q, k, v, bias, alibi_slopes, sinks, rng_state, softmax_scale, causal, window, softcap, *rest
):
    """`flash_ext.attention` of jagged q, k, v (batch, seqlen, num_heads, head_dim).

    rest: dropout_p, deterministic, num_splits. A bias is (batch|1, num_heads|1, max_seqlen_q|1,
    max_seqlen_k|1), as for packed sequences.

    Returns:
        (out, lse): out jagged as q; lse (num_heads, total_q), as for packed sequences.
    """
    q, k, v = (_jagged(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    if not _same_offsets(k, v):
        raise ValueError("k and v have other offsets; they must be of the same sequences")
    cu_seqlens_q, seqused_q, max_seqlen_q = _lengths(q)
    cu_seqlens_k, seqused_k, max_seqlen_k = _lengths(k)
    out, lse = call_attn(
        operator_arguments(
            *(q.values(), k.values(), v.values(), bias, alibi_slopes, sinks),
            *(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, None, rng_state),
            *(max_seqlen_q, max_seqlen_k, softmax_scale, causal, window, softcap, *rest),
        )
    )
    jagged = torch.nested.nested_tensor_from_jagged(
        *(out, q.offsets(), q.lengths()),
        min_seqlen=q._maybe_min_seqlen,
        max_seqlen=q._maybe_max_seqlen,
    )
    return jagged, lse


def _same_offsets(a, b) -> bool:
    return a.offsets() is b.offsets() or torch.equal(a.offsets(), b.offsets())


def scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, _):
    """`flash_ext.scaled_dot_product_attention` of jagged (batch, num_heads, seqlen, head_dim)."""
    if attn_mask is not None:
        raise ValueError(
            "attn_mask is given with nested tensors, whose rows it cannot be made for; leave it "
            "out, or call flash_ext.attention with a bias (batch, num_heads, max_seqlen, …)"
        )
    if is_causal and not _same_offsets(query, key):
        raise ValueError(
            "is_causal is True and query has other offsets than key; torch's top left rule is for "
            "queries and keys of the same sequences: call flash_ext.attention(causal=True), whose "
            "rule is bottom right"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    settings = (scale, is_causal, (-1, -1), 0.0, dropout_p, False, 0)
    return attention(q, k, v, None, None, None, None, *settings)[0].transpose(1, 2)
