"""flash-attn 2.8's functions for inference with a cache, over the operators of this package.

Parameters, order and defaults are flash-attn's; sinks is added, by keyword. semantics.md, "Caches",
says what they mean. An append is one mutating operator, `flash::cache_append`, and the attention
after it another; nothing reads a length back from the device.
"""

import torch
from torch import Tensor

from . import ops
from .arguments import operator_arguments, type_error


def apply_rotary_emb(
    x,
    cos,
    sin,
    interleaved=False,
    inplace=False,
    seqlen_offsets=0,
    cu_seqlens=None,
    max_seqlen=None,
):
    """Rotary position embedding of the first 2 * cos.shape[1] elements of every head.

    Args:
        x: (batch, seqlen, num_heads, head_dim); packed, with cu_seqlens, (total, num_heads,
            head_dim).
        cos, sin: (seqlen_rotary, rotary_dim / 2), any float dtype, rotary_dim <= head_dim.
        interleaved: pairs are neighbours (GPT-J), not the halves of rotary_dim (GPT-NeoX).
        inplace: x itself is overwritten and returned.
        seqlen_offsets: an int, or (batch,) int32: the position of each sequence's first row. On
            the device it is not read back: positions past the tables use their last row.
        cu_seqlens: (batch + 1,) int32, where the packed sequences begin and end.
        max_seqlen: the longest sequence; only checked against the tables.

    Returns:
        Shaped and typed like x. Differentiable in x. Packed rows of no sequence are 0.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or value, by name.
        NotImplementedError: a gradient of cos or sin, double backward's forward mode.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """
    for name, t in (("x", x), ("cos", cos), ("sin", sin)):
        if not isinstance(t, Tensor):
            raise type_error(name, t, "a torch.Tensor", "convert it with torch.as_tensor")
    offsets = None
    if isinstance(seqlen_offsets, Tensor):
        offsets = seqlen_offsets
    elif isinstance(seqlen_offsets, bool) or not isinstance(seqlen_offsets, (int, torch.SymInt)):
        raise type_error("seqlen_offsets", seqlen_offsets, "an int or an int32 tensor", "use int()")
    elif seqlen_offsets < 0:
        raise ValueError(f"seqlen_offsets is {seqlen_offsets}; it must be 0 or more")
    else:
        cos, sin = cos[seqlen_offsets:], sin[seqlen_offsets:]
    if max_seqlen is not None and offsets is None and int(max_seqlen) > cos.shape[0]:
        raise ValueError(
            f"max_seqlen is {int(max_seqlen)} but cos has {cos.shape[0]} rows from seqlen_offsets "
            "on; every position needs its row: compute longer tables"
        )
    turned = ops.rotary(x, cos, sin, offsets, cu_seqlens, bool(interleaved))
    return x.copy_(turned) if inplace else turned


def _lengths(cache_seqlens, batch: int, device):
    """cache_seqlens as (batch,) int32 on the device, None for None."""
    if cache_seqlens is None or isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, (int, torch.SymInt)):
        raise type_error("cache_seqlens", cache_seqlens, "an int or an int32 tensor", "use int()")
    if cache_seqlens < 0:
        raise ValueError(f"cache_seqlens is {cache_seqlens}; it counts keys, 0 for an empty cache")
    return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)


def _check_tables(rotary_cos, cache_seqlens, seqlen_new) -> None:
    """What of the rotary tables the host knows. Lengths on the device are clamped to them."""
    if isinstance(cache_seqlens, Tensor) or not isinstance(rotary_cos, Tensor):
        return
    if cache_seqlens + seqlen_new > rotary_cos.shape[0]:
        raise ValueError(
            f"rotary_cos has {rotary_cos.shape[0]} rows but the new keys end at position "
            f"{cache_seqlens + seqlen_new}; every position needs its row: compute longer tables"
        )


def _check_append(k, v, k_cache, cache_seqlens, capacity, cache_batch_idx) -> None:
    """What of an append the host knows: that it fits, and that no two sequences share memory."""
    if cache_seqlens is None:
        raise ValueError(
            "cache_seqlens is None but k is given; the new keys are written at cache_seqlens: pass "
            "the number of keys that the cache holds, 0 for an empty one"
        )
    if v is None:
        raise ValueError("v is None but k is given; new keys and values come together")
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise type_error(name, x, "a torch.Tensor", "convert it with torch.as_tensor")
    if not isinstance(cache_seqlens, Tensor) and cache_seqlens + k.shape[1] > capacity:
        raise ValueError(
            f"cache_seqlens is {cache_seqlens} and k has {k.shape[1]} keys, more than the "
            f"{capacity} that a sequence's cache holds; enlarge the cache"
        )
    if (
        cache_batch_idx is not None
        and cache_batch_idx.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and cache_batch_idx.unique().numel() < cache_batch_idx.numel()
    ):
        raise ValueError(
            f"cache_batch_idx is {cache_batch_idx.tolist()}; with new keys no row may come twice, "
            "since two sequences would write to it: copy the row"
        )


def _pages(k_cache, cache_batch_idx, block_table):
    """The page table: block_table, or a dense cache's rows as pages of its whole length."""
    if cache_batch_idx is None:
        return block_table
    if block_table is not None:
        raise ValueError(
            "cache_batch_idx and block_table are both given; a page table names its pages itself: "
            "pass block_table[cache_batch_idx]"
        )
    if not isinstance(cache_batch_idx, Tensor):
        raise type_error("cache_batch_idx", cache_batch_idx, "a torch.Tensor", "use torch.tensor")
    if cache_batch_idx.dim() != 1:
        raise ValueError(
            f"cache_batch_idx has shape {tuple(cache_batch_idx.shape)}; it must be (batch,)"
        )
    return cache_batch_idx[:, None]


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
    *,
    sinks=None,
):
    """Attention over a cache, with flash-attn 2.8's signature; new keys are appended in place.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k_cache, v_cache: (batch_cache, seqlen_cache, num_heads_k, head_dim), v_cache may have
            another head_dim; with block_table (num_pages, page_size, num_heads_k, head_dim).
        k, v: (batch, seqlen_new, num_heads_k, head_dim), written to the caches at cache_seqlens
            before the attention. What lies past the capacity is dropped.
        rotary_cos, rotary_sin: (seqlen_rotary, rotary_dim / 2), any float dtype; only with k. Row i
            of q and of k is turned by position cache_seqlens + i (flash-attn turns all rows of q by
            cache_seqlens when there is neither causal nor a window).
        cache_seqlens: an int, or (batch,) int32: keys in the cache before the new ones. None: all.
        cache_batch_idx: (batch,) int32, which row of the cache each sequence has. None: its own.
        cache_leftpad: (batch,) int32, how many keys at the beginning of each cache are hidden.
        block_table: (batch, max_pages) int32, `attention`'s page_table; any page size.
        softmax_scale, causal, window_size, softcap, alibi_slopes, sinks: as `flash_attn_func`; the
            diagonal ends at the last key in use, new ones included.
        rotary_interleaved: as `apply_rotary_emb`.
        num_splits: parts that the keys are split into, 0 to choose from the shapes. A fixed number
            makes a sequence's bits independent of what else is in the batch.
        return_softmax_lse: whether to return lse too.

    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v); with return_softmax_lse (out, softmax_lse),
        softmax_lse (batch, num_heads, seqlen_q) fp32. Without gradients.

    Raises:
        TypeError, ValueError, RuntimeError: as `attention`.
        ValueError: an append that is known on the host to exceed the capacity, or to write one row
            of the cache twice.
        NotImplementedError: k or v requires a gradient; or, in backward, q of a paged or padded
            cache does.
    """
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(x, Tensor):
            raise type_error(name, x, "a torch.Tensor", "convert it with torch.as_tensor")
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have 4 dimensions")
    pages = _pages(k_cache, cache_batch_idx, block_table)
    capacity = k_cache.shape[1]
    if block_table is not None and isinstance(block_table, Tensor) and block_table.dim() == 2:
        capacity = block_table.shape[1] * k_cache.shape[1]
    if k is None:
        for name, x in (("v", v), ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
            if x is not None:
                raise ValueError(f"{name} is given but k is None; it serves new keys: pass k too")
        if isinstance(cache_seqlens, int) and cache_seqlens > capacity:
            raise ValueError(
                f"cache_seqlens is {cache_seqlens}, more than the {capacity} keys that a "
                "sequence's cache holds"
            )
    else:
        _check_append(k, v, k_cache, cache_seqlens, capacity, cache_batch_idx)
    seqused_k = _lengths(cache_seqlens, q.shape[0], q.device)
    if k is not None:
        if rotary_cos is not None:
            _check_tables(rotary_cos, cache_seqlens, k.shape[1])
            rotary_interleaved = bool(rotary_interleaved)
            q = ops.rotary(q, rotary_cos, rotary_sin, seqused_k, None, rotary_interleaved)
        seqused_k = ops.cache_append(
            *(k_cache, v_cache, k, v, seqused_k, pages, None, rotary_cos, rotary_sin),
            bool(rotary_interleaved),
        )
    out, lse = ops.call_attn(
        operator_arguments(
            *(q, k_cache, v_cache, None, alibi_slopes, sinks, None, None),
            *(None, seqused_k, pages, None, None, None),
            *(softmax_scale, causal, window_size, softcap, 0.0, False, num_splits),
            cache_leftpad,
            window_name="window_size",
        )
    )
    return (out, lse) if return_softmax_lse else out
