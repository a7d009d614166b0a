"""The checks that need values from the device; see semantics.md, 'Errors'.

The operators never read lengths back: that would stall the device and break graph capture. They
clamp them, so a bad length gives wrong numbers and no word of it. Call `check_inputs` when numbers
look wrong.
"""

import torch

from .functional import explain

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


def _check_cu_seqlens(name: str, cu_seqlens, total: int):
    """The lengths (batch,) int64 of packed sequences."""
    ends = cu_seqlens.long()
    if ends[0] != 0:
        raise ValueError(f"{name} begins with {int(ends[0])}; it must begin with 0: prepend a 0")
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
    used = seqused.long()
    i = _first((used < 0) | (used > lengths))
    if i is not None:
        raise ValueError(
            f"{name}[{i}] is {int(used[i])} but sequence {i} has {int(lengths[i])} {capacity}; it "
            f"must be 0 to {int(lengths[i])}: correct the length or enlarge the sequence"
        )


def _check_pages(page_table, k, lengths) -> None:
    num_pages, page_size = k.shape[:2]
    first = torch.arange(page_table.shape[1], device=k.device) * page_size
    bad = (first < lengths[:, None]) & ((page_table < 0) | (page_table >= num_pages))
    if bad.any():
        b, i = bad.nonzero()[0].tolist()
        raise ValueError(
            f"page_table[{b}, {i}] is {int(page_table[b, i])} but k has {num_pages} pages; the "
            f"pages of the {int(lengths[b])} keys in use must be 0 to {num_pages - 1}: correct the "
            "entry, or seqused_k"
        )


def _check_max_seqlen(name: str, max_seqlen, lengths) -> None:
    i = _first(lengths > int(max_seqlen))
    if i is not None:
        raise ValueError(
            f"{name} is {int(max_seqlen)} but sequence {i} has {int(lengths[i])} rows; the rows "
            f"past {name} are left out: pass {int(lengths.max())} or more, or None"
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
    leftpad_k=None,
) -> None:
    """Checks `attention`'s arguments, those that lie on the device too, and waits for them.

    Beyond what `attention` checks on every call: cu_seqlens begin with 0, never fall, stay within
    the tensor and make sequences no longer than max_seqlen; seqused are within their sequences,
    leftpad_k within the keys in use; the entries of page_table that are in use name pages;
    bias, alibi_slopes and sinks hold no value that makes rows NaN.

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
        leftpad_k=leftpad_k,
    )
    if cu_seqlens_q is None:
        lengths_q = torch.full((q.shape[0],), q.shape[1], device=q.device)
    else:
        lengths_q = _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    if page_table is not None:
        capacity = page_table.shape[1] * k.shape[1]
        lengths_k = torch.full((page_table.shape[0],), capacity, device=k.device)
    elif cu_seqlens_k is None:
        lengths_k = torch.full((k.shape[0],), k.shape[1], device=k.device)
    else:
        lengths_k = _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if seqused_q is not None:
        _check_seqused("seqused_q", seqused_q, lengths_q, "rows")
    if seqused_k is not None:
        _check_seqused("seqused_k", seqused_k, lengths_k, "keys")
    if page_table is not None:
        _check_pages(page_table, k, lengths_k if seqused_k is None else seqused_k.long())
    if leftpad_k is not None:
        used = lengths_k if seqused_k is None else seqused_k.long()
        _check_seqused("leftpad_k", leftpad_k, used, "keys")
    if max_seqlen_q is not None:
        _check_max_seqlen("max_seqlen_q", max_seqlen_q, lengths_q)
    if max_seqlen_k is not None:
        used = lengths_k if seqused_k is None else lengths_k.minimum(seqused_k.long())
        _check_max_seqlen("max_seqlen_k", max_seqlen_k, lengths_k if page_table is None else used)
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
