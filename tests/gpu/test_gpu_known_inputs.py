"""Inputs that broke attention libraries in public, on a GPU; ../known_inputs.md says what each is.

Those that are particular to GPUs have their real size here: index range, launch limits, streams.
Where several numbers share a test they are one kind of input.
"""

import math

import gpu_util
import pytest
import torch
from gpu_util import check_inputs, inputs_of, int32, need_memory, qkv, randn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from util import same_bits

import flash_ext
from flash_ext import attention, reference

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16


def packed(ends_q, ends_k, **more):
    return {"cu_seqlens_q": int32(0, *ends_q), "cu_seqlens_k": int32(0, *ends_k), **more}


def with_lse(*args, **options):
    with torch.no_grad():
        return attention(*args, **options, return_lse=True)


def assert_same_bits(got, expected):
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert same_bits(a, b), f"result {index} differs"


# ---- masks, empty rows, empty sequences ----------------------------------------------------------


def test_R001_sequences_of_one_key():
    q, k, v = qkv((256, 1, 32), (3, 1, 32), FP16, 3, 3)
    options = packed((76, 110, 256), (1, 2, 3), max_seqlen_q=256, max_seqlen_k=3, causal=True)
    result = check_inputs(inputs_of(q, k, v, **options), "R001")
    seeing = torch.zeros(256, dtype=torch.bool, device="cuda")
    seeing[[75, 109, 255]] = True
    assert result.out[~seeing].eq(0).all() and result.out[seeing].ne(0).all()


def test_R002_one_key():
    q, k, v = qkv((1, 1, 1, 16), None, FP16, 3, 3)
    assert torch.equal(attention(q, k, v), v)
    check_inputs(inputs_of(q, k, v), "R002")


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("seqlen, head_dim", [(1, 32), (2, 64), (5, 16), (17, 32), (128, 64)])
def test_R003_large_scores(seqlen, head_dim, dtype):
    q, k, v = qkv((4, seqlen, 4, head_dim), None, dtype, 5, 3)
    check_inputs(inputs_of(q, k, v, causal=seqlen % 2 == 1), "R003")


def test_R004_R005_causal_is_bottom_right():
    q, k, v = qkv((1, 5, 1, 64), (1, 2, 1, 64), FP16)
    out, lse = with_lse(q, k, v, causal=True)
    assert out[:, :3].eq(0).all() and lse[..., :3].isneginf().all()
    assert torch.equal(out[:, 3], v[:, 0])
    q, k, v = qkv((1, 2, 1, 8), (1, 5, 1, 8))
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], device="cuda").bool()[None, None]
    assert_same_bits(with_lse(q, k, v, causal=True), with_lse(q, k, v, mask))


def test_R006_merge_of_empty_parts():
    q, k, v = qkv((1, 5, 2, 16), (1, 2, 2, 16), FP16)
    out, lse = with_lse(q, k, v, causal=True)
    empty = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    nothing, never = flash_ext.merge(*empty, *empty)
    assert nothing.eq(0).all() and never.isneginf().all()
    assert_same_bits(flash_ext.merge(out, lse, *empty), (out, lse))


@pytest.mark.parametrize("head_dim, heads_k", [(64, 1), (128, 4)])
def test_R009_R015_uneven_packed_lengths(head_dim, heads_k):
    q, k, v = qkv((512, 4, head_dim), (1536, heads_k, head_dim))
    options = packed((0, 256, 512), (503, 768, 1536), max_seqlen_q=256, max_seqlen_k=768)
    for causal in (False, True):
        check_inputs(inputs_of(q, k, v, **options, causal=causal), "R009")
    wrong = packed((0, 256, 512), (503, 768, 1537), max_seqlen_q=256, max_seqlen_k=769)
    assert_same_bits(with_lse(q, k, v, **wrong), with_lse(q, k, v, **options))


@pytest.mark.parametrize("head_dim", [128, 192])
@pytest.mark.parametrize("seqlen_q", [1, 64, 256])
def test_R010_no_keys(seqlen_q, head_dim):
    q, k, v = qkv((2, seqlen_q, 4, head_dim), (2, 0, 4, head_dim))
    out, lse = with_lse(q, k, v)
    assert out.eq(0).all() and lse.isneginf().all()


@pytest.mark.parametrize("shape", [(0, 7, 4, 64), (2, 0, 4, 64), (0, 4, 64)])
def test_R011_R012_no_queries(shape):
    q, k, v = qkv(shape, (9, 4, 64) if len(shape) == 3 else (shape[0], 9, 4, 64), FP16)
    options = packed((0, 0), (4, 9)) if q.dim() == 3 else {}
    out, lse = with_lse(q, k, v, **options)
    assert out.shape == q.shape and lse.numel() == 0


def test_R017_rows_past_the_last_sequence():
    q, k, v = qkv((256, 16, 80))
    for x in (q, k, v):
        x[128:] = math.nan
    options = packed([128], [128])
    out, lse = with_lse(q, k, v, **options)
    assert out[128:].eq(0).all() and lse[:, 128:].isneginf().all()
    short = with_lse(q[:128], k[:128], v[:128], **options)
    assert_same_bits((out[:128], lse[:, :128]), short)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["left of the window", "causal, rows cut", "past seqused_k"])
@pytest.mark.parametrize("head_dim", [32, 128, 256])
def test_R018_R019_poison_where_no_row_looks(head_dim, kind, poison):
    q, k, v = qkv((2, 40, 4, head_dim), (2, 1024, 2, head_dim), FP16)
    where, options = {
        "left of the window": (slice(0, 256), {"window": (200, -1)}),
        "causal, rows cut": (slice(800, 1024), {"window": (-1, 0), "seqused_k": int32(200, 40)}),
        "past seqused_k": (slice(130, 1024), {"seqused_k": int32(130, 17)}),
    }[kind]
    expected = with_lse(q, k, v, **options)
    k[:, where], v[:, where] = poison, poison
    if kind == "past seqused_k":  # inside a tile that rows see
        k[1, 17:], v[1, 17:] = poison, poison
    assert_same_bits(with_lse(q, k, v, **options), expected)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_R023_R024_rows_of_lowest_and_of_false(dtype):
    q, k, v = qkv((2, 50, 3, 64), (2, 441, 3, 64), dtype)
    bias = torch.zeros(2, 1, 50, 441, dtype=dtype, device="cuda")
    bias[..., :128] = torch.finfo(dtype).min
    bias[:, :, 7] = torch.finfo(dtype).min
    check_inputs(inputs_of(q, k, v, bias), "R023")
    mask = randn(2, 1, 50, 441, dtype=torch.float32, seed=5) < 0
    mask[:, :, 0] = False
    out, lse = with_lse(q, k, v, mask)
    assert out[:, 0].eq(0).all() and lse[..., 0].isneginf().all()
    check_inputs(inputs_of(q, k, v, mask), "R024")


def test_R025_windows_that_hide_nothing():
    n = 256
    q, k, v = qkv((1, n, 2, 128), None, FP16)
    causal, plain = with_lse(q, k, v, causal=True), with_lse(q, k, v)
    for window in ((-1, 0), (n, 0), (n - 1, 0)):
        assert_same_bits(with_lse(q, k, v, window=window), causal)
        assert_same_bits(with_lse(q, k, v, causal=True, window=window), causal)
    for window in ((-1, n - 1), (n - 1, -1), (n - 1, n - 1), (10**6, 10**6)):
        assert_same_bits(with_lse(q, k, v, window=window), plain)


def test_R028_negative_windows():
    q, k, v = qkv((1, 8, 1, 16))
    with pytest.raises(ValueError, match="window"):
        attention(q, k, v, window=(-2, 0))


# ---- layout --------------------------------------------------------------------------------------


def test_R034_expanded_keys():
    q, k, v = qkv((2, 20, 6, 32), (2, 24, 1, 32))
    expanded = with_lse(q, k.expand(-1, -1, 6, -1), v.expand(-1, -1, 6, -1))
    repeated = with_lse(q, k.repeat(1, 1, 6, 1), v.repeat(1, 1, 6, 1))
    gpu_util.assert_close_results(expanded, repeated)  # the strides may choose the kernel
    gpu_util.assert_close_results(expanded, with_lse(q, k, v))


def test_R076_slopes_of_any_dtype_and_shape():
    q, k, v = qkv((2, 9, 4, 32), (2, 14, 4, 32), FP16)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda")
    expected = with_lse(q, k, v, alibi_slopes=slopes)
    for other in (slopes.half(), slopes.bfloat16(), slopes.double(), slopes.half().expand(2, 4)):
        assert_same_bits(with_lse(q, k, v, alibi_slopes=other), expected)
    check_inputs(inputs_of(q, k, v, alibi_slopes=slopes, causal=True), "R076")  # lse too: R077


def test_R060_softcap_is_honoured():
    q, k, v = qkv((1, 40, 2, 32), None, FP16, 5, 3)
    assert (attention(q, k, v, softcap=15.0) - attention(q, k, v)).abs().max() > 0.05
    for softcap in (15.0, 30.0, 50.0):  # R078
        check_inputs(inputs_of(q, k, v, softcap=softcap), "R060")


@pytest.mark.parametrize("dim", [8, 16, 40, 59, 72, 80, 96, 111, 120, 160, 192, 224, 256])
def test_R054_R099_head_dims_that_kernels_pad(dim):
    check_inputs(inputs_of(*qkv((2, 260, 2, dim)), causal=True), f"head_dim {dim}")


# ---- index range and launch limits ---------------------------------------------------------------


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize(
    "shape, strides",
    [((34, 2, 1, 8), (2**26, 8, 8, 1)), ((1, 40, 1, 8), (8, 2**26, 8, 1)),
     ((1, 2, 40, 8), (8, 8, 2**26, 1))],
)  # fmt: skip
def test_R043_R049_strides_past_2_31(which, shape, strides):
    """Batch, row and head strides whose products pass 2^31 elements."""
    need_memory(8)
    inputs = dict(zip("qkv", qkv(shape), strict=True))
    expected = with_lse(*inputs.values())
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    far = torch.empty(extent, dtype=BF16, device="cuda").as_strided(shape, strides)
    inputs[which] = far.copy_(inputs[which])
    assert_same_bits(with_lse(*inputs.values()), expected)


def test_R043_query_of_more_than_2_31_elements():
    """2^20 + 128 rows of 16 heads of 128: the last rows equal a short call's."""
    need_memory(14)
    rows, tail = 2**20 + 128, 256
    q = torch.randn(1, rows, 16, 128, dtype=BF16, device="cuda")
    _, k, v = qkv((1, 1, 16, 128), (1, 64, 16, 128))
    out, lse = with_lse(q, k, v)
    assert q.numel() > 2**31
    for where in (slice(0, tail), slice(rows // 2, rows // 2 + tail), slice(rows - tail, rows)):
        short = with_lse(q[:, where].contiguous(), k, v)
        torch.testing.assert_close(out[:, where], short[0])
        torch.testing.assert_close(lse[:, :, where], short[1])
    del q, out, lse
    torch.cuda.empty_cache()


def test_R043_as_reported():
    """(1600, 16, 729, 72): 1.3e9 elements each."""
    need_memory(14)
    shape = (1600, 729, 16, 72)
    q, k, v = (torch.randn(shape, dtype=BF16, device="cuda") for _ in range(3))
    out, lse = with_lse(q, k, v)
    for b in (0, 799, 1599):
        part = with_lse(*(x[b : b + 1].contiguous() for x in (q, k, v)))
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), part)
    del q, k, v, out, lse
    torch.cuda.empty_cache()


def test_R044_batch_of_768_and_350000_keys():
    q, k, v = qkv((768, 128, 2, 64), None, FP16)
    out = attention(q, k, v)
    for b in (0, 400, 767):
        torch.testing.assert_close(out[b : b + 1], attention(*(x[b : b + 1] for x in (q, k, v))))
    check_inputs(inputs_of(*qkv((1, 5, 1, 16), (1, 350_000, 1, 16))), "R044")


def test_R045_ten_thousand_short_sequences():
    """The same 50 sequences of 0 to 7 rows, 200 times over."""
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(0, 8, (2, 50), generator=generator, dtype=torch.int32)
    (total_q, total_k), repeats = lengths.sum(1).tolist(), 200
    few = qkv((total_q, 2, 16), (total_k, 1, 16))

    def options(times):
        ends = lengths.repeat(1, times).cumsum(1).tolist()
        return packed(*ends, max_seqlen_q=7, max_seqlen_k=7, causal=True)

    check_inputs(inputs_of(*few, **options(1)), "R045")
    out, lse = with_lse(*few, **options(1))
    many = with_lse(*(x.repeat(repeats, 1, 1) for x in few), **options(repeats))
    assert_same_bits(many, (out.repeat(repeats, 1, 1), lse.repeat(1, repeats)))


@pytest.mark.parametrize("seqlen", [2**22 - 128, 2**22, 2**22 + 64, 2**24 + 64])
def test_R046_keys_past_2_31_elements(seqlen):
    """Causal; 2^24 + 64 keys of 128 are more than 2^31 elements. Some keys outweigh all others."""
    need_memory(20)
    rows, heads, head_dim = (2048, 8, 128) if seqlen < 2**23 else (128, 2, 128)
    q = torch.randn(1, rows, heads, head_dim, dtype=BF16, device="cuda")
    k, v = (torch.zeros(1, seqlen, 1, head_dim, dtype=BF16, device="cuda") for _ in range(2))
    v[:] = randn(1, 1, 1, head_dim, seed=9)
    chosen = [0, rows // 2, rows - 1]
    places = [5, seqlen // 2 + 1, seqlen - rows - 1]
    for row, place in zip(chosen, places, strict=True):
        k[0, place, 0] = q[0, row, 0]
        v[0, place, 0] = randn(head_dim, seed=row)
    out, lse = with_lse(q, k, v, causal=True, softmax_scale=1.0)
    at = torch.tensor(places, device="cuda")
    for row in chosen:
        # The other keys have score 0 and one v: their sum is closed form.
        s = q[0, row].double() @ k[0, at, 0].double().T  # (heads, chosen keys)
        others = float(row + seqlen - rows + 1 - len(places))
        expected_lse = torch.logaddexp(
            s.logsumexp(-1), torch.tensor(others, device="cuda").double().log()
        )
        p = (s - expected_lse[:, None]).exp()
        rest = (1 - p.sum(-1, keepdim=True)) * v[0, 1, 0].double()
        expected = p @ v[0, at, 0].double() + rest
        torch.testing.assert_close(lse[0, :, row].double(), expected_lse, rtol=1e-5, atol=1e-3)
        # Head 0's key outweighs all others. Elsewhere millions of tiny weights add up, which float
        # accumulators lose a part of, on any backend.
        torch.testing.assert_close(out[0, row, 0].double(), expected[0], rtol=2e-2, atol=2e-2)
    del k, v
    torch.cuda.empty_cache()


def test_R047_probabilities_too_large_to_return():
    q, k, v = (torch.zeros(1, 50_000, 1, 128, dtype=FP16, device="cuda") for _ in range(3))
    with pytest.raises(ValueError, match="return_attn_probs"):
        flash_ext.flash_attn_func(q, k, v, dropout_p=0.1, return_attn_probs=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_R050_mask_rows_past_2_32(dtype):
    """A bias whose row stride times rows, and head stride, pass 2^32 elements' worth of bytes."""
    need_memory(24)
    q, k, v = qkv((1, 40, 2, 16), (1, 64, 2, 16))
    mask = randn(1, 2, 40, 64, dtype=torch.float32, seed=7) < 0
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape, device="cuda").masked_fill(~mask, -math.inf)
    strides = (128, 64, 2**27, 1)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(mask.shape, strides, strict=True))
    far = torch.empty(extent, dtype=dtype, device="cuda").as_strided(mask.shape, strides)
    far.copy_(mask)
    assert_same_bits(with_lse(q, k, v, far), with_lse(q, k, v, mask))
    del far
    torch.cuda.empty_cache()


def test_R050_more_rows_than_65536():
    """Rows past place 2^32 of the score matrix equal those of a short call."""
    q, k, v = qkv((1, 70_000, 1, 64))
    out, lse = with_lse(q, k, v, window=(20, 0))
    short = with_lse(*(x[:, -100:] for x in (q, k, v)), window=(20, 0))
    torch.testing.assert_close(out[:, -50:], short[0][:, -50:], rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse[..., -50:], short[1][..., -50:], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "shape", [(70_000, 2, 1, 8), (1, 2, 70_000, 8), (65_536, 4, 8, 64), (100_000, 10, 1, 16)]
)
def test_R052_batch_times_heads_past_65535(shape):
    q, k, v = qkv(shape, None, FP16)
    out = attention(q, k, v)
    for b in {0, shape[0] // 2, shape[0] - 1}:
        expected = reference.attention(*(x[b : b + 1, :, -4:] for x in (q, k, v)))[0]
        torch.testing.assert_close(out[b : b + 1, :, -4:].double(), expected, rtol=4e-3, atol=4e-3)
    with sdpa_kernel(SDPBackend.MATH):
        part = [x[-2000:, :, -64:].transpose(1, 2).float() for x in (q, k, v)]
        expected = scaled_dot_product_attention(*part).transpose(1, 2)
    torch.testing.assert_close(out[-2000:, :, -64:].float(), expected, rtol=4e-3, atol=4e-3)


# ---- repeats, dtypes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, options",
    [
        ((2, 1024, 12, 64), {}),
        ((1, 2048, 4, 128), {"causal": True}),
        ((1, 1024, 4, 256), {"window": (100, 0)}),
        ((1, 500, 4, 192), {"softcap": 20.0, "dropout_p": 0.1}),
    ],
    ids=str,
)
def test_R080_R081_the_same_bits_50_times_under_load(shape, options):
    """A second stream keeps the GPU busy meanwhile."""
    q, k, v = qkv(shape, (*shape[:2], 2, shape[3]), FP16)
    if "dropout_p" in options:
        options = {**options, "rng_state": torch.tensor([1, 2], device="cuda")}
    if not gpu_util.declared(inputs_of(q, k, v, **options)):
        pytest.skip("gpu: no kernel for this")
    expected = with_lse(q, k, v, **options)
    other, load = torch.cuda.Stream(), randn(2048, 2048)
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(other):
            load @ load
        out, lse = with_lse(q, k, v, **options)
        wrong += (out != expected[0]).sum() + (lse != expected[1]).sum()
    assert torch.isfinite(expected[0]).all()
    assert wrong.item() == 0


def test_R084_mixed_dtypes():
    q, k, v = qkv((1, 8, 2, 32), None, torch.float32)
    with pytest.raises((RuntimeError, ValueError), match="float32"):
        attention(q, k, v)
    with pytest.raises(ValueError, match=r"(?i)bfloat16"):
        attention(q, k, v.bfloat16())
    with torch.autocast("cuda", torch.bfloat16):
        out = attention(q, k, v.bfloat16())
    assert_same_bits([out], [attention(q.bfloat16(), k.bfloat16(), v.bfloat16())])
