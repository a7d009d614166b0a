"""Keys in pages, keys hidden at the left, and splits: what flash::attn reads for inference."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from cache_util import (
    Forward,
    check_forward,
    forward,
    forward_references,
    paged,
)
from util import (
    Case,
    assert_close_to_reference,
    lengths,
    make_inputs,
    run_inputs,
    same_bits,
)

import flash_ext
from flash_ext import reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# ---- pages ---------------------------------------------------------------------------------------

PAGED = {
    "plain": Case(),
    "one token": Case(seqlens_q=(1, 1), causal=True),
    "four tokens, gqa": Case(seqlens_q=(4, 4), num_heads=8, causal=True, dtype=BF16),
    "sixteen tokens": Case(seqlens_q=(16, 16), num_heads=8, causal=True, dtype=FP16),
    "window": Case(window=(20, 3), seqlens_q=(9, 9)),
    "one token, window": Case(window=(20, 0), seqlens_q=(1, 1), dtype=BF16),
    "softcap": Case(softcap=3.0, seqlens_q=(2, 2), dtype=FP16),
    "alibi, sinks": Case(alibi="bh", sinks="some", seqlens_q=(3, 3)),
    "bias": Case(bias="bhqk", bias_hides=0.2, seqlens_q=(5, 5)),
    "mask": Case(bias="1h1k", bias_dtype=torch.bool, seqlens_q=(1, 1), dtype=BF16),
    "dropout": Case(dropout_p=0.2, seqlens_q=(70, 70)),
    "splits": Case(num_splits=3, sinks="finite", seqlens_q=(1, 1), dtype=BF16),
    "splits of long rows": Case(num_splits=4, seqlens_q=(65, 65), causal=True),
    "head dims": Case(head_dim=72, head_dim_v=40, seqlens_q=(1, 1), dtype=BF16),
    "largest head dim": Case(head_dim=256, seqlens_q=(2, 2), dtype=BF16),
    "seqused_q": Case(seqlens_q=(65, 65), seqused_q=(60, 1), causal=True),
    "everything": Case(
        **{"bias": "1hqk", "alibi": "bh", "sinks": "some", "softcap": 4.0, "causal": True},
        **{"window": (50, -1), "seqlens_q": (7, 7), "num_splits": 2, "dtype": BF16},
    ),
}


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("name", PAGED)
def test_pages_against_the_reference(name, page_size, device, dtype):
    case = PAGED[name]
    if case.dtype == FP32:
        case = replace(case, dtype=dtype)
    used = (100, 37)
    dense = make_inputs(case, device).replace(seqused_k=lengths(used, device))
    pages = paged(dense, used, page_size)
    got = check_forward(pages, f"{name}, pages of {page_size}", dense)
    assert torch.isfinite(got[0]).all()


@pytest.mark.parametrize("used", [(100, 100), (0, 5), (64, 65), (1, 0)])
@pytest.mark.parametrize("seqlen_q", [1, 65])
def test_pages_of_few_keys(seqlen_q, used, device, dtype):
    case = Case(seqlens_q=(seqlen_q,) * 2, causal=True, dtype=dtype)
    dense = make_inputs(case, device).replace(seqused_k=lengths(used, device))
    check_forward(paged(dense, used, 16), f"{used}", dense)


@pytest.mark.parametrize("seqlen_q", [1, 4, 65])
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_the_order_of_pages_changes_no_bit(page_size, seqlen_q, device, dtype):
    dense = make_inputs(Case(seqlens_q=(seqlen_q,) * 2, causal=True, dtype=dtype), device)
    used = (100, 61)
    first, second = (forward(paged(dense, used, page_size, seed)) for seed in (0, 1))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_sequences_that_share_pages(device, dtype):
    """A common beginning stored once: what prefix caching does."""
    dense = make_inputs(Case(seqlens_q=(1, 1), dtype=dtype), device)
    k, v = (x.clone() for x in (dense.k, dense.v))
    k[1, :48], v[1, :48] = k[0, :48], v[0, :48]
    dense = dense.replace(k=k, v=v, seqused_k=lengths((100, 77), device))
    pages = paged(dense, (100, 77), 16)
    pages.options["page_table"][1, :3] = pages.options["page_table"][0, :3]
    check_forward(pages, "shared pages", dense)


def test_flash_attns_block_table(device, dtype):
    rows, used = (3, 1), (100, 37)
    dense = make_inputs(Case(seqlens_q=(3, 3), dtype=dtype), device)
    pages = paged(dense, used, 16)
    q = torch.cat([dense.q[0], dense.q[1, :1]])
    ends_q, ends_k = (lengths((0, *itertools.accumulate(n)), device) for n in (rows, used))
    out = flash_ext.flash_attn_varlen_func(
        *(q, pages.k, pages.v, ends_q, ends_k, 3, 100),
        block_table=pages.options["page_table"],
        causal=True,
    )
    options = {"seqused_k": lengths(used, device), "causal": True}
    ref = reference.attention(
        dense.q, dense.k, dense.v, seqused_q=lengths(rows, device), **options
    )[0]
    expected = torch.cat([ref[0], ref[1, :1]])
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    with pytest.raises(NotImplementedError, match=r"return_attn_probs.*block_table"):
        flash_ext.flash_attn_varlen_func(
            *(q, pages.k, pages.v, ends_q, ends_k, 3, 100),
            block_table=pages.options["page_table"],
            return_attn_probs=True,
        )


def test_bad_pages_and_lengths_stay_inside(device, dtype):
    """Clamped: wrong numbers at most, never a fault. NaN anywhere else would show as a crash."""
    dense = make_inputs(Case(seqlens_q=(1, 1), dtype=dtype), device)
    pages = paged(dense, (100, 100), 16)
    pages.options["page_table"][:] = lengths((2**31 - 1, -(2**31)), device)[:, None]
    pages.options["seqused_k"][:] = 2**31 - 1
    out, _ = forward(pages)
    assert out.shape == dense.q.shape


def test_no_pages_at_all(device, dtype):
    inputs = make_inputs(Case(seqlens_q=(3, 3), dtype=dtype), device)
    table = torch.zeros(2, 0, dtype=torch.int32, device=device)
    for k, v in ((inputs.k[:0], inputs.v[:0]), (inputs.k, inputs.v)):
        out, lse = forward(inputs.replace(k=k, v=v, page_table=table))
        assert out.eq(0).all() and lse.isneginf().all()
    out, lse = forward(
        inputs.replace(k=inputs.k[:0], v=inputs.v[:0], page_table=lengths([[0], [0]], device))
    )
    assert out.eq(0).all() and lse.isneginf().all()


@pytest.mark.parametrize("argument", ["page_table", "leftpad_k"])
def test_a_gradient_of_a_cache_is_refused_by_name(argument, device, dtype):
    inputs = make_inputs(Case(dtype=dtype), device)
    if argument == "page_table":
        inputs = paged(inputs, (100, 100), 16)
    else:
        inputs = inputs.replace(leftpad_k=lengths((3, 0), device))
    with pytest.raises(NotImplementedError, match=f"{argument} has no gradient.*no_grad"):
        run_inputs(inputs)


PAGE_ERRORS = {
    "int64": ({"page_table": torch.zeros(2, 7).long()}, "page_table has dtype int64"),
    "batch": ({"page_table": torch.zeros(3, 7).int()}, r"page_table has shape \(3, 7\)"),
    "rank": ({"page_table": torch.zeros(2).int()}, "page_table has 1 dimensions"),
    "cu_seqlens_k": (
        {"cu_seqlens_k": lengths((0, 1, 2)), "cu_seqlens_q": lengths((0, 1, 2))},
        "cu_seqlens_k comes with page_table",
    ),
    "max_seqlen_q": ({"max_seqlen_q": 5}, "max_seqlen_q is 5 without cu_seqlens"),
    "leftpad": ({"leftpad_k": torch.zeros(3).int()}, r"leftpad_k has shape \(3,\)"),
}


@pytest.mark.parametrize("name", PAGE_ERRORS)
def test_refusals(name, device, dtype):
    options, message = PAGE_ERRORS[name]
    inputs = paged(make_inputs(Case(dtype=dtype), device), (100, 100), 16)
    options = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    with pytest.raises(ValueError, match=message):
        forward(inputs.replace(**options))


def test_v_pages_unlike_ks(device, dtype):
    inputs = paged(make_inputs(Case(dtype=dtype), device), (100, 100), 16)
    with pytest.raises(ValueError, match=r"v has \d+ pages of 8 keys and k has \d+ of 16"):
        forward(inputs.replace(v=inputs.v[:, :8]))


def test_check_inputs_reads_the_page_table(device, dtype):
    inputs = paged(make_inputs(Case(dtype=dtype), device), (100, 37), 16)
    options = dict(inputs.options)
    flash_ext.check_inputs(inputs.q, inputs.k, inputs.v, **options)
    table = options["page_table"].clone()
    table[1, 2] = 99
    with pytest.raises(ValueError, match=r"page_table\[1, 2\] is 99 but k has 17 pages"):
        flash_ext.check_inputs(inputs.q, inputs.k, inputs.v, **options | {"page_table": table})
    used = lengths((113, 2), device)
    with pytest.raises(ValueError, match=r"seqused_k\[0\] is 113 but sequence 0 has 112 keys"):
        flash_ext.check_inputs(inputs.q, inputs.k, inputs.v, **options | {"seqused_k": used})


# ---- keys hidden at the left ---------------------------------------------------------------------

LEFTPAD = {
    "plain": Case(),
    "one token": Case(seqlens_q=(1, 1), num_heads=8, causal=True, dtype=BF16),
    "window, alibi": Case(window=(30, 5), alibi="h", seqlens_q=(9, 9)),
    "bias, splits": Case(bias="bhqk", num_splits=3, seqlens_q=(4, 4)),
    "packed": Case(layout="varlen", seqlens_q=(65, 3), seqlens_k=(100, 64), causal=True),
}


@pytest.mark.parametrize("leftpad", [(0, 0), (3, 64), (99, 1), (100, 2**31 - 1), (-5, 63)])
@pytest.mark.parametrize("name", LEFTPAD)
def test_leftpad(name, leftpad, device, dtype):
    """NaN in the hidden keys reaches nothing; masks and ALiBi are as without padding."""
    case = LEFTPAD[name]
    if case.dtype == FP32:
        case = replace(case, dtype=dtype)
    inputs = make_inputs(case, device)
    starts = [0, 0] if not case.is_varlen else [0, case.seqlens_k[0]]
    for b, n in enumerate(leftpad):
        rows = slice(starts[b], starts[b] + max(min(n, case.seqlens_k[b]), 0))
        for x in (inputs.k, inputs.v):
            (x if case.is_varlen else x[b])[rows] = math.nan
    clean = [torch.nan_to_num(x) for x in (inputs.k, inputs.v)]
    padded = inputs.replace(leftpad_k=lengths(leftpad, device))
    ref = forward_references(padded.replace(k=clean[0], v=clean[1]))
    got = Forward(*forward(padded))
    assert_close_to_reference(got, *(Forward(*r) for r in ref), inputs, f"{name}, {leftpad}")


def test_leftpad_of_pages(device, dtype):
    dense = make_inputs(Case(seqlens_q=(2, 2), causal=True, dtype=dtype), device)
    dense = dense.replace(seqused_k=lengths((100, 70), device))
    pages = paged(dense, (100, 70), 16)
    check_forward(pages.replace(leftpad_k=lengths((17, 64), device)), "leftpad", dense)


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_fixed_splits_do_not_depend_on_the_batch(seqlen_q, num_splits, device, dtype):
    """A sequence's bits among others of any length are those that it has alone."""
    case = Case(seqlens_q=(seqlen_q,) * 3, seqlens_k=(200,) * 3, num_splits=num_splits, dtype=dtype)
    inputs = make_inputs(replace(case, causal=True), device)
    together = forward(inputs.replace(seqused_k=lengths((200, 77, 3), device)))
    for b, n in enumerate((200, 77, 3)):
        one = inputs.replace(
            q=inputs.q[b : b + 1], k=inputs.k[b : b + 1], v=inputs.v[b : b + 1],
            seqused_k=lengths((n,), device),
        )  # fmt: skip
        alone = forward(one)
        assert same_bits(alone[0][0], together[0][b]) and same_bits(alone[1][0], together[1][b])
