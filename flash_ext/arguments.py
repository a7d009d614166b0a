"""From what users pass to one operator call: Python types, windows, lengths that are tensors.

Only what the operator cannot see is checked here; everything else is the operator's to refuse.
"""

import numbers
import operator
import sys

import torch
from torch import Tensor

# flash-attn's return_attn_probs is for inspection: 2**28 elements are 512 MiB in bf16.
MAX_PROBS = 2**28

_TENSOR_NAMES = (
    *("bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k"),
    *("seqused_q", "seqused_k", "page_table", "rng_state", "leftpad_k"),
)


def type_error(name: str, got, allowed: str, advice: str) -> TypeError:
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
        raise type_error(name, x, "an int", "convert it with int()") from None


def as_float(name: str, x):
    """A Python or symbolic number as it is; another real number (NumPy's) as a float."""
    if isinstance(x, (float, int, torch.SymFloat, torch.SymInt)) and not isinstance(x, bool):
        return x
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise type_error(name, x, "a float", "convert it with float()")
    return float(x)


def _as_bool(name: str, x) -> bool:
    """A bool; NumPy's too, which whoever passes one has imported."""
    if isinstance(x, bool):
        return x
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(x, numpy.bool_):
        raise type_error(name, x, "True or False", "convert it with bool()")
    return bool(x)


def _window(name: str, window) -> tuple:
    """(left, right) out of a pair of ints, -1 for unbounded."""
    if not isinstance(window, (tuple, list)):
        raise type_error(
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


def operator_arguments(
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
    leftpad_k=None,
    window_name="window",
    draw_rng_state=_draw_rng_state,
    probs=False,
):
    """flash::attn's arguments, in its order, after the checks that are Python's."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise type_error(name, x, "a torch.Tensor", "convert it with torch.as_tensor")
    optional = (
        *(bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k),
        *(seqused_q, seqused_k, page_table, rng_state, leftpad_k),
    )
    for name, x in zip(_TENSOR_NAMES, optional, strict=True):
        if x is not None and not isinstance(x, Tensor):
            raise type_error(name, x, "a torch.Tensor or None", "convert it with torch.as_tensor")
    causal = _as_bool("causal", causal)
    deterministic = _as_bool("deterministic", deterministic)
    if softmax_scale is not None:
        softmax_scale = as_float("softmax_scale", softmax_scale)
    softcap = as_float("softcap", softcap)
    dropout_p = as_float("dropout_p", dropout_p)
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
        leftpad_k,
    )


def probs_arguments(args, lse):
    """flash::attn_probs' arguments out of flash::attn's."""
    q, k, _, bias, alibi_slopes, sinks, *lengths, _, rng_state = args[:12]
    return q, k, lse, bias, alibi_slopes, sinks, *lengths, rng_state, *args[12:20]


def check_probs_size(args) -> None:
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
