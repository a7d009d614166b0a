"""xformers' memory_efficient_attention on flash_ext.

    from flash_ext.integrations.xformers import LowerTriangularMask, memory_efficient_attention

in the place of `from xformers.ops import …`. The bias classes are here under xformers' names
(`attn_bias` has them too), and objects of xformers' own classes are known by their names (tested
with look-alikes, never with xformers itself).
"""

import torch
from torch import Tensor

from flash_ext import attention

from . import _xformers_bias as attn_bias
from ._xformers_bias import (
    AttentionBias,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
)

__all__ = [
    "AttentionBias",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalMask",
    "BlockDiagonalPaddedKeysMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "attn_bias",
    "memory_efficient_attention",
    "memory_efficient_attention_forward_requires_grad",
]

# class name: whether rows count from the bottom right. By name, for xformers' own classes too; a
# class that is missing is refused, whatever it derives from.
_DENSE = {
    "LowerTriangularMask": False,
    "LowerTriangularMaskWithTensorBias": False,
    "LowerTriangularFromBottomRightMask": True,
    "LowerTriangularFromBottomRightLocalAttentionMask": True,
    "LocalAttentionFromBottomRightMask": True,
}
_BLOCKS = {
    "BlockDiagonalMask": True,
    "BlockDiagonalCausalMask": False,
    "BlockDiagonalCausalFromBottomRightMask": True,
    "BlockDiagonalCausalLocalAttentionMask": False,
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": True,
    "BlockDiagonalPaddedKeysMask": True,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": True,
}
_NOT_CAUSAL = {"BlockDiagonalMask", "BlockDiagonalPaddedKeysMask"}


def _causal_and_window(bias, name: str) -> dict:
    """`attention`'s causal and window of a bias whose rows count from the bottom right."""
    if name == "LocalAttentionFromBottomRightMask":
        return {"window": (bias.window_left, bias.window_right)}
    options = {"causal": name not in _NOT_CAUSAL}
    if "Local" in name:
        if bias._window_size <= 0:
            raise ValueError(f"window_size is {bias._window_size}; a window has at least one key")
        options["window"] = (bias._window_size - 1, -1)
    return options


def _dense_options(bias, name: str, seqlen_q: int, seqlen_k: int):
    """(keys that are seen at all, tensor to add or None, keywords of `attention`)."""
    tensor = None
    if name == "LowerTriangularMaskWithTensorBias":
        tensor = getattr(bias, "_bias", None)
        tensor = bias._subtensor if tensor is None else tensor
    if _DENSE[name]:
        return seqlen_k, tensor, _causal_and_window(bias, name)
    if seqlen_q > seqlen_k:
        return seqlen_k, tensor, {"window": (-1, seqlen_q - seqlen_k)}
    # No row sees a key past its own number, and on a square both ways to count are the same.
    return seqlen_q, tensor, {"causal": True}


def _block_options(bias, name: str, device) -> dict:
    """Keywords of `attention` for packed sequences."""
    q_info, k_info = bias.q_seqinfo, bias.k_seqinfo
    options = _causal_and_window(bias, name) | {
        "cu_seqlens_q": q_info.seqstart.to(device, torch.int32),
        "cu_seqlens_k": k_info.seqstart.to(device, torch.int32),
        "max_seqlen_q": int(q_info.max_seqlen),
        "max_seqlen_k": int(k_info.max_seqlen),
    }
    if "PaddedKeys" in name:
        options["seqused_k"] = k_info.seqlen.to(device, torch.int32)
    if _BLOCKS[name] or q_info is k_info:
        return options
    rows, keys = (
        [b - a for a, b in zip(x.seqstart_py, x.seqstart_py[1:], strict=False)]
        for x in (q_info, k_info)
    )
    for i, (m, n) in enumerate(zip(rows, keys, strict=True)):
        if m > n:
            raise ValueError(
                f"{name}: block {i} has {m} queries and {n} keys; counted from the top left a "
                "block must not have more queries than keys: use the mask that counts from the "
                "bottom right, or call memory_efficient_attention for the block alone"
            )
    options["seqused_k"] = options["cu_seqlens_q"].diff()
    return options


def _merge_heads(x):
    """(batch, seqlen, groups, heads, dim) with the two dimensions of heads as one."""
    return x.flatten(2, 3)


def _four_dimensions(query, key, value):
    """q, k, v (batch, seqlen, heads, dim) of xformers' layouts of 3, 4 and 5 dimensions.

    With 5, (batch, seqlen, groups, heads, dim), keys that are expanded over the heads of a group
    are read once.
    """
    rank = query.dim()
    if rank == 3:
        return tuple(x.unsqueeze(2) for x in (query, key, value))
    if rank == 5:
        expanded = all(x.stride(3) == 0 or x.shape[3] == 1 for x in (key, value))
        if expanded:
            return _merge_heads(query), key[:, :, :, 0], value[:, :, :, 0]
        return tuple(_merge_heads(x) for x in (query, key, value))
    return query, key, value


def _attend(query, key, value, bias, p, scale):
    """(out as query, lse)."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != query.dim() or x.dim() not in (3, 4, 5):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and query {tuple(query.shape)}; all must be "
                "(batch, seqlen, head_dim), (batch, seqlen, heads, head_dim) or (batch, seqlen, "
                "groups, heads, head_dim)"
            )
    q, k, v = _four_dimensions(query, key, value)
    options, tensor = {"softmax_scale": scale, "dropout_p": p}, None
    name = type(bias).__name__
    if name in _DENSE:  # first: xformers' own are tensors in some versions
        keys, tensor, more = _dense_options(bias, name, q.shape[1], k.shape[1])
        k, v = k[:, :keys], v[:, :keys]
        tensor = None if tensor is None else tensor[..., :keys]
        options |= more
    elif name in _BLOCKS:
        if q.shape[0] != 1:
            raise ValueError(
                f"query has a batch of {q.shape[0]} with {name}; packed sequences must be "
                "(1, total, heads, head_dim): join them with from_tensor_list"
            )
        options |= _block_options(bias, name, q.device)
        q, k, v = q[0], k[0], v[0]
    elif isinstance(bias, Tensor):
        tensor = bias
    elif bias is not None:
        raise TypeError(
            f"attn_bias is a {name}; it must be None, a tensor or one of "
            f"{', '.join([*_DENSE, *_BLOCKS])}"
        )
    if tensor is not None and tensor.dim() == 3:
        if query.dim() != 3:
            raise ValueError(
                f"attn_bias has shape {tuple(tensor.shape)} and query {tuple(query.shape)}; with "
                "heads it must be (batch, heads, seqlen_q, seqlen_k), 1 where it broadcasts"
            )
        tensor = tensor.unsqueeze(1)  # (batch, rows, keys)
    elif tensor is not None and tensor.dim() == 5:
        tensor = tensor.flatten(1, 2)  # (batch, groups, heads, rows, keys)
    out, lse = attention(q, k, v, tensor, **options, return_lse=True)
    if name in _BLOCKS:
        out, lse = out[None], lse[None]
    return out.reshape(*query.shape[:-1], value.shape[-1]), lse


def memory_efficient_attention(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    """Attention with xformers' arguments.

    Args:
        query: (batch, seqlen_q, heads, head_dim); (batch, seqlen_q, head_dim); or (batch, seqlen_q,
            groups, heads, head_dim) for grouped heads. Packed sequences have batch 1.
        key, value: the same with seqlen_k; value may have another head_dim.
        attn_bias: None; a tensor to add, (batch, heads, seqlen_q, seqlen_k) and what broadcasts to
            it, with a gradient; or an object of this module's classes.
        p: dropout.
        scale: default 1 / sqrt(head_dim).
        op: must be None; it chooses among xformers' kernels.
        output_dtype: default query's.

    Returns:
        As query, with value's head_dim.

    Raises:
        TypeError: attn_bias of another class.
        ValueError: op; shapes; a block with more queries than keys, counted from the top left.
        The others: as `flash_ext.attention`.
    """
    if op is not None:
        raise ValueError(f"op is {op}; it must be None: it chooses among xformers' kernels")
    out = _attend(query, key, value, attn_bias, p, scale)[0]
    return out if output_dtype is None else out.to(output_dtype)


def memory_efficient_attention_forward_requires_grad(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    """(`memory_efficient_attention`, lse (batch, heads, seqlen_q) fp32), both with gradients."""
    if op is not None:
        raise ValueError(f"op is {op}; it must be None: it chooses among xformers' kernels")
    out, lse = _attend(query, key, value, attn_bias, p, scale)
    return (out if output_dtype is None else out.to(output_dtype)), lse
