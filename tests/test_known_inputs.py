"""Inputs that broke attention libraries in public; known_inputs.md says what each is.

The number in a test's name is the row there. Every case runs with uninitialised memory reading as
NaN, so that a result nobody wrote cannot pass. Masks, layouts, index range and splits are here,
what concerns autograd, compilers and signatures in test_known_inputs_torch.py.
"""

import inspect
import math
import re
from pathlib import Path

import pytest
import torch
import util
from torch.nn.functional import scaled_dot_product_attention

import flash_ext
from flash_ext import attention


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    """What torch does in its deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


# What the reference helpers expect to find among the options.
DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(attention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "return_lse"
}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def randn(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=generator(seed)) * scale).to(dtype)


def packed(ends_q, ends_k, **more):
    """Options of packed sequences with these ends."""
    return {"cu_seqlens_q": int32(0, *ends_q), "cu_seqlens_k": int32(0, *ends_k), **more}


def dense(shape_q, shape_k=None, dtype=torch.float32, scale_q=1.0, scale_k=1.0):
    """q, k, v that require grad; shape_k None: as q."""
    shape_k = shape_q if shape_k is None else shape_k
    q = randn(*shape_q, dtype=dtype, seed=1, scale=scale_q)
    k = randn(*shape_k, dtype=dtype, seed=2, scale=scale_k)
    v = randn(*shape_k, dtype=dtype, seed=3, scale=scale_k)
    return [x.requires_grad_() for x in (q, k, v)]


def run(q, k, v, dout=None, dlse=None, **options):
    """out, lse and the gradients of q, k, v (None where it does not require grad)."""
    out, lse = attention(q, k, v, return_lse=True, **options)
    leaves = [x for x in (q, k, v) if x.requires_grad]
    if not leaves:
        return out, lse
    results, incoming = [out], [torch.ones_like(out) if dout is None else dout]
    if dlse is not None:
        results, incoming = [out, lse], [*incoming, dlse]
    return out, lse, *torch.autograd.grad(results, leaves, incoming)


def assert_close(
    q, k, v, bias=None, alibi_slopes=None, sinks=None, dout=None, dlse=None, seed=4, **options
):
    """out, lse and every gradient against the reference; dout and dlse are random when None."""
    with torch.no_grad():
        lse = attention(q, k, v, bias, alibi_slopes, sinks, **options, return_lse=True)[1]
    dout_shape = (*q.shape[:-1], v.shape[-1])
    inputs = util.Inputs(
        *(q, k, v, bias, alibi_slopes, sinks),
        options={**DEFAULTS, **options},
        dout=randn(*dout_shape, dtype=q.dtype, seed=seed) if dout is None else dout,
        dlse=randn(*lse.shape, dtype=lse.dtype, seed=seed + 1) if dlse is None else dlse,
    )
    exact, rounded = util.run_reference_inputs(inputs)
    result = util.run_inputs(inputs)
    util.assert_close_to_reference(result, exact, rounded, inputs, f"seed {seed}")


def assert_same_bits(got, expected):
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), f"result {index} differs"


def untouched(shape, strides, dtype):
    """A tensor spread over so much virtual memory that only the touched pages may exist."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    storage = torch.UntypedStorage(extent * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)


def test_the_table_names_the_tests():
    here = Path(__file__).parent
    files = (*here.glob("test_known_inputs*.py"), *here.glob("integrations/test_*.py"))
    sources = "".join(path.read_text() for path in files)
    rows = (here / "known_inputs.md").read_text().splitlines()
    named = set()
    for number, _, _, tests in (row.split("|")[1:-1] for row in rows if row.startswith("| R")):
        found = set(re.findall(r"`(test_R\w+)`", tests))
        assert found or "waits for: " in tests or "in tests/gpu" in tests, number
        assert all(name.startswith(f"test_{number[1:5]}_") for name in found), number
        named |= found
    assert named == set(re.findall(r"^def (test_R\w+)", sources, re.MULTILINE))


# ---- masks, empty rows, empty sequences ----------------------------------------------------------


def test_R001_sequences_of_one_key():
    q, k, v = dense((256, 1, 32), (3, 1, 32), torch.float16, 3, 3)
    options = packed((76, 110, 256), (1, 2, 3), max_seqlen_q=256, max_seqlen_k=3, causal=True)
    out, _, dq, _, _ = run(q, k, v, **options)
    for last in (75, 109, 255):  # only a sequence's last row sees the key
        assert out[last].ne(0).all()
    seeing = torch.zeros(256).bool()
    seeing[[75, 109, 255]] = True
    assert out[~seeing].eq(0).all() and dq.eq(0).all()
    assert_close(q, k, v, **options)


def test_R002_one_key():
    torch.manual_seed(352)
    q, k, v = (torch.randn(1, 1, 1, 16).mul(3).half().requires_grad_() for _ in range(3))
    out, _, dq, dk, dv = run(q, k, v)
    assert torch.equal(out, v)
    assert dq.eq(0).all() and dk.eq(0).all() and dv.eq(1).all()


@pytest.mark.parametrize(
    "seqlen, head_dim, causal, dtype",
    [
        (1, 32, True, torch.float16),
        (2, 64, False, torch.bfloat16),
        (5, 16, True, torch.bfloat16),
        (17, 32, False, torch.float16),
        (128, 64, True, torch.float16),
        (128, 16, False, torch.bfloat16),
    ],
)
def test_R003_large_scores(seqlen, head_dim, causal, dtype):
    q, k, v = dense((4, seqlen, 4, head_dim), None, dtype, 5, 3)
    assert_close(q, k, v, causal=causal)


def test_R004_rows_without_keys():
    q, k, v = dense((1, 5, 1, 64), (1, 2, 1, 64), torch.float16)
    out, lse, dq, _, _ = run(q, k, v, causal=True)
    assert out[:, :3].eq(0).all() and lse[..., :3].isneginf().all() and dq[:, :3].eq(0).all()
    assert torch.equal(out[:, 3], v[:, 0])
    assert_close(*(x.detach().float().requires_grad_() for x in (q, k, v)), causal=True)


def test_R005_causal_is_bottom_right():
    q, k, v = dense((1, 2, 1, 8), (1, 5, 1, 8), torch.float32)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()[None, None]
    torch.testing.assert_close(attention(q, k, v, causal=True), attention(q, k, v, mask))
    assert_close(q, k, v, causal=True)


def test_R006_merge_of_empty_parts():
    q, k, v = dense((1, 5, 2, 16), (1, 2, 2, 16), torch.float16)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    empty = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    nothing, never = flash_ext.merge(*empty, *empty)
    assert nothing.eq(0).all() and never.isneginf().all()
    assert_same_bits(flash_ext.merge(out, lse, *empty), (out, lse))
    assert_same_bits(flash_ext.merge(*empty, out, lse), (out, lse))


@pytest.mark.parametrize("window", [(10, 0), (3, -1)])
def test_R007_masked_splits(window):
    """Four splits of 256 keys: the window leaves some splits none, and with 300 rows some rows."""
    for seqlen_q in (4, 300):
        q, k, v = dense((1, seqlen_q, 2, 16), (1, 256, 2, 16), torch.float32)
        assert_close(q, k, v, window=window, num_splits=4)
    nothing = torch.zeros(1, 1, 300, 256).bool()
    out, lse = attention(q, k, v, nothing, num_splits=4, return_lse=True)
    assert out.eq(0).all() and lse.isneginf().all()


@pytest.mark.parametrize(
    "head_dim, num_heads_k, causal", [(64, 1, True), (128, 4, False), (64, 4, True)]
)
def test_R009_keys_of_an_empty_query_sequence(head_dim, num_heads_k, causal):
    q, k, v = dense((512, 4, head_dim), (1536, num_heads_k, head_dim), torch.bfloat16)
    options = packed((0, 256, 512), (503, 768, 1536), causal=causal, deterministic=causal)
    options |= {"max_seqlen_q": 256, "max_seqlen_k": 768}
    _, _, _, dk, dv = run(q, k, v, **options)
    assert dk[:503].eq(0).all() and dv[:503].eq(0).all()
    assert_close(q, k, v, **options)


@pytest.mark.parametrize("seqlen_q", [1, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [128, 192])
def test_R010_no_keys(seqlen_q, head_dim):
    q, k, v = dense((2, seqlen_q, 4, head_dim), (2, 0, 4, head_dim), torch.bfloat16)
    out, lse, dq, dk, dv = run(q, k, v)
    assert out.eq(0).all() and lse.isneginf().all() and dq.eq(0).all()
    assert dk.shape == k.shape and dv.shape == v.shape


@pytest.mark.parametrize(
    "shape_q, shape_k",
    [((0, 7, 4, 64), (0, 9, 4, 64)), ((2, 0, 4, 64), (2, 9, 4, 64)), ((0, 4, 64), (9, 4, 64))],
)
def test_R011_no_queries(shape_q, shape_k):
    q, k, v = dense(shape_q, shape_k, torch.float16)
    cu_seqlens = packed((0, 0), (4, 9)) if q.dim() == 3 else {}
    out, lse, dq, dk, dv = run(q, k, v, **cu_seqlens)
    assert out.shape == q.shape and lse.numel() == 0 and dq.shape == q.shape
    assert dk.shape == k.shape and dv.shape == v.shape
    assert dk.eq(0).all() and dv.eq(0).all()


@pytest.mark.parametrize("batch, seqlen", [(0, 0), (0, 5), (3, 0)])
def test_R012_zero_size_batches(batch, seqlen):
    q, k, v = dense((batch, seqlen, 2, 16))
    out, lse, *grads = run(q, k, v, causal=True)
    assert out.shape == q.shape and lse.shape == (batch, 2, seqlen)
    assert all(grad.shape == q.shape for grad in grads)


def test_R015_lengths_past_the_rows():
    """The last key length counts one row more than k has."""
    q, k, v = dense((1023, 2, 128), (2044, 2, 128), torch.bfloat16)
    longest = {"max_seqlen_q": 1023, "max_seqlen_k": 2044}
    right, wrong = (packed((0, 0, 1023), (0, 1, end), **longest) for end in (2044, 2045))
    assert_same_bits(run(q, k, v, **wrong), run(q, k, v, **right))
    assert_close(q, k, v, **right)


def test_R017_rows_past_the_last_sequence():
    q, k, v = dense((256, 16, 80), dtype=torch.bfloat16)
    with torch.no_grad():
        for x in (q, k, v):
            x[128:] = math.nan
    options = packed([128], [128])
    dout = torch.full(q.shape, math.nan, dtype=torch.bfloat16)
    dout[:128] = randn(128, 16, 80, seed=4)
    out, lse, *grads = run(q, k, v, dout, **options)
    assert out[128:].eq(0).all() and lse[:, 128:].isneginf().all()
    assert all(grad[128:].eq(0).all() for grad in grads)
    short = [x[:128].detach().requires_grad_() for x in (q, k, v)]
    expected = run(*short, dout[:128], **options)
    assert_same_bits((out[:128], lse[:, :128], *(grad[:128] for grad in grads)), expected)
    assert_close(*short, **options)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["left of the window", "causal, rows cut", "past seqused_k"])
def test_R018_poison_where_no_row_looks(kind, poison):
    """Keys past seqused_k, or so far (500) from those that rows see that no tile holds both."""
    q, k, v = dense((2, 40, 4, 32), (2, 1024, 2, 32), torch.float16)
    where, options = {
        "left of the window": (slice(0, 256), {"window": (200, -1)}),
        "causal, rows cut": (slice(800, 1024), {"window": (-1, 0), "seqused_k": int32(200, 40)}),
        "past seqused_k": (slice(130, 1024), {"seqused_k": int32(130, 17)}),
    }[kind]
    expected = run(q, k, v, **options)
    with torch.no_grad():
        k[:, where], v[:, where] = poison, poison
    assert_same_bits(run(q, k, v, **options), expected)


def test_R019_poisoned_rest_of_a_cache():
    q, k, v = dense((2, 3, 1, 64), (2, 3, 1, 64), torch.float16)
    lengths = int32(1, 3)
    with torch.no_grad():
        k[0, 1:], v[0, 1:] = math.nan, math.nan
    assert_close(q, k, v, seqused_k=lengths)
    assert_close(q, k, v, seqused_k=lengths, causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_R023_rows_of_finfo_min(dtype):
    q, k, v = dense((2, 50, 3, 64), (2, 441, 3, 64), dtype)
    bias = torch.zeros(2, 1, 50, 441, dtype=dtype)
    bias[..., :128] = torch.finfo(dtype).min
    bias[:, :, 7] = torch.finfo(dtype).min
    assert_close(q, k, v, bias=bias)
    out, lse = attention(q, k, v, bias, return_lse=True)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


def test_R024_row_of_false():
    q, k, v = dense((2, 6, 2, 32), (2, 9, 2, 32), torch.float16)
    mask = torch.rand(2, 1, 6, 9, generator=generator(5)) < 0.5
    mask[:, :, 0] = False
    out, lse, dq, dk, dv = run(q, k, v, bias=mask)
    assert out[:, 0].eq(0).all() and lse[..., 0].isneginf().all() and dq[:, 0].eq(0).all()
    assert torch.isfinite(dk).all() and torch.isfinite(dv).all()
    assert_close(q, k, v, bias=mask)


def test_R025_windows_that_hide_nothing():
    seqlen = 256
    q, k, v = dense((1, seqlen, 2, 128), dtype=torch.float16)
    causal = run(q, k, v, causal=True)
    for window in ((-1, 0), (seqlen, 0), (seqlen - 1, 0)):
        assert_same_bits(run(q, k, v, window=window), causal)
        assert_same_bits(run(q, k, v, causal=True, window=window), causal)
    plain = run(q, k, v)
    for window in ((-1, seqlen - 1), (seqlen - 1, -1), (seqlen - 1, seqlen - 1), (10**6, 10**6)):
        assert_same_bits(run(q, k, v, window=window), plain)


def test_R026_sliding_window_as_model_configs_count_it():
    """A window of 3 tokens: row i sees keys i - 2, i - 1 and i."""
    q, k, v = dense((1, 8, 1, 16), (1, 8, 1, 16), torch.float32)
    rows, keys = torch.arange(8)[:, None], torch.arange(8)
    mask = (keys <= rows) & (keys > rows - 3)
    expected = attention(q, k, v, mask[None, None])
    for options in ({"window": (2, 0)}, {"window": (2, -1), "causal": True}):
        torch.testing.assert_close(attention(q, k, v, **options), expected)
    assert mask[5].nonzero().flatten().tolist() == [3, 4, 5]


@pytest.mark.parametrize("window", [(-2, 0), (0, -2), (-3, 5), (5, -6)])
def test_R028_negative_windows(window):
    q, k, v = dense((1, 8, 1, 16), (1, 8, 1, 16), torch.float32)
    with pytest.raises(ValueError, match="window"):
        attention(q, k, v, window=window)
    with pytest.raises(ValueError, match="window"):
        flash_ext.flash_attn_func(q, k, v, window_size=window)


# ---- layout and strides --------------------------------------------------------------------------


def strided_douts(*shape):
    """The same values behind several strides."""
    dout = randn(*shape, dtype=torch.float16, seed=4)
    spread = torch.full((shape[0], 2 * shape[1], *shape[2:]), math.nan, dtype=torch.float16)
    spread[:, ::2] = dout
    padded = torch.full((*shape[:-1], shape[-1] + 3), math.nan, dtype=torch.float16)
    padded[..., 1:-2] = dout
    return dout, {
        "transpose": dout.transpose(1, 2).contiguous().transpose(1, 2),
        "every other row": spread[:, ::2],
        "odd offset": padded[..., 1:-2],
        "last dimension strided": dout.transpose(-1, -2).contiguous().transpose(-1, -2),
    }


def test_R029_strided_dout():
    q, k, v = dense((2, 32, 4, 128), (2, 32, 1, 128), torch.float16)
    dout, others = strided_douts(2, 32, 4, 128)
    expected = run(q, k, v, dout, causal=True)
    for name, other in others.items():
        assert torch.equal(other, dout), name
        assert_same_bits(run(q, k, v, other, causal=True), expected)
    ones = torch.ones((), dtype=torch.float16).expand(2, 32, 4, 128)
    assert_same_bits(run(q, k, v, ones), run(q, k, v, ones.contiguous()))


def test_R032_strided_dout_of_packed_sequences():
    q, k, v = dense((40, 4, 64), (40, 2, 64), torch.float16)
    cu_seqlens = packed((13, 40), (20, 40))
    dout, others = strided_douts(40, 4, 64)
    expected = run(q, k, v, dout, **cu_seqlens)
    for other in others.values():
        assert_same_bits(run(q, k, v, other, **cu_seqlens), expected)


def test_R034_expanded_keys():
    q, _, _ = dense((2, 20, 6, 32), (2, 20, 1, 32), torch.float32)
    k, v = (randn(2, 24, 1, 32, seed=seed).requires_grad_() for seed in (2, 3))
    many = [x.detach().repeat(1, 1, 6, 1).requires_grad_() for x in (k, v)]
    expanded = [x.expand(-1, -1, 6, -1) for x in (k, v)]
    out, expected = attention(q, *expanded), attention(q, *many)
    assert torch.equal(out, expected)
    dout = randn(2, 20, 6, 32, seed=4)
    grads = torch.autograd.grad(out, [q, k, v], dout)
    dq, dk, dv = torch.autograd.grad(expected, [q, *many], dout)
    assert torch.equal(grads[0], dq)
    torch.testing.assert_close(grads[1:], (dk.sum(2, keepdim=True), dv.sum(2, keepdim=True)))


# ---- index range ---------------------------------------------------------------------------------


def check_far_strides(which, shape, strides):
    """Inputs spread past 2^31 elements give the bits of contiguous ones."""
    inputs = dict(zip("qkv", dense(shape, dtype=torch.bfloat16), strict=True))
    expected = run(*inputs.values())
    far = untouched(shape, strides, torch.bfloat16)
    inputs[which] = far.copy_(inputs[which].detach()).requires_grad_()
    assert_same_bits(run(*inputs.values()), expected)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_R043_batch_stride_past_2_31(which):
    check_far_strides(which, (34, 2, 1, 8), (2**26, 8, 8, 1))


def test_R044_large_batches_and_long_keys():
    q, k, v = (x.detach() for x in dense((768, 16, 2, 16), dtype=torch.float16))
    out = attention(q, k, v, num_splits=1)
    for b in (0, 1, 400, 767):
        part = (x[b : b + 1] for x in (q, k, v))
        assert torch.equal(out[b : b + 1], attention(*part, num_splits=1))
    q, k, v = (x.detach() for x in dense((1, 5, 1, 16), (1, 350_000, 1, 16), torch.float32))
    assert_close(q, k, v)


def test_R045_ten_thousand_short_sequences():
    """The same 50 sequences of 0 to 7 rows, 200 times over."""
    lengths = torch.randint(0, 8, (2, 50), generator=generator(6), dtype=torch.int32)
    (total_q, total_k), repeats = lengths.sum(1).tolist(), 200
    few = dense((total_q, 2, 16), (total_k, 1, 16), torch.float32)
    many = [x.detach().repeat(repeats, 1, 1).requires_grad_() for x in few]

    def options(times):
        ends = lengths.repeat(1, times).cumsum(1).tolist()
        return packed(*ends, max_seqlen_q=7, max_seqlen_k=7, causal=True)

    assert_close(*few, **options(1))
    out, lse, *grads = run(*few, **options(1))
    expected = [out.repeat(repeats, 1, 1), lse.repeat(1, repeats)]
    expected += [grad.repeat(repeats, 1, 1) for grad in grads]
    assert_same_bits(run(*many, **options(repeats)), expected)


def test_R046_keys_past_2_31_elements():
    """2^24 + 64 keys of 128 in 4 GiB of which the window touches the last 100."""
    seqlen, head_dim = 2**24 + 64, 128
    q = randn(1, 3, 1, head_dim, dtype=torch.bfloat16)
    shape, strides = (1, seqlen, 1, head_dim), (seqlen * head_dim, head_dim, head_dim, 1)
    k, v = (untouched(shape, strides, torch.bfloat16) for _ in range(2))
    for seed, x in enumerate((k, v)):
        x[:, -100:] = randn(1, 100, 1, head_dim, seed=seed)
    got = run(q, k, v, window=(90, 0), num_splits=1)
    assert_same_bits(got, run(q, k[:, -100:], v[:, -100:], window=(90, 0), num_splits=1))


def test_R047_probabilities_too_large_to_return():
    q, k, v = (torch.zeros(1, 50_000, 1, 128, dtype=torch.float16) for _ in range(3))
    with pytest.raises(ValueError, match="return_attn_probs"):
        flash_ext.flash_attn_func(q, k, v, dropout_p=0.1, return_attn_probs=True)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_R049_row_stride_past_2_31(which):
    check_far_strides(which, (1, 40, 1, 8), (8, 2**26, 8, 1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_R050_mask_rows_past_2_32(dtype):
    q, k, v = dense((1, 40, 2, 16), (1, 64, 2, 16), torch.float32)
    mask = torch.rand(1, 2, 40, 64, generator=generator(7)) < 0.5
    mask = mask if dtype == torch.bool else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    far = untouched(mask.shape, (128, 64, 2**27, 1), dtype).copy_(mask)
    assert_same_bits(run(q, k, v, bias=far), run(q, k, v, bias=mask))


def test_R050_more_rows_than_65536():
    """Rows past place 2^32 of the score matrix equal the last rows of a short sequence."""
    seqlen, tail = 70_000, 100
    q, k, v = dense((1, seqlen, 1, 8), (1, seqlen, 1, 8), torch.float32)
    dout = torch.zeros(1, seqlen, 1, 8)
    dout[:, -50:] = 1
    got = run(q, k, v, dout, window=(20, 0))
    short = [x[:, -tail:].detach().requires_grad_() for x in (q, k, v)]
    expected = run(*short, dout[:, -tail:], window=(20, 0))
    for index, (long_, short_) in enumerate(zip(got, expected, strict=True)):
        last = (..., slice(-50, None)) if index == 1 else (slice(None), slice(-50, None))
        torch.testing.assert_close(long_[last], short_[last], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(70_000, 2, 1, 8), (1, 2, 70_000, 8)])
def test_R052_more_than_65535_blocks(shape):
    q, k, v = dense(shape, shape, torch.float16)
    out, _, *grads = run(q, k, v)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in wide)).transpose(1, 2)
    torch.testing.assert_close(out.float(), expected, rtol=4e-3, atol=4e-3)
    expected = torch.autograd.grad(expected, wide, torch.ones_like(expected))
    torch.testing.assert_close([grad.float() for grad in grads], list(expected), rtol=0, atol=8e-3)


@pytest.mark.parametrize("head_dim", [8, 16])
def test_R054_small_head_dims(head_dim):
    assert_close(*dense((2, 260, 2, head_dim), dtype=torch.bfloat16), causal=True)


# ---- arguments that were ignored, splits ---------------------------------------------------------


def test_R060_softcap_is_honoured():
    q, k, v = dense((1, 40, 2, 32), None, torch.float16, 5, 3)
    capped, plain = (attention(q, k, v, softcap=softcap) for softcap in (15.0, 0.0))
    assert (capped - plain).abs().max() > 0.05
    assert_close(q, k, v, softcap=15.0)


def test_R062_splits_of_uneven_sequences():
    q, k, v = dense((40, 4, 64), (600, 2, 64), torch.float32)
    options = packed((1, 34, 40), (300, 335, 600))
    whole = attention(q, k, v, causal=True, num_splits=1, return_lse=True, **options)
    split = attention(q, k, v, causal=True, num_splits=3, return_lse=True, **options)
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-5)
