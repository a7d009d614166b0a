"""Caches on a GPU: many blocks over one sequence, lengths that change inside a graph, far pages.

tests/test_cache.py runs here too, by `pytest --device cuda`; these are the cases that need size, or
a stream.
"""

import math

import pytest
import torch
from cache_util import page_table_for
from gpu_util import int32, need_memory, randn
from util import same_bits

import flash_ext
from flash_ext import attention, flash_attn_with_kvcache, reference

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16


def with_lse(*args, **options):
    with torch.no_grad():
        return attention(*args, **options, return_lse=True)


def decode_inputs(batch, seqlen_q, seqlen_k, heads=8, heads_k=2, head_dim=128, dtype=BF16):
    q = randn(batch, seqlen_q, heads, head_dim, dtype=dtype, seed=1)
    k, v = (randn(batch, seqlen_k, heads_k, head_dim, dtype=dtype, seed=s) for s in (2, 3))
    return q, k, v


def assert_right(got, q, k, v, **options):
    """out and lse against fp64, by the error of one rounding to the dtype."""
    window = options.pop("window", (-1, -1))
    options.pop("num_splits", None)
    ref = reference.attention(*(q, k, v), window_left=window[0], window_right=window[1], **options)
    eps = torch.finfo(q.dtype).eps
    torch.testing.assert_close(got[0].double(), ref[0], rtol=4 * eps, atol=4 * eps)
    torch.testing.assert_close(got[1].double(), ref[1].double(), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("seqlen_k", [1, 63, 64, 65, 1000, 16384])
@pytest.mark.parametrize("batch, seqlen_q", [(1, 1), (1, 4), (2, 16), (5, 1)])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_lengths_around_blocks_and_pieces(head_dim, batch, seqlen_q, seqlen_k):
    q, k, v = decode_inputs(batch, seqlen_q, seqlen_k, head_dim=head_dim)
    assert_right(with_lse(q, k, v, causal=True), q, k, v, causal=True)


@pytest.mark.parametrize("heads, heads_k", [(1, 1), (6, 2), (24, 1), (32, 2), (64, 8)])
@pytest.mark.parametrize("seqlen_q", [1, 3, 16])
def test_groups_of_heads(seqlen_q, heads, heads_k):
    """Rows of a tile are (token, head of the group); groups that fit, fill and exceed a tile."""
    q, k, v = decode_inputs(2, seqlen_q, 700, heads, heads_k, 64)
    sinks, slopes = randn(heads, seed=4), torch.rand(heads, device="cuda")
    for options in ({}, {"sinks": sinks}, {"alibi_slopes": slopes}, {"window": (100, 0)}):
        got = with_lse(q, k, v, **options, causal=True)
        assert_right(got, q, k, v, **options, causal=True)


@pytest.mark.parametrize("batch", [3, 130, 1000])
def test_unequal_lengths_are_found_by_every_block(batch):
    """Some of them empty; more sequences than threads of a block, and than blocks."""
    generator = torch.Generator().manual_seed(batch)
    used = torch.randint(0, 300, (batch,), generator=generator)
    used[torch.rand(batch, generator=generator) < 0.2] = 0
    used[-1] = 2000
    table, num_pages = page_table_for(1, int(used.sum()) + 16 * batch, 16)
    table = table[0].cuda()
    q = randn(batch, 1, 8, 64, seed=1)
    pool = [randn(num_pages, 16, 2, 64, seed=s) for s in (2, 3)]
    pages = torch.full((batch, 125), -1, dtype=torch.int32, device="cuda")
    at = 0
    for b, n in enumerate(used.tolist()):
        count = -(-n // 16)
        pages[b, :count] = table[at : at + count]
        at += count
    options = {"page_table": pages, "seqused_k": used.int().cuda()}
    got = with_lse(q, *pool, **options)
    assert_right(got, q, *pool, **options)
    few = slice(0, 3)
    splits = {"num_splits": 4}
    part = with_lse(
        q[few], *pool, page_table=pages[few], seqused_k=used.int().cuda()[few], **splits
    )
    whole = with_lse(q, *pool, **options, **splits)
    assert same_bits(part[0], whole[0][few]) and same_bits(part[1], whole[1][few])


@pytest.mark.parametrize("num_splits", [1, 2, 7, 64, 256])
@pytest.mark.parametrize("seqlen_q", [1, 5, 200])
def test_fixed_splits(seqlen_q, num_splits):
    """More splits than blocks of keys, and more rows than a decode kernel is meant for."""
    q, k, v = decode_inputs(2, seqlen_q, 900)
    options = {"causal": True, "seqused_k": int32(900, 130), "num_splits": num_splits}
    assert_right(with_lse(q, k, v, **options), q, k, v, **options)


@pytest.mark.parametrize("num_splits", [0, 9])
def test_rows_of_lowest_biases_stay_uniform_over_parts(num_splits):
    """Parts next to a maximum of 1e38 merge by their sums, which lse has lost."""
    q, k, v = decode_inputs(1, 1, 5000)
    bias = torch.full((1, 1, 1, 5000), torch.finfo(BF16).min, dtype=BF16, device="cuda")
    bias[..., 3000:] = -math.inf
    out, _ = with_lse(q, k, v, bias, num_splits=num_splits)
    expected = v[:, :3000].double().mean(1).repeat_interleave(4, 1)
    torch.testing.assert_close(out[:, 0].double(), expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("num_splits", [0, 3])
def test_nan_reaches_its_own_row_alone(num_splits):
    q, k, v = decode_inputs(3, 1, 4000)
    expected = with_lse(q, k, v, num_splits=num_splits)
    k[1, 2500, 0, 5] = math.nan
    out, lse = with_lse(q, k, v, num_splits=num_splits)
    assert out[1, :, :4].isnan().all() and lse[1, :4].isnan().all()
    good = [(0, slice(None)), (2, slice(None)), (1, slice(4, 8))]
    for b, heads in good:
        assert same_bits(out[b, :, heads], expected[0][b, :, heads])
        assert same_bits(lse[b, heads], expected[1][b, heads])


def test_the_same_bits_every_time():
    q, k, v = decode_inputs(4, 1, 9000)
    used = int32(9000, 17, 4000, 8999)
    first = with_lse(q, k, v, seqused_k=used)
    for _ in range(50):
        again = with_lse(q, k, v, seqused_k=used)
        assert same_bits(first[0], again[0]) and same_bits(first[1], again[1])


def test_pages_past_2_31_elements():
    need_memory(18)
    num_pages, page_size = 2**13 + 3, 64
    q = randn(1, 1, 64, 128, seed=1)
    pool = [torch.zeros(num_pages, page_size, 64, 128, dtype=BF16, device="cuda") for _ in "kv"]
    assert pool[0].numel() > 2**31
    far = torch.tensor([[num_pages - 1, 0, num_pages - 2]], dtype=torch.int32, device="cuda")
    for x, seed in zip(pool, (2, 3), strict=True):
        x[far[0].long()] = randn(3, page_size, 64, 128, seed=seed)
    got = with_lse(q, *pool, page_table=far, seqused_k=int32(170))
    near = [x[far[0].long()] for x in pool]
    order = torch.arange(3, dtype=torch.int32, device="cuda")[None]
    expected = with_lse(q, *near, page_table=order, seqused_k=int32(170))
    assert same_bits(got[0], expected[0]) and same_bits(got[1], expected[1])
    del pool
    torch.cuda.empty_cache()


# ---- graphs --------------------------------------------------------------------------------------


def captured(function):
    """(graph, its results), after a warm-up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        results = function()
    return graph, results


@pytest.mark.parametrize("num_splits", [0, 5])
@pytest.mark.parametrize("page_size", [None, 16])
def test_R068_replay_with_lengths_past_the_captured_ones(page_size, num_splits):
    q, k, v = decode_inputs(2, 1, 8192)
    used, table = int32(128, 3), None
    if page_size is not None:
        table = torch.randperm(2 * 8192 // page_size, device="cuda").int().view(2, -1)
        k, v = (x.reshape(-1, page_size, *x.shape[2:]) for x in (k, v))
    options = {"seqused_k": used, "page_table": table, "num_splits": num_splits}
    graph, (out, lse) = captured(lambda: with_lse(q, k, v, **options))
    for lengths in ((128, 3), (8192, 100), (0, 8191), (5000, 5000)):
        used.copy_(int32(*lengths))
        graph.replay()
        expected = with_lse(q, k, v, **options)
        torch.cuda.synchronize()
        assert same_bits(out, expected[0]) and same_bits(lse, expected[1])


@pytest.mark.parametrize("paged", [False, True])
def test_a_captured_decode_step_appends(paged):
    """Rotary, append and attention in one graph, replayed as the cache grows."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(3, 6, 2, 12, 64, generator=generator).to("cuda", BF16)
    caches = [torch.full((2, 64, 2, 64), math.nan, dtype=BF16, device="cuda") for _ in "kv"]
    table = None
    if paged:
        caches = [x.view(8, 16, 2, 64) for x in caches]
        table = torch.randperm(8, device="cuda").int().view(2, 4)
    angles = torch.arange(64, device="cuda")[:, None] / 10 ** torch.linspace(0, 3, 32).cuda()
    cos, sin = angles.cos(), angles.sin()
    step = torch.zeros(2, 1, 12, 64, dtype=BF16, device="cuda")
    used = int32(0, 30)

    def call():
        q, k, v = step.split([8, 2, 2], dim=2)
        out = flash_attn_with_kvcache(
            *(q, *caches, k, v, cos, sin, used), block_table=table, causal=True
        )
        used.add_(1)
        return out

    for x in caches:
        x.nan_to_num_(0.25)
    graph, out = captured(call)
    used.copy_(int32(0, 30))
    mine, mine_used = [x.clone() for x in caches], int32(0, 30)
    for n in range(6):
        step.copy_(tokens[0, n][:, None])
        graph.replay()
        q, k, v = step.split([8, 2, 2], dim=2)
        expected = flash_attn_with_kvcache(
            *(q, *mine, k, v, cos, sin, mine_used), block_table=table, causal=True
        )
        mine_used += 1
        torch.cuda.synchronize()
        assert same_bits(out, expected) and torch.equal(used, mine_used)
        assert all(same_bits(a, b) for a, b in zip(caches, mine, strict=True))


def test_one_token_uses_the_decode_kernel():
    q, k, v = decode_inputs(1, 1, 500)
    assert "serves: " in (text := flash_ext.explain(q, k, v)) and "_decode_" in text.split("\n")[1]
    q = decode_inputs(1, 40, 500)[0]
    assert "_decode_" not in flash_ext.explain(q, k, v).split("\n")[1]
    assert "query rows a key head" in flash_ext.explain(q, k, v)
    assert "_decode_" in flash_ext.explain(q, k, v, num_splits=2).split("\n")[1]
