"""torch's scaled_dot_product_attention on flash_ext: the function, and a switch for whole programs.

torch counts rows and keys from the top left, flash_ext from the bottom right; everything else is a
transposition. Nothing of size rows × keys is made.
"""

import contextlib
import functools
import sys
import threading
from collections import Counter

import torch
from torch import Tensor

from . import nested
from .arguments import type_error
from .functional import attention, explain, kernels


def _causal_alignment(attn_mask):
    """ "top_left" or "bottom_right" of a torch.nn.attention.bias.CausalBias, or None."""
    module = sys.modules.get("torch.nn.attention.bias")  # whoever has one has imported it
    if module is None or not isinstance(attn_mask, module.CausalBias):
        return None
    upper_left = attn_mask.variant == module.CausalVariant.UPPER_LEFT
    return "top_left" if upper_left else "bottom_right"


def _four_dimensions(x, lead):
    """(*lead|1s, heads, rows, dim) as (batch, heads, rows, dim), batch of lead's product."""
    while x.dim() < len(lead) + 3:
        x = x.unsqueeze(0)
    if len(lead) == 1:
        return x if x.shape[0] == lead[0] else x.expand(lead[0], -1, -1, -1)
    return x.expand(*lead, -1, -1, -1).reshape(-1, *x.shape[-3:])


def _bias_four_dimensions(mask, lead):
    """A mask that broadcasts to (*lead, heads, rows, keys) as one that `attention` broadcasts."""
    while mask.dim() < len(lead) + 3:
        mask = mask.unsqueeze(0)
    if all(n == 1 for n in mask.shape[: len(lead)]):
        return mask.reshape(1, *mask.shape[-3:])
    return mask.expand(*lead, -1, -1, -1).reshape(-1, *mask.shape[-3:])


def _arguments(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """(q, k, v, bias) and keywords of `attention`, and the shape that its result takes."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise type_error(name, x, "a torch.Tensor", "convert it with torch.as_tensor")
        if x.dim() < 2:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be (…, num_heads, seqlen, head_dim)"
            )
    if not all(x.dim() == query.dim() for x in (key, value)):
        raise ValueError(
            f"query has {query.dim()} dimensions, key {key.dim()} and value {value.dim()}; all "
            "must be (…, num_heads, seqlen, head_dim): unsqueeze the others"
        )
    if attn_mask is not None and is_causal:
        raise ValueError(
            "attn_mask is given and is_causal is True; torch's function takes one of the two: "
            "combine them, or call flash_ext.attention(…, bias, causal=True)"
        )
    rank = query.dim()
    if rank == 2:
        query, key, value = query[None], key[None], value[None]
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    heads = torch.broadcast_shapes((key.shape[-3],), (value.shape[-3],))[0]
    if query.shape[-3] != heads and heads != 1 and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[-3]} heads and key {heads}; without enable_gqa they must be "
            "as many: pass enable_gqa=True"
        )
    key, value = (x.expand(*x.shape[:-3], heads, *x.shape[-2:]) for x in (key, value))
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    alignment = "top_left" if is_causal else None
    if attn_mask is not None:
        alignment = _causal_alignment(attn_mask)
        attn_mask = None if alignment else attn_mask
    options = {"softmax_scale": scale, "dropout_p": dropout_p}
    if alignment == "bottom_right":
        options["causal"] = True
    elif alignment == "top_left" and seqlen_q <= seqlen_k:
        # No row sees a key past its own number: without those keys both rules are the same.
        key, value = key[..., :seqlen_q, :], value[..., :seqlen_q, :]
        options["causal"] = True
    elif alignment == "top_left":
        options["window"] = (-1, seqlen_q - seqlen_k)
    tensors = lead or (1,)
    bias = None if attn_mask is None else _bias_four_dimensions(attn_mask, tensors)
    q, k, v = (_four_dimensions(x, tensors).transpose(1, 2) for x in (query, key, value))
    shape = (*lead, query.shape[-3]) if rank > 2 else ()
    return (q, k, v, bias), options, shape


def scaled_dot_product_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    *,
    scale=None,
    enable_gqa=False,
):
    """Attention with torch.nn.functional.scaled_dot_product_attention's arguments and rules.

    Args:
        query: (…, num_heads, seqlen_q, head_dim), any number of batch dimensions, which broadcast;
            jagged nested tensors (batch, num_heads, seqlen, head_dim) too.
        key: (…, num_heads_k, seqlen_k, head_dim).
        value: (…, num_heads_k, seqlen_k, head_dim_v).
        attn_mask: broadcasts to (…, num_heads, seqlen_q, seqlen_k): bool, True = take part, or
            numbers of query's dtype or fp32 to add, which have a gradient; or a
            torch.nn.attention.bias.CausalBias.
        dropout_p: always applied, as torch's does: pass 0.0 in evaluation.
        is_causal: key j is visible to row i when j <= i, the top left rule, whatever the lengths.
            `attention(causal=True)` has the bottom right one.
        scale: default 1 / sqrt(head_dim).
        enable_gqa: num_heads may be a multiple of num_heads_k. With one head of keys it may be so
            in any case.

    Returns:
        (…, num_heads, seqlen_q, head_dim_v), contiguous after transpose(-3, -2), as a model that
        joins its heads next wants it. A row that sees no key is 0.

    Raises:
        ValueError: attn_mask with is_causal; numbers of dimensions or heads that do not match.
        The others: as `attention`.
    """
    if isinstance(query, Tensor) and query.is_nested:
        return nested.scaled_dot_product_attention(
            *(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        )
    tensors, options, shape = _arguments(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )
    out = attention(*tensors, **options).transpose(1, 2)
    if not shape:
        return out[0, 0]
    return out if len(shape) == 2 else out.unflatten(0, shape[:-1]) if shape[:-1] else out[0]


# ---- routing torch's function --------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _unserved(device, dtype, head_dim, head_dim_v, grouped, mask_dtype, passes) -> str:
    """Why no kernel serves a call, "" when one does.

    Kernels are chosen by dtype, head dims and features, so the smallest call that has them tells
    for all others. passes: (causal, dropout, backward, gradient of the mask).
    """
    causal, dropout, backward, mask_gradient = passes
    q = torch.empty(1, 1, 1 + grouped, head_dim, dtype=dtype, device=device)
    k = torch.empty(1, 1, 1, head_dim, dtype=dtype, device=device)
    v = torch.empty(1, 1, 1, head_dim_v, dtype=dtype, device=device)
    bias = None if mask_dtype is None else q.new_empty((1, 1, 1, 1), dtype=mask_dtype)
    options = {"causal": causal, "dropout_p": 0.5 if dropout else 0.0}
    try:
        for is_backward in (False, True)[: 1 + backward]:
            text = explain(q, k, v, bias, **options, backward=is_backward)
            required, serves, *_ = text.splitlines()
            if serves == "serves: no kernel":
                return f"no kernel; {required}"
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    if mask_gradient and not any(
        row["pass"] == "backward" and "dbias" in row["features"] and row["dtype"] == str(dtype)[6:]
        for row in kernels()
        if (row["arch"] == "cpu") == (torch.device(device).type == "cpu")
    ):
        return "no kernel; required: backward, dbias"
    return ""


def _unserved_constant(*args) -> str:
    """The same for a compiler, which asks while it traces and keeps the answer."""
    return _unserved(*args)


# All that torch.compiler.assume_constant_result does but for importing torch._dynamo: 800 modules.
_unserved_constant._dynamo_marked_constant = True


_PLAIN = (Tensor, torch.nn.Parameter)


def _reason_to_leave(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **rest):
    """Why a call stays with torch's function, "" when flash_ext takes it."""
    device = query.device
    if device.type not in ("cpu", "cuda"):
        return f"device {device.type}"
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if any(x.is_nested and x.layout != torch.jagged for x in tensors[:3]):
        return "nested tensors that are not jagged"
    if query.dim() < 3 or key.dim() != query.dim() or value.dim() != query.dim():
        return "shapes that torch broadcasts"
    if query.shape[-3] < key.shape[-3]:
        return "fewer query heads than key heads"
    alignment = None if attn_mask is None else _causal_alignment(attn_mask)
    if not query.is_nested and not all(type(x) in _PLAIN for x in tensors[: 3 + (not alignment)]):
        return "a tensor of a class of its own"
    if attn_mask is not None and is_causal:
        return "attn_mask with is_causal"  # which torch's kernels refuse or combine
    dtype, mask_dtype = query.dtype, None
    if torch.is_autocast_enabled(device.type) and dtype == torch.float32:
        dtype = torch.get_autocast_dtype(device.type)
    if attn_mask is not None and not alignment:
        mask_dtype = attn_mask.dtype
        mask_dtype = dtype if mask_dtype == query.dtype else mask_dtype
    backward = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    mask_gradient = mask_dtype is not None and backward and attn_mask.requires_grad
    ask = _unserved_constant if torch.compiler.is_compiling() else _unserved
    return ask(
        *(str(device), dtype, query.shape[-1], value.shape[-1]),
        *(query.shape[-3] != key.shape[-3], mask_dtype),
        (bool(is_causal or alignment), dropout_p > 0, backward, mask_gradient),
    )


class Routing:
    """What `route_sdpa` has done so far; calls inside compiled code are not counted."""

    def __init__(self):
        self.served = 0  # calls that flash_ext took
        self.left = Counter()  # calls that stayed with torch, by the reason

    def __repr__(self):
        return f"Routing(served={self.served}, left={dict(self.left)})"


_lock = threading.Lock()
_routings = []  # the innermost last
_original = None  # torch's function, while _routed stands in its place


def _routed(*args, **kwargs):
    if not _routings:  # somebody kept this function beyond the last route_sdpa
        return _original(*args, **kwargs)
    reason = _reason_to_leave(*args, **kwargs)
    if not torch.compiler.is_compiling():
        for routing in _routings[-1:]:
            if reason:
                routing.left[reason] += 1
            else:
                routing.served += 1
    return (_original if reason else scaled_dot_product_attention)(*args, **kwargs)


@contextlib.contextmanager
def route_sdpa():
    """Inside it torch.nn.functional.scaled_dot_product_attention is flash_ext's, where it can be.

    A program that is not written for flash_ext runs on it, whatever calls torch's function by its
    name in torch.nn.functional: models, torch.nn.MultiheadAttention, libraries. A call that no
    kernel serves (a dtype, a head dim, a gradient, a nested layout) goes to torch's function as
    before. Also a decorator; may be nested. It holds for all threads, and for code that is compiled
    inside it, which keeps what it was compiled with.

    Not reached: `from torch.nn.functional import scaled_dot_product_attention` done outside.

    Yields:
        Routing: `served` counts the calls that flash_ext took, `left` the others by the reason.
    """
    global _original
    routing = Routing()
    with _lock:
        if not _routings:
            _original = torch.nn.functional.scaled_dot_product_attention
            torch.nn.functional.scaled_dot_product_attention = _routed
        _routings.append(routing)
    try:
        yield routing
    finally:
        with _lock:
            _routings.remove(routing)
            if not _routings:
                torch.nn.functional.scaled_dot_product_attention = _original
