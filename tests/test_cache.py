"""Rotary embedding, appending to caches, and flash-attn's function for both."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from cache_util import (
    Forward,
    into_pages,
    new_keys,
    page_table_for,
    paged,
    tables,
)
from util import (
    Case,
    assert_close_to_reference,
    lengths,
    make_inputs,
    same_bits,
)

import flash_ext
from flash_ext import flash_attn_with_kvcache, reference

FP32 = torch.float32

# ---- rotary --------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim, head_dim", [(32, 32), (16, 40), (2, 7), (0, 8)])
@pytest.mark.parametrize("offsets", [0, 5, (3, 11)])
def test_apply_rotary_emb(offsets, rotary_dim, head_dim, interleaved, device, dtype):
    x = torch.randn(2, 9, 3, head_dim, generator=torch.Generator().manual_seed(0))
    x = x.to(device, dtype).requires_grad_()
    cos, sin = tables(30, rotary_dim, device)
    given = lengths(offsets, device) if isinstance(offsets, tuple) else offsets
    got = flash_ext.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=given)
    first = given if isinstance(offsets, tuple) else lengths((offsets,) * 2, device)
    wide = x.detach().double().requires_grad_()
    expected = reference.rotary(wide, cos, sin, first, interleaved=interleaved)
    tolerance = 1e-6 if dtype == FP32 else 2e-2
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    dout = torch.randn(got.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    (grad,) = torch.autograd.grad(got, x, dout)
    (exact,) = torch.autograd.grad(expected, wide, dout.double())
    torch.testing.assert_close(grad.double(), exact, rtol=tolerance, atol=tolerance)


def test_rotary_of_packed_rows_in_place(device, dtype):
    x = torch.randn(12, 2, 8, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    ends, cos_sin = lengths((1, 4, 4, 10), device), tables(16, 8, device, dtype)
    expected = reference.rotary(x, *cos_sin, lengths((2, 0, 7), device), ends)
    view = x[:]
    got = flash_ext.apply_rotary_emb(
        view, *cos_sin, inplace=True, seqlen_offsets=lengths((2, 0, 7), device), cu_seqlens=ends
    )
    assert got is view and same_bits(got, x)
    tolerance = 1e-6 if dtype == FP32 else 2e-2
    torch.testing.assert_close(x.double(), expected, rtol=tolerance, atol=tolerance)
    assert x[0].eq(0).all() and x[10:].eq(0).all()


def test_rotary_is_a_rotation(device, dtype):
    """Turning back is the inverse; scores depend on the distance alone."""
    x = torch.randn(1, 20, 1, 16, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    cos, sin = tables(40, 16, device)
    there = torch.ops.flash.rotary(x, cos, sin)
    back = torch.ops.flash.rotary(there, cos, sin, conjugate=True)
    tolerance = 1e-5 if dtype == FP32 else 3e-2
    torch.testing.assert_close(back, x, rtol=tolerance, atol=tolerance)
    near, far = (
        flash_ext.apply_rotary_emb(x, cos, sin, seqlen_offsets=n).double()[0, :, 0] for n in (0, 9)
    )
    tolerance = 1e-4 if dtype == FP32 else 2e-1
    torch.testing.assert_close(near @ near.T, far @ far.T, rtol=tolerance, atol=tolerance)


ROTARY_ERRORS = {
    "rows": ({"seqlen_offsets": 25}, ValueError, "rotary_cos has 5 rows and x has 9"),
    "negative": ({"seqlen_offsets": -1}, ValueError, "seqlen_offsets is -1"),
    "float": ({"seqlen_offsets": 1.0}, TypeError, "seqlen_offsets is a float"),
    "max_seqlen": ({"max_seqlen": 31}, ValueError, "max_seqlen is 31 but cos has 30 rows"),
    "int64": ({"seqlen_offsets": torch.zeros(2).long()}, ValueError, "seqlen_offsets has dtype"),
}


@pytest.mark.parametrize("name", ROTARY_ERRORS)
def test_rotary_refusals(name):
    options, kind, message = ROTARY_ERRORS[name]
    x, (cos, sin) = torch.randn(2, 9, 3, 8), tables(30, 8)
    with pytest.raises(kind, match=message):
        flash_ext.apply_rotary_emb(x, cos, sin, **options)
    with pytest.raises(ValueError, match="rotary_dim of 16; allowed is a rotary_dim of at most"):
        flash_ext.apply_rotary_emb(x, *tables(30, 16))
    with pytest.raises(NotImplementedError, match="no gradient of cos and sin"):
        flash_ext.apply_rotary_emb(x, cos.requires_grad_(), sin)


# ---- appending -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rotary_dim", [None, 16, 32])
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("before", [(0, 30), (17, 38), (40, 41), (-3, 5)])
def test_append_writes_new_rows_and_nothing_else(before, page_size, rotary_dim, device, dtype):
    """In guard bands; what would lie past the capacity, or in no page, is dropped."""
    new = new_keys(2, 4, 2, (32, 24), device, dtype)
    caches = new_keys(2, 40, 2, (32, 24), "cpu", dtype, seed=6)
    table = None
    if page_size is not None:
        table, num_pages = page_table_for(2, 40, page_size)
        caches = [into_pages(x, (40, 40), table, num_pages, page_size) for x in caches]
        table[1, -1] = -1
        table = table.to(device)
    caches = [x.to(device) for x in caches]
    expected = [x.clone() for x in caches]
    rotary = tables(64, rotary_dim, device, dtype) if rotary_dim else (None, None)
    arguments = (lengths(before, device), table, None, *rotary)
    used = reference.cache_append(*expected, *new, *arguments)
    buffers = [torch.full((x.numel() + 40,), 7.0, dtype=dtype, device=device) for x in caches]
    views = [b[17 : 17 + x.numel()].view(x.shape) for b, x in zip(buffers, caches, strict=True)]
    for view, x in zip(views, caches, strict=True):
        view.copy_(x)
    got = torch.ops.flash.cache_append(*views, *new, *arguments)
    assert torch.equal(got, used) and got.dtype == torch.int32
    for buffer, view, x, y in zip(buffers, views, expected, caches, strict=True):
        assert buffer[:17].eq(7).all() and buffer[17 + x.numel() :].eq(7).all()
        if rotary_dim is None:
            assert same_bits(view, x)
        else:
            torch.testing.assert_close(view, x, rtol=2e-2, atol=2e-2, equal_nan=True)
            same = (x == y) | x.isnan()
            assert same_bits(view[same], y[same]) or dtype != FP32


def test_append_of_packed_rows(device, dtype):
    caches = new_keys(3, 20, 2, (16, 16), device, dtype, seed=6)
    k, v = (x[0] for x in new_keys(1, 12, 2, (16, 16), device, dtype))
    ends, before = lengths((1, 6, 6, 11), device), lengths((0, 3, 18), device)
    expected = [x.clone() for x in caches]
    used = reference.cache_append(*expected, k, v, before, None, ends)
    got = torch.ops.flash.cache_append(*caches, k, v, before, None, ends)
    assert got.tolist() == used.tolist() == [5, 3, 20]
    assert all(same_bits(a, b) for a, b in zip(caches, expected, strict=True))


def test_strided_caches_and_new_keys(device, dtype):
    """k and v interleaved in one tensor, heads first in the cache: as models and servers keep."""
    both = torch.zeros(2, 2, 20, 2, 16, dtype=dtype, device=device).transpose(2, 3)
    caches = [x.transpose(1, 2) for x in both.unbind(1)]
    kv = torch.stack(new_keys(2, 3, 2, (16, 16), device, dtype), dim=2)
    torch.ops.flash.cache_append(*caches, *kv.unbind(2), lengths((0, 10), device))
    assert torch.equal(caches[0][1, 10:13], kv[1, :, 0])
    assert torch.equal(caches[1][0, :3], kv[0, :, 1])
    assert both.ne(0).sum() == kv.ne(0).sum()


APPEND_ERRORS = {
    "heads": (lambda a: {"k": a["k"][:, :, :1]}, "k has shape"),
    "v": (lambda a: {"v": a["v"][:, :2]}, "v has shape"),
    "dtype": (
        lambda a: {"k": a["k"].half(), "v": a["v"].half()},
        "k has dtype float16 and k_cache",
    ),
    "batch": (lambda a: {n: a[n][:1] for n in ("k", "v")}, "k_cache has 2 sequences and k has 1"),
    "expanded": (
        lambda a: {n: a[n][:1].expand(2, -1, -1, -1) for n in ("k_cache", "v_cache")},
        "k_cache is expanded",
    ),
    "last stride": (
        lambda a: {"k_cache": torch.zeros(2, 20, 2, 32)[..., ::2]},
        "k_cache has stride 2 in its last dimension",
    ),
    "seqlens": (lambda a: {"cache_seqlens": lengths((1, 2, 3))}, r"cache_seqlens has shape \(3,\)"),
    "int64": (lambda a: {"cache_seqlens": torch.zeros(2).long()}, "cache_seqlens has dtype int64"),
    "cos alone": (lambda a: {"rotary_cos": torch.ones(4, 2)}, "come together; got only rotary_cos"),
    "sin": (
        lambda a: {"rotary_cos": torch.ones(4, 2), "rotary_sin": torch.ones(4, 3)},
        "rotary_sin has shape",
    ),
}


@pytest.mark.parametrize("name", APPEND_ERRORS)
def test_append_refusals(name):
    k_cache, v_cache = new_keys(2, 20, 2, (16, 16), "cpu", FP32)
    k, v = new_keys(2, 3, 2, (16, 16), "cpu", FP32)
    arguments = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    arguments["cache_seqlens"] = lengths((0, 0))
    change, message = APPEND_ERRORS[name]
    before = k_cache.clone()
    with pytest.raises(ValueError, match=message):
        torch.ops.flash.cache_append(**arguments | change(arguments))
    assert torch.equal(k_cache, before)


def test_rotary_tables_shorter_than_what_the_host_knows():
    q, *_ = new_keys(2, 1, 2, (16,), "cpu", FP32)
    caches = new_keys(2, 9, 2, (16, 16), "cpu", FP32)
    k, v = new_keys(2, 1, 2, (16, 16), "cpu", FP32)
    cos, sin = tables(2, 16)
    with pytest.raises(ValueError, match="rotary_cos has 2 rows"):
        flash_attn_with_kvcache(q, *caches, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=5)


def test_append_has_no_gradient_for_its_tables():
    caches = new_keys(2, 20, 2, (16, 16), "cpu", FP32)
    k, v = new_keys(2, 3, 2, (16, 16), "cpu", FP32)
    cos, sin = (x.requires_grad_() for x in tables(20, 16))
    with pytest.raises(NotImplementedError, match="cache_append has no derivative"):
        torch.ops.flash.cache_append(*caches, k, v, lengths((0, 0)), None, None, cos, sin, False)


def test_append_has_no_gradient():
    caches = new_keys(2, 20, 2, (16, 16), "cpu", FP32)
    k, v = (x.requires_grad_() for x in new_keys(2, 3, 2, (16, 16), "cpu", FP32))
    with pytest.raises(NotImplementedError, match=r"cache_append has no derivative.*no_grad"):
        torch.ops.flash.cache_append(*caches, k, v, lengths((0, 0)))
    version = caches[0]._version
    with torch.no_grad():
        torch.ops.flash.cache_append(*caches, k, v, lengths((0, 0)))
    assert caches[0]._version > version


# ---- flash_attn_with_kvcache ---------------------------------------------------------------------


@pytest.fixture
def cached(device, dtype):
    """A maker of a call's tensors: caches of 3 rows for a batch of 2, new keys, rotary tables."""

    def make(seqlen_q=3, seqlen_new=3, heads=4, dims=(32, 24), dtype=dtype):
        generator = torch.Generator().manual_seed(8)
        q = torch.randn(2, seqlen_q, heads, dims[0], generator=generator).to(device, dtype)
        k_cache, v_cache = new_keys(3, 90, 2, dims, device, dtype, seed=9)
        k, v = new_keys(2, seqlen_new, 2, dims, device, dtype)
        return q, k_cache, v_cache, k, v

    return make


def expected_with_kvcache(
    q,
    k_cache,
    v_cache,
    k,
    v,
    cos,
    sin,
    seqlens,
    idx,
    leftpad,
    interleaved,
    compute_dtype,
    **options,
):
    """Row by row: what the function must give, and the caches afterwards."""
    rows = range(2) if idx is None else idx
    k_all, v_all = k_cache.clone(), v_cache.clone()
    before = lengths(seqlens, q.device)
    chosen = [x[list(rows)] for x in (k_all, v_all)]
    used = before
    if k is not None:
        used = reference.cache_append(*chosen, k, v, before, None, None, cos, sin, interleaved)
        if cos is not None:
            q = reference.rotary(q, cos, sin, before, interleaved=interleaved).to(q.dtype)
        for i, row in enumerate(rows):
            k_all[row], v_all[row] = chosen[0][i], chosen[1][i]
    out = reference.attention(
        *(q, *chosen), seqused_k=used, leftpad_k=leftpad, compute_dtype=compute_dtype, **options
    )
    return *out, k_all, v_all


KVCACHE = {
    "attention alone": {"new": False},
    "append": {},
    "append, causal": {"causal": True},
    "one token": {"causal": True, "seqlen_q": 1, "seqlen_new": 1, "heads": 8},
    "sixteen tokens": {"causal": True, "seqlen_q": 16, "seqlen_new": 16, "heads": 8},
    "rotary": {"rotary": 16, "causal": True},
    "rotary, interleaved": {"rotary": 32, "interleaved": True, "causal": True},
    "rotary, not causal": {"rotary": 32, "interleaved": False},
    "cache_batch_idx": {"idx": (2, 0), "causal": True},
    "duplicates": {"idx": (1, 1), "new": False},
    "leftpad": {"leftpad": (5, 30), "causal": True},
    "leftpad, window": {"leftpad": (3, 0), "window_size": (20, 0), "rotary": 32},
    "softcap, alibi": {"softcap": 5.0, "alibi": True, "causal": True},
    "sinks, splits": {"sinks": True, "num_splits": 3},
    "more queries than new keys": {"seqlen_q": 5, "seqlen_new": 1, "causal": True},
    "more new keys": {"seqlen_q": 1, "seqlen_new": 7, "causal": True},
}


# A page table names its pages itself: no cache_batch_idx beside it.
WITH_KVCACHE = [
    (name, page_size)
    for name, case in KVCACHE.items()
    for page_size in (None, 1, 30)
    if page_size is None or "idx" not in case
]


@pytest.mark.parametrize("lens", [(40, 67), (0, 88)])
@pytest.mark.parametrize("name, page_size", WITH_KVCACHE)
def test_with_kvcache(name, page_size, lens, cached, device, dtype):
    o = dict(KVCACHE[name])
    sizes = {n: o.pop(n) for n in ("seqlen_q", "seqlen_new", "heads") if n in o}
    q, k_cache, v_cache, k, v = cached(**sizes)
    if not o.pop("new", True):
        k = v = None
    idx, leftpad = o.pop("idx", None), o.pop("leftpad", None)
    leftpad = lengths(leftpad, device)
    interleaved, rotary_dim = o.pop("interleaved", True), o.pop("rotary", None)
    cos, sin = tables(100, rotary_dim, device) if rotary_dim else (None, None)
    num_heads = q.shape[2]
    slopes = torch.linspace(0.1, 0.5, num_heads, device=device) if o.pop("alibi", False) else None
    sinks = torch.linspace(-1, 1, num_heads, device=device) if o.pop("sinks", False) else None
    splits, window = o.pop("num_splits", 0), o.pop("window_size", (-1, -1))
    options = {"alibi_slopes": slopes, "sinks": sinks, "window_left": window[0], **o}
    options |= {"window_right": window[1]}
    if idx is None:
        k_cache, v_cache = k_cache[:2], v_cache[:2]
    results = [
        expected_with_kvcache(
            *(q, k_cache, v_cache, k, v, cos, sin, lens, idx, leftpad, interleaved, compute),
            **options,
        )
        for compute in (torch.float64, q.dtype)
    ]
    table = None
    if page_size is not None:
        table, num_pages = page_table_for(2, 90, page_size)
        k_cache, v_cache = (
            into_pages(x, (90, 90), table, num_pages, page_size).to(device)
            for x in (k_cache, v_cache)
        )
        table = table.to(device)
    else:
        k_cache, v_cache = k_cache.clone(), v_cache.clone()
    with torch.no_grad():
        got = flash_attn_with_kvcache(
            *(q, k_cache, v_cache, k, v, cos, sin, lengths(lens, device), lengths(idx, device)),
            *(leftpad, table),
            window_size=window,
            rotary_interleaved=interleaved,
            num_splits=splits,
            return_softmax_lse=True,
            **{"alibi_slopes": slopes, "sinks": sinks, **o},
        )
    judged = make_inputs(Case(softcap=o.get("softcap", 0.0), dtype=dtype), device)
    ref, pt = (Forward(*r[:2]) for r in results)
    if rotary_dim is None:
        assert_close_to_reference(Forward(*got), ref, pt, judged, name)
    else:  # keys and queries are rounded after another rotation
        tolerance = 1e-4 if dtype == FP32 else 4e-2
        torch.testing.assert_close(got[0].double(), ref.out, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got[1].double(), ref.lse.double(), rtol=0, atol=tolerance)
    for cache, expected in zip((k_cache, v_cache), results[0][2:], strict=True):
        if table is not None:
            cache = cache[table.long()].flatten(1, 2)
        tolerance = 0 if rotary_dim is None else 2e-2
        torch.testing.assert_close(cache[:, :90], expected, rtol=tolerance, atol=tolerance)


# ---- signatures, torch ---------------------------------------------------------------------------


def test_opcheck():
    caches = new_keys(2, 20, 2, (16, 8), "cpu", FP32)
    new = new_keys(2, 3, 2, (16, 8), "cpu", FP32)
    torch.library.opcheck(torch.ops.flash.cache_append.default, (*caches, *new, lengths((1, 4))))
    x = torch.randn(2, 9, 3, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.flash.rotary.default, (x, *tables(16, 8), lengths((1, 4))))
    inputs = paged(make_inputs(Case(), "cpu"), (100, 37), 16)
    options = {"page_table": inputs.options["page_table"], "leftpad_k": lengths((1, 2))}
    torch.library.opcheck(
        torch.ops.flash.attn.default,
        (inputs.q, inputs.k, inputs.v),
        options | {"seqused_k": inputs.options["seqused_k"]},
    )


USAGE = {
    "v alone": ({"v": 0}, "v is given but k is None"),
    "rotary alone": ({"rotary_cos": 0}, "rotary_cos is given but k is None"),
    "no lengths": ({"k": 0, "v": 0}, "cache_seqlens is None but k is given"),
    "k alone": ({"k": 0, "cache_seqlens": 1}, "v is None but k is given"),
    "both": ({"cache_batch_idx": 1, "block_table": 1}, "both given"),
    "negative": ({"cache_seqlens": -1}, "cache_seqlens is -1"),
}


@pytest.mark.parametrize("name", USAGE)
def test_usage_errors(name):
    q, *_ = new_keys(2, 1, 2, (16,), "cpu", FP32)
    caches = new_keys(2, 9, 2, (16, 16), "cpu", FP32)
    options, message = USAGE[name]
    filled = {
        n: x if n == "cache_seqlens" else (lengths((0, 1)) if x == 1 else q)
        for n, x in options.items()
    }
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(q, *caches, **filled)


def test_the_example_generates_the_same_tokens(monkeypatch, capsys, device):
    path = Path(__file__).resolve().parent.parent / "examples" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate_example", path)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)
    sizes = "--requests 4 --new-tokens 5 --longest-prompt 20 --batch 3 --chunk 8 --page-size 4"
    monkeypatch.setattr(sys, "argv", ["generate.py", "--device", device, *sizes.split()])
    assert example.main() == 0
    assert "every token equals" in capsys.readouterr().out
