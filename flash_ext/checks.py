"""The checks that need values from the device; see semantics.md, 'Errors'.

The operators never read lengths back: that would stall the device and break graph capture. They
clamp them, so a bad length gives wrong numbers and no word of it. Call `check_inputs` when numbers
look wrong.
"""

import torch

from .interface import explain

# (argument, what holds of its good values): a NaN or one of these infinities spoils whole rows.
_BAD_VALUES = {
    "bias": ("NaN or +inf", lambda x: x.isnan() | (x == torch.inf)),
    "alibi_slopes": ("NaN or inf", lambda x: ~x.isfinite()),
    "sinks": ("NaN or +inf", lambda x: x.isnan() | (x == torch.inf)),
}


def _first(bad) -> int | None:
    """The index of the first True of a 1-D tensor."""
    places = bad.nonzero()
    return int(places[0]) if places.numel() else None


def _check_vector(name: str, x, length: int | None, meaning: str) -> None:
    if x.dtype != torch.int32 or x.dim() != 1 or (length is not None and x.shape[0] != length):
        size = "batch + 1" if length is None else length
        raise ValueError(
            f"{name} is {x.dtype} of shape {tuple(x.shape)}; it must be torch.int32 of shape "
            f"({size},), {meaning}: convert it with .to(torch.int32)"
        )


def _check_cu_seqlens(name: str, cu_seqlens, total: int):
    """The lengths (batch,) int64 of packed sequences."""
    _check_vector(name, cu_seqlens, None, "the cumulative sequence lengths")
    ends = cu_seqlens.long()
    if ends.numel() == 0 or ends[0] != 0:
        start = int(ends[0]) if ends.numel() else "nothing"
        raise ValueError(f"{name} begins with {start}; it must begin with 0: prepend a 0")
    lengths = ends.diff()
    i = _first(lengths < 0)
    if i is not None:
        raise ValueError(
            f"{name} falls from {int(ends[i])} to {int(ends[i + 1])} at entry {i + 1}; it must "
            "never fall: make it the cumulative sum of the lengths"
        )
    if ends[-1] > total:
        raise ValueError(
            f"{name} ends with {int(ends[-1])} but the tensor has {total} rows; it must end with "
            f"at most {total}: pass the cu_seqlens of this very tensor"
        )
    return lengths


def _check_seqused(name: str, seqused, lengths, capacity: str) -> None:
    _check_vector(name, seqused, lengths.shape[0], "one length a sequence")
    used = seqused.long()
    i = _first((used < 0) | (used > lengths))
    if i is not None:
        raise ValueError(
            f"{name}[{i}] is {int(used[i])} but sequence {i} has {int(lengths[i])} {capacity}; it "
            f"must be 0 to {int(lengths[i])}: correct the length or enlarge the sequence"
        )


def _check_max_seqlen(name: str, max_seqlen, lengths) -> None:
    i = _first(lengths > int(max_seqlen))
    if i is not None:
        raise ValueError(
            f"{name} is {int(max_seqlen)} but sequence {i} has {int(lengths[i])} rows; the rows "
            f"past {name} are left out: pass {int(lengths.max())} or more, or None"
        )


def _check_page_table(page_table, lengths, num_pages: int, page_size: int) -> None:
    """Only the entries of used pages count; the others are never read."""
    pages = page_table.long()
    used = torch.arange(pages.shape[1], device=pages.device) * page_size < lengths[:, None]
    bad = (used & ((pages < 0) | (pages >= num_pages))).nonzero()
    if bad.numel():
        b, column = bad[0].tolist()
        raise ValueError(
            f"page_table[{b}, {column}] is {int(pages[b, column])} but there are {num_pages} "
            f"pages; it must be 0 to {num_pages - 1}, since sequence {b} uses "
            f"{int(lengths[b])} keys in pages of {page_size}"
        )


def check_inputs(
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
) -> None:
    """Checks `attention`'s arguments, those that lie on the device too, and waits for them.

    Beyond what `attention` checks on every call: cu_seqlens begin with 0, never fall, stay within
    the tensor and make sequences no longer than max_seqlen; seqused are within their sequences;
    page_table names existing pages for every used key; bias, alibi_slopes and sinks hold no value
    that makes rows NaN.

    Raises:
        ValueError: the first finding, by argument: what it got, what is allowed, what to do.
        TypeError, RuntimeError: as `attention`.
    """
    explain(
        *(q, k, v, bias, alibi_slopes, sinks),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=page_table,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window=window,
        softcap=softcap,
        dropout_p=dropout_p,
        rng_state=rng_state,
        deterministic=deterministic,
        num_splits=num_splits,
    )
    if cu_seqlens_q is None:
        lengths_q = torch.full((q.shape[0],), q.shape[1], device=q.device)
    else:
        lengths_q = _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    if page_table is not None:
        if page_table.dtype != torch.int32 or page_table.dim() != 2:
            raise ValueError(
                f"page_table is {page_table.dtype} of shape {tuple(page_table.shape)}; it must be "
                "torch.int32 of shape (batch, max_pages)"
            )
        if seqused_k is None:
            raise ValueError(
                "seqused_k is None; with page_table it must be (batch,) int32, the number of keys "
                "of each sequence: pass it"
            )
        capacity = page_table.shape[1] * k.shape[1]
        lengths_k = torch.full((page_table.shape[0],), capacity, device=k.device)
    elif cu_seqlens_k is not None:
        lengths_k = _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    else:
        lengths_k = torch.full((k.shape[0],), k.shape[1], device=k.device)
    if lengths_q.shape != lengths_k.shape:
        raise ValueError(
            f"the queries make {lengths_q.shape[0]} sequences and the keys {lengths_k.shape[0]}; "
            "there must be as many of either: pass cu_seqlens_q and cu_seqlens_k of one batch"
        )
    if seqused_q is not None:
        _check_seqused("seqused_q", seqused_q, lengths_q, "rows")
    if seqused_k is not None:
        _check_seqused("seqused_k", seqused_k, lengths_k, "keys")
    if max_seqlen_q is not None:
        _check_max_seqlen("max_seqlen_q", max_seqlen_q, lengths_q)
    if max_seqlen_k is not None and page_table is None:
        _check_max_seqlen("max_seqlen_k", max_seqlen_k, lengths_k)
    if page_table is not None:
        _check_page_table(page_table, seqused_k.long(), k.shape[0], k.shape[1])
    if rng_state is not None and (rng_state.dtype != torch.int64 or rng_state.shape != (2,)):
        raise ValueError(
            f"rng_state is {rng_state.dtype} of shape {tuple(rng_state.shape)}; it must be "
            "torch.int64 of shape (2,): seed and offset"
        )
    for name, x in (("bias", bias), ("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if x is None or x.dtype == torch.bool:
            continue
        what, is_bad = _BAD_VALUES[name]
        bad = is_bad(x).nonzero()
        if bad.numel():
            place = bad[0].tolist()
            raise ValueError(
                f"{name}{place} is {float(x[tuple(place)])}; {what} makes whole rows NaN: replace "
                "it" + (", with -inf to mask" if name == "bias" else "")
            )
