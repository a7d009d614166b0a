"""Inputs that broke caches of attention libraries in public; known_inputs.md says what each is."""

import itertools
import math

import pytest
import torch
from cache_util import (
    Forward,
    forward,
    forward_references,
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
    skip_unless_served,
)

import flash_ext
from flash_ext import flash_attn_with_kvcache, reference

FP16, FP32 = torch.float16, torch.float32


def test_R019_poisoned_rest_of_a_cache_of_new_keys(device):
    skip_unless_served(Case(dtype=FP16), device)
    q, k, v = (torch.ones(2, 1, 2, 64, dtype=FP16, device=device) for _ in range(3))
    k_cache, v_cache = (torch.full((2, 4, 2, 64), math.nan).to(device, FP16) for _ in range(2))
    for cache in (k_cache, v_cache):
        cache[0, :1], cache[1, :3] = 1, 1
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths((1, 3), device))
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("new", [False, True])
def test_R056_past_the_last_page(new, device, dtype):
    q, k, v = new_keys(1, 1, 1, (16, 16, 16), device, dtype)
    pool = torch.full((3, 256, 1, 16), math.nan).to(device, dtype)
    pool[1] = 1
    k_cache, v_cache = pool.clone(), pool.clone()
    table = lengths([[1]], device)
    used = 256 if new else 257
    options = {"cache_seqlens": lengths((used,), device), "block_table": table}
    args = (q, k_cache, v_cache, *((k, v) if new else ()))
    out = flash_attn_with_kvcache(*args, **options)
    assert torch.equal(out, torch.ones_like(out))
    assert same_bits(k_cache, pool) and same_bits(v_cache, pool)
    with pytest.raises(ValueError, match=r"seqused_k\[0\] is 257 but sequence 0 has 256 keys"):
        flash_ext.check_inputs(
            *(q, k_cache, v_cache), seqused_k=lengths((257,), device), page_table=table
        )


def test_R057_a_full_cache(device, dtype):
    q, k, v = new_keys(2, 1, 2, (16, 16, 16), device, dtype)
    buffer = torch.randn(2, 4, 8, 2, 16, generator=torch.Generator().manual_seed(0))
    buffer = buffer.to(device, dtype)
    before = buffer.clone()
    k_cache, v_cache = buffer[:, 1:3]
    full = lengths((8, 8), device)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=full)
    assert same_bits(buffer, before) and torch.isfinite(out).all()
    with pytest.raises(ValueError, match="cache_seqlens is 8 and k has 1 keys, more than the 8"):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=8)
    with pytest.raises(ValueError, match="cache_seqlens is 9, more than the 8 keys"):
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=9)


def test_R058_a_number_for_cache_seqlens(device, dtype):
    q, *pool = new_keys(2, 1, 2, (16, 16, 16), device, dtype)
    pool = new_keys(8, 64, 2, (16, 16), device, dtype)
    table = lengths([[3, 1], [6, 0]], device)
    out = flash_attn_with_kvcache(q, *pool, cache_seqlens=100, block_table=table)
    used = lengths((100, 100), device)
    same = flash_attn_with_kvcache(q, *pool, cache_seqlens=used, block_table=table)
    assert out.shape == q.shape and same_bits(out, same)


def test_R059_leftpad_is_honoured(device, dtype):
    q, *caches = new_keys(2, 1, 2, (16, 16, 16), device, dtype)
    caches = new_keys(2, 9, 2, (16, 16), device, dtype)
    pad = lengths((3, 0), device)
    out = flash_attn_with_kvcache(q, *caches, cache_leftpad=pad)
    short = flash_attn_with_kvcache(q[:1], *(x[:1, 3:] for x in caches))
    torch.testing.assert_close(out[:1], short)
    assert not torch.equal(out[:1], flash_attn_with_kvcache(q, *caches)[:1])


def test_R071_rows_of_the_cache_by_name(device, dtype):
    q, k, v = new_keys(2, 1, 2, (16, 16, 16), device, dtype)
    caches = new_keys(4, 9, 2, (16, 16), device, dtype)
    for idx in ((3, 1), (2, 2)):
        out = flash_attn_with_kvcache(q, *caches, cache_batch_idx=lengths(idx, device))
        assert same_bits(out, flash_attn_with_kvcache(q, *(x[list(idx)] for x in caches)))
    if torch.device(device).type == "cpu":
        with pytest.raises(ValueError, match=r"cache_batch_idx is \[2, 2\]; with new keys"):
            flash_attn_with_kvcache(
                q, *caches, k, v, cache_seqlens=2, cache_batch_idx=lengths((2, 2))
            )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_R090_a_compiled_step_appends_every_time(device, dtype):
    q, k, v = new_keys(2, 1, 2, (16, 16, 16), device, dtype)
    caches = new_keys(2, 9, 2, (16, 16), device, dtype)
    eager = [x.clone() for x in caches]
    cos, sin = tables(16, 16, device)

    def step(q, k, v, k_cache, v_cache, used):
        out = flash_attn_with_kvcache(
            *(q, k_cache, v_cache, k, v, cos, sin), cache_seqlens=used, causal=True
        )
        return out, used + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    used = mine = lengths((2, 4), device)
    with torch.no_grad():
        for _ in range(3):
            out, mine = compiled(q, k, v, *caches, mine)
            expected, used = step(q, k, v, *eager, used)
            assert same_bits(out, expected)
            assert all(same_bits(a, b) for a, b in zip(caches, eager, strict=True))


@pytest.mark.parametrize("num_splits", [0, 3])
def test_R062_packed_queries_over_pages(num_splits, device, dtype):
    """Decodes beside a prefill: each sequence as in a call of its own."""
    rows, used = (1, 70, 0, 4), (100, 90, 40, 4)
    case = Case(seqlens_q=(70,) * 4, seqlens_k=(100,) * 4, causal=True, dtype=dtype)
    dense = make_inputs(case, device).replace(num_splits=num_splits)
    pages = paged(dense, used, 16)
    q = torch.cat([dense.q[b, :n] for b, n in enumerate(rows)])
    ends = lengths((0, *itertools.accumulate(rows)), device)
    out, lse = forward(pages.replace(q=q, cu_seqlens_q=ends, max_seqlen_q=70, max_seqlen_k=100))
    for b, (begin, n) in enumerate(zip(ends.tolist(), rows, strict=False)):
        one = dense.replace(
            q=dense.q[b : b + 1, :n],
            k=dense.k[b : b + 1, : used[b]],
            v=dense.v[b : b + 1, : used[b]],
        )
        ref, pt = forward_references(one)
        mine = Forward(out[None, begin : begin + n], lse[None, :, begin : begin + n].contiguous())
        assert_close_to_reference(mine, Forward(*ref), Forward(*pt), one, f"sequence {b}")


def test_R065_decoding_in_steps_equals_attention_at_once(device, dtype):
    """Appended in steps of 1 to 4, causal, rotary; every row as in one call over all."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 30, h, 32, generator=generator).to(device, dtype) for h in (4, 2, 2))
    cos, sin = tables(40, 32, device)
    turned = [reference.rotary(x, cos, sin).to(dtype) for x in (q, k)]
    whole = reference.attention(*turned, v, causal=True)[0]
    table, num_pages = page_table_for(2, 32, 4)
    caches = [torch.full((num_pages, 4, 2, 32), math.nan).to(device, dtype) for _ in range(2)]
    used = lengths((0, 0), device)
    at = 0
    for step in itertools.cycle((1, 4, 2, 3)):
        rows = slice(at, min(at + step, 30))
        with torch.no_grad():
            out = flash_attn_with_kvcache(
                *(q[:, rows], *caches, k[:, rows], v[:, rows], cos, sin, used + at),
                block_table=table.to(device),
                causal=True,
                rotary_interleaved=False,
            )
        tolerance = 1e-5 if dtype == FP32 else 4e-2
        torch.testing.assert_close(out.double(), whole[:, rows], rtol=tolerance, atol=tolerance)
        at = rows.stop
        if at == 30:
            break
