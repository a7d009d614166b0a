"""The house functions; their arguments become one call of an operator `flash::*`.

semantics.md says what the arguments mean. Long argument lists stand in starred rows, grouped as in
the schema, since the formatter gives any other list of that length a line per argument.
"""

import json

import torch
from torch import Tensor

from . import nested, ops
from .arguments import as_float, check_probs_size, operator_arguments, probs_arguments, type_error


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
    leftpad_k=None,
    return_lse=False,
):
    """Exact attention, dense or over packed sequences: softmax(scale q k^T + …) v.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim); packed (total_q, num_heads, head_dim).
            transpose(1, 2) SDPA's (batch, heads, seqlen, head_dim). With q, k and v jagged nested
            tensors (batch, seqlen, num_heads, head_dim), out is one too.
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
        page_table: (batch, max_pages) int32; k and v are then (num_pages, page_size, …) and key j
            of sequence b is row j % page_size of page page_table[b, j // page_size], its length
            seqused_k (None: all pages). q may be packed, by cu_seqlens_q alone. Without gradients.
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
        leftpad_k: (batch,) int32, how many keys at the beginning of each sequence are hidden; no
            diagonal moves. Without gradients.
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
    if isinstance(q, Tensor) and q.is_nested:
        nested.refuse_lengths(
            *(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table),
            *(max_seqlen_q, max_seqlen_k, leftpad_k),
        )
        out, lse = nested.attention(
            *(q, k, v, bias, alibi_slopes, sinks, rng_state, softmax_scale, causal, window),
            *(softcap, dropout_p, deterministic, num_splits),
        )
        return (out, lse) if return_lse else out
    out, lse = ops.call_attn(
        operator_arguments(
            *(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k),
            *(seqused_q, seqused_k, page_table, rng_state, max_seqlen_q, max_seqlen_k),
            *(softmax_scale, causal, window, softcap, dropout_p, deterministic, num_splits),
            leftpad_k,
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
            raise type_error(name, x, "a torch.Tensor", "pass what attention returned")
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
        raise type_error("lse", lse, "a torch.Tensor", "pass the lse that attention returned")
    dropout_p = as_float("dropout_p", dropout_p)
    if dropout_p > 0 and rng_state is None:
        raise ValueError(
            f"dropout_p is {dropout_p} but rng_state is None; pass the rng_state that attention "
            "got, since another one means another mask"
        )
    args = operator_arguments(
        *(q, k, k, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k),
        *(seqused_q, seqused_k, None, rng_state, max_seqlen_q, max_seqlen_k),
        *(softmax_scale, causal, window, softcap, dropout_p, False, 0),
        probs=True,
    )
    check_probs_size(args)
    return ops.attn_probs(*probs_arguments(args, lse))


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
    leftpad_k=None,
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
            refused.
    """
    args = operator_arguments(
        *(q, k, v, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k),
        *(seqused_q, seqused_k, page_table, rng_state, max_seqlen_q, max_seqlen_k),
        *(softmax_scale, causal, window, softcap, dropout_p, deterministic, num_splits),
        leftpad_k,
        draw_rng_state=lambda q: q.new_zeros(2, dtype=torch.int64),
    )
    return ops.explain(*args, backward)


def kernels() -> list[dict]:
    """Every kernel of the loaded libraries, as a dict of name, arch, pass, dtype, head_dim, …"""
    return json.loads(ops.kernels())
