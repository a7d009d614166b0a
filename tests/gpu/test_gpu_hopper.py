"""The Hopper class (wgmma, TMA): which calls it serves, its tile edges, its schedule, its limits.

That it computes attention is what every other GPU test shows, where it serves. Here are the inputs
that its tiles, rings of stages and tensor maps could get wrong.
"""

import itertools
import math

import gpu_util
import pytest
import torch
from gpu_util import assert_close_results, check_inputs, inputs_of, int32, qkv, randn
from util import Case, make_inputs, same_bits

import flash_ext
from flash_ext import attention

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
dims = pytest.mark.parametrize("head_dim, head_dim_v", HEAD_DIMS)
half = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)


@pytest.fixture(autouse=True)
def hopper():
    if gpu_util.arch() != "sm90":
        pytest.skip("gpu: no Hopper")


def served_by(inputs):
    tensors = (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.alibi_slopes, inputs.sinks)
    text = flash_ext.explain(*tensors, **inputs.options)
    return text.split("serves: ", 1)[1].split("\n", 1)[0]


def with_lse(*args, **options):
    with torch.no_grad():
        return attention(*args, **options, return_lse=True)


def inputs_with(head_dim, head_dim_v, seqlen_q, seqlen_k=None, batch=2, heads=(4, 2), dtype=BF16):
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    q = randn(batch, seqlen_q, heads[0], head_dim, dtype=dtype, seed=1)
    k = randn(batch, seqlen_k, heads[1], head_dim, dtype=dtype, seed=2)
    v = randn(batch, seqlen_k, heads[1], head_dim_v, dtype=dtype, seed=3)
    return q, k, v


# ---- what it serves ------------------------------------------------------------------------------

SERVED = {
    "plain": Case(),
    "causal": Case(causal=True),
    "window": Case(window=(9, 2)),
    "softcap": Case(softcap=5.0),
    "sinks": Case(sinks="some"),
    "varlen": Case(layout="varlen"),
    "seqused": Case(seqused_k=(70, 3)),
    "deterministic": Case(deterministic=True),
}
LEFT = {
    "bias": Case(bias="bhqk"),
    "bool mask": Case(bias="bhqk", bias_dtype=torch.bool),
    "alibi": Case(alibi="h"),
    "dropout": Case(dropout_p=0.3),
}


@half
@dims
@pytest.mark.parametrize("name", [*SERVED, *LEFT])
def test_who_serves(name, head_dim, head_dim_v, dtype):
    case = {**SERVED, **LEFT}[name]
    fields = {"head_dim": head_dim, "head_dim_v": head_dim_v, "dtype": dtype}
    inputs = make_inputs(Case(**{**case.__dict__, **fields}), "cuda")
    assert served_by(inputs).startswith("sm90_wgmma_fwd_") == (name in SERVED)
    check_inputs(inputs, name)


@pytest.mark.parametrize("head_dim, head_dim_v", [(1, 1), (40, 8), (72, 64), (100, 256), (256, 3)])
def test_head_dims_between_the_compiled_ones(head_dim, head_dim_v):
    inputs = inputs_of(*inputs_with(head_dim, head_dim_v, 150), causal=True)
    assert served_by(inputs).startswith("sm90_wgmma_fwd_")
    check_inputs(inputs, "between")


# ---- tile edges ----------------------------------------------------------------------------------

# (rows, keys): around 64 rows (a consumer), 128 and 192 (a tile), and around 64, 80, 96, 112, 128,
# 144, 160 and 176 keys (a step).
SIZES = [
    *[(1, 1), (63, 129), (64, 64), (65, 63), (127, 128), (128, 127), (129, 65), (191, 79)],
    *[(192, 192), (193, 80), (257, 81), (385, 95), (64, 96), (128, 97), (192, 111), (70, 112)],
    *[(130, 113), (200, 143), (128, 144), (65, 145), (192, 159), (64, 160), (129, 161), (193, 175)],
    *[(128, 176), (64, 177), (1, 257), (257, 1), (385, 385)],
]


@dims
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 5)}], ids=str)
def test_sizes_around_every_tile_edge(head_dim, head_dim_v, options):
    q, k, v = inputs_with(head_dim, head_dim_v, 385, batch=1, heads=(2, 1))
    for rows, keys in SIZES:
        label = f"{rows} rows, {keys} keys"
        check_inputs(inputs_of(q[:, :rows], k[:, :keys], v[:, :keys], **options), label)


@dims
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_in_tiles_that_a_row_block_does_not_see(head_dim, head_dim_v, poison):
    """Tiles of 128 rows that see none of the keys that are not finite keep their bits."""
    q, k, v = inputs_with(head_dim, head_dim_v, 400, batch=1, heads=(2, 2))
    expected = with_lse(q, k, v, causal=True)
    for first in (64, 80, 128, 192, 256):
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, first:], bad_v[:, first:] = poison, poison
        tile = first // 128 * 128
        out, lse = with_lse(q, bad_k, bad_v, causal=True)
        assert same_bits(out[:, :tile], expected[0][:, :tile])
        assert same_bits(lse[..., :tile], expected[1][..., :tile])
    # Of a window, left of what a tile of rows sees.
    window = {"window": (100, 0)}
    expected = with_lse(q, k, v, **window)
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[:, :90], bad_v[:, :90] = poison, poison
    out, lse = with_lse(q, bad_k, bad_v, **window)
    assert same_bits(out[:, 256:], expected[0][:, 256:])
    assert same_bits(lse[..., 256:], expected[1][..., 256:])


@dims
def test_poison_behind_packed_and_used_lengths(head_dim, head_dim_v):
    """The next sequence's rows lie in the last tile of each one."""
    q, k, v = (x[0] for x in inputs_with(head_dim, head_dim_v, 700, batch=1))
    ends = int32(0, 3, 190, 255, 501, 700)
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True}
    expected = with_lse(q, k, v, **options)
    for x in (k, v):
        x[190:255] = math.nan
    out, lse = with_lse(q, k, v, **options)
    clean = torch.ones(700, dtype=torch.bool, device="cuda")
    clean[190:255] = False
    assert same_bits(out[clean], expected[0][clean])
    assert same_bits(lse[:, clean], expected[1][:, clean])


# ---- softmax -------------------------------------------------------------------------------------


@half
@dims
@pytest.mark.parametrize("kind", ["rising", "falling", "all negative", "one far above"])
def test_references_that_move(kind, head_dim, head_dim_v, dtype):
    """The maximum of a row grows by more or less than the threshold, in every order."""
    n = 700
    q, k, v = inputs_with(head_dim, head_dim_v, n, batch=1, dtype=dtype)
    ramp = torch.linspace(0.1, 6, n, device="cuda")[None, :, None, None]
    if kind == "rising":
        k = (k * ramp).to(dtype)
    elif kind == "falling":
        k = (k * ramp.flip(1)).to(dtype)
    elif kind == "all negative":
        q, k = -(q.abs()), k.abs() * 0.5
    else:
        k[:, 77] = 30 * q[:, 5, :2]
    check_inputs(inputs_of(q, k, v), kind)
    check_inputs(inputs_of(q, k, v, causal=True), kind)


@dims
@pytest.mark.parametrize("softmax_scale", [0.0, -0.3, 1e-6, 3.0])
def test_scales_of_every_sign(head_dim, head_dim_v, softmax_scale):
    q, k, v = inputs_with(head_dim, head_dim_v, 200)
    check_inputs(inputs_of(q, k, v, softmax_scale=softmax_scale, causal=True), "scale")
    check_inputs(inputs_of(q, k, v, softmax_scale=softmax_scale, softcap=3.0), "scale, softcap")


@dims
def test_a_sink_without_keys(head_dim, head_dim_v):
    q, k, v = inputs_with(head_dim, head_dim_v, 70, 0)
    sinks = torch.tensor([0.5, -3.0, 2.0, -math.inf], device="cuda")
    out, lse = with_lse(q, k, v, sinks=sinks)
    assert out.eq(0).all() and same_bits(lse, sinks[None, :, None].expand(2, 4, 70).contiguous())


# ---- schedule ------------------------------------------------------------------------------------


@dims
def test_many_tiles_of_unlike_length(head_dim, head_dim_v):
    """More tiles than multiprocessors, in packed sequences; each is as its own dense call, whose
    tiles may have another shape."""
    generator = torch.Generator().manual_seed(8)
    lengths = torch.randint(0, 700, (40,), generator=generator).tolist()
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    total = ends[-1]
    q, k, v = (x[0] for x in inputs_with(head_dim, head_dim_v, total, batch=1, heads=(8, 2)))
    cu = int32(*ends)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 700, "max_seqlen_k": 700}
    packed = with_lse(q, k, v, **options, causal=True)
    for begin, end in itertools.pairwise(ends):
        if begin == end:
            continue
        out, lse = with_lse(*(x[None, begin:end] for x in (q, k, v)), causal=True)
        assert_close_results((packed[0][begin:end], packed[1][:, begin:end]), (out[0], lse[0]))


@dims
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 0)}], ids=str)
def test_batches_equal_single_calls(head_dim, head_dim_v, options):
    """Several tiles a multiprocessor, of several heads: every row is some tile's, once."""
    q, k, v = inputs_with(head_dim, head_dim_v, 900, batch=9, heads=(16, 4))
    out, lse = with_lse(q, k, v, **options)
    for b in range(9):
        part = with_lse(*(x[b : b + 1] for x in (q, k, v)), **options)
        assert same_bits(out[b : b + 1], part[0]) and same_bits(lse[b : b + 1], part[1])
    check_inputs(inputs_of(q[:1], k[:1], v[:1], **options), "schedule")


@dims
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_bits_50_times_under_load(head_dim, head_dim_v, causal):
    q, k, v = inputs_with(head_dim, head_dim_v, 1500, batch=2, heads=(8, 4))
    expected = with_lse(q, k, v, causal=causal)
    other, load = torch.cuda.Stream(), randn(2048, 2048)
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(other):
            load @ load
        out, lse = with_lse(q, k, v, causal=causal)
        wrong += (out != expected[0]).sum() + (lse != expected[1]).sum()
    assert torch.isfinite(expected[0]).all() and wrong.item() == 0


# ---- tensor maps ---------------------------------------------------------------------------------


@dims
def test_strides(head_dim, head_dim_v):
    """Padded rows, heads before rows, broadcast batch and heads, dimensions of one element."""
    q, k, v = inputs_with(head_dim, head_dim_v, 150)
    expected = with_lse(q, k, v, causal=True)

    def padded(x):
        wide = x.new_full((x.shape[0], x.shape[1] + 3, x.shape[2] + 1, x.shape[3] + 8), math.nan)
        wide[:, 1:-2, :-1, :-8] = x
        return wide[:, 1:-2, :-1, :-8]

    def heads_first(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def odd(x):  # rows at no multiple of 16 bytes are copied
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 1), math.nan)
        wide[..., :-1] = x
        return wide[..., :-1]

    for change in (padded, heads_first, odd):
        got = with_lse(*(change(x) for x in (q, k, v)), causal=True)
        assert same_bits(got[0], expected[0]) and same_bits(got[1], expected[1]), change.__name__
    one = [x[:1, :, :1] for x in (q, k, v)]
    broadcast = with_lse(*(x.expand(3, -1, 5, -1) for x in one))
    alone = with_lse(*one)
    assert same_bits(broadcast[0], alone[0].expand(3, -1, 5, -1).contiguous())
    for b in (0, 2):
        assert same_bits(broadcast[1][b], alone[1][0].expand(5, -1).contiguous())
    single = with_lse(*(x.as_strided((1, 1, 1, x.shape[-1]), (7, 5, 3, 1)) for x in one))
    first = with_lse(*(x[:, :1].contiguous() for x in one))
    assert same_bits(single[0], first[0]) and same_bits(single[1], first[1])


def test_short_queries_over_long_keys():
    """Nine rows, so most rows of a tile do not exist; their stores must not happen."""
    q, k, v = qkv((3, 9, 4, 128), (3, 3000, 2, 128))
    check_inputs(inputs_of(q, k, v, causal=True), "nine rows")
