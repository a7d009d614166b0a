"""reference.py against computations that share nothing with it.

PyTorch's own attention, a scalar loop in Python floats, published Philox answers, finite
differences, and the edges: rows without keys, non-finite values that nobody sees. The file is
loaded from its path, because it must work without the compiled library.
"""

import importlib.util
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

PATH = Path(__file__).resolve().parent.parent / "flash_ext" / "reference.py"
SPEC = importlib.util.spec_from_file_location("flash_ext_reference_alone", PATH)
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)

RNG_STATE = torch.tensor([-0x123456789ABCDEF, 0x7766554433221100])


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_qkv(batch, seqlen_q, seqlen_k, num_heads, num_heads_k, head_dim, head_dim_v=None):
    q = randn(batch, seqlen_q, num_heads, head_dim, seed=1)
    k = randn(batch, seqlen_k, num_heads_k, head_dim, seed=2)
    v = randn(batch, seqlen_k, num_heads_k, head_dim_v or head_dim, seed=3)
    return q, k, v


# ---- dropout generator ---------------------------------------------------------------------------

PHILOX_7_ROUNDS = {  # Random123's kat_vectors: counter, key -> words
    "zeros": ([0] * 4, [0] * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    "ones": ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    "pi": (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "4dfccaba 190a87f0 c47362ba b6b5242a",
    ),
}


@pytest.mark.parametrize("name", PHILOX_7_ROUNDS)
def test_philox_known_answers(name):
    counter, key, words = PHILOX_7_ROUNDS[name]
    got = reference.philox4x32_7([torch.tensor(word) for word in counter], key)
    assert " ".join(f"{int(word):08x}" for word in got) == words


def scalar_keep(rng_state, dropout_p, sequence, head, i, j):
    """The keep rule for one entry, in Python integers."""
    seed, offset = (int(x) % 2**64 for x in rng_state)
    z = (offset + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    h = z ^ (z >> 31)
    a, n, t, c = j // 64, (j % 64) // 8, (j % 8) // 2, j % 2
    x = [4 * a + t, i, head ^ (h % 2**32), sequence ^ (h >> 32)]
    key = [seed % 2**32, seed >> 32]
    for _ in range(7):
        first, second = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [
            (second >> 32) ^ x[1] ^ key[0],
            second % 2**32,
            (first >> 32) ^ x[3] ^ key[1],
            first % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    stream = b"".join(word.to_bytes(4, "little") for word in x)
    return stream[2 * n + c] >= math.floor(256 * dropout_p + 0.5)


def test_dropout_keep_is_the_scalar_rule():
    shape = (2, 3, 2, 131)
    got = reference.dropout_keep(RNG_STATE, 0.3, *shape)
    assert got.shape == shape and got.dtype == torch.bool
    for index in itertools.product(*map(range, shape)):
        assert got[index] == scalar_keep(RNG_STATE, 0.3, *index), index


@pytest.mark.parametrize("dropout_p, dropped", [(0.0, 0), (0.001, 0), (0.25, 64), (1.0, 256)])
def test_dropout_rate(dropout_p, dropped):
    keep = reference.dropout_keep(RNG_STATE, dropout_p, 2, 4, 128, 200)
    assert abs((~keep).double().mean().item() - dropped / 256) < 4e-3


def test_dropout_of_everything_and_missing_state():
    q, k, v = make_qkv(1, 3, 5, 2, 2, 4)
    out, lse = reference.attention(q, k, v, dropout_p=1.0, rng_state=RNG_STATE)
    assert out.eq(0).all()
    assert torch.equal(lse, reference.attention(q, k, v)[1])
    with pytest.raises(ValueError, match="rng_state"):
        reference.attention(q, k, v, dropout_p=0.1)


# ---- against torch's attention -------------------------------------------------------------------


def sdpa(q, k, v, **options):
    with sdpa_kernel(SDPBackend.MATH):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def sdpa_cases():
    mask = torch.rand(2, 1, 7, 11, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[..., 0] = True
    return {
        "plain": ((2, 7, 11, 4, 4, 8), {}, {}),
        "causal": ((2, 9, 9, 4, 4, 8), {"causal": True}, {"is_causal": True}),
        "bool mask": ((2, 7, 11, 4, 4, 8), {"bias": mask}, {"attn_mask": mask}),
        "float mask": (
            (2, 7, 11, 4, 4, 8),
            {"bias": randn(1, 4, 7, 11)},
            {"attn_mask": randn(1, 4, 7, 11)},
        ),
        "gqa, scale, head_dim_v": (
            (2, 7, 11, 6, 2, 8, 3),
            {"softmax_scale": 0.7},
            {"scale": 0.7, "enable_gqa": True},
        ),
    }


@pytest.mark.parametrize("name", sdpa_cases())
def test_equals_sdpa_math(name):
    shape, options, sdpa_options = sdpa_cases()[name]
    inputs = [x.requires_grad_() for x in make_qkv(*shape)]
    out, _ = reference.attention(*inputs, **options)
    expected = sdpa(*inputs, **sdpa_options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    dout = randn(*out.shape, seed=9)
    got = torch.autograd.grad(out, inputs, dout)
    torch.testing.assert_close(got, torch.autograd.grad(expected, inputs, dout))


# ---- against a scalar loop -----------------------------------------------------------------------


def scalar_row(q, keys, values, scores_of, sink, kept):
    """out and lse of one row from its visible keys, in Python floats."""
    scores = {j: scores_of(j, sum(a * b for a, b in zip(q, keys[j], strict=True))) for j in kept}
    terms = [*scores.values(), *([sink] if sink is not None else [])]
    if not terms:
        return [0.0] * len(values[0]), -math.inf
    top = max(terms)
    lse = top + math.log(sum(math.exp(s - top) for s in terms))
    weights = {j: math.exp(s - lse) * kept[j] for j, s in scores.items()}
    return [sum(w * values[j][d] for j, w in weights.items()) for d in range(len(values[0]))], lse


def scalar_attention(
    q, k, v, sequence, bias, slopes, sinks, scale, causal, window, softcap, dropout_p
):
    """One sequence, inputs (seqlen, num_heads, head_dim): out and lse."""
    group = q.shape[1] // k.shape[1]
    shift = k.shape[0] - q.shape[0]
    threshold = math.floor(256 * dropout_p + 0.5)
    outs = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lses = torch.zeros(q.shape[1], q.shape[0], dtype=torch.float64)
    for h, i in itertools.product(range(q.shape[1]), range(q.shape[0])):
        kept = {}
        for j in range(k.shape[0]):
            hidden = causal and j > i + shift
            hidden = hidden or (window[0] >= 0 and j < i + shift - window[0])
            hidden = hidden or (window[1] >= 0 and j > i + shift + window[1])
            if hidden or bias[h, i, j] == -math.inf:
                continue
            keep = scalar_keep(RNG_STATE, dropout_p, sequence, h, i, j)
            kept[j] = 256 / (256 - threshold) if keep else 0.0

        def score(j, product, h=h, i=i):
            s = softcap * math.tanh(scale * product / softcap)
            return s + float(bias[h, i, j]) - float(slopes[h]) * abs(i + shift - j)

        keys, values = k[:, h // group].tolist(), v[:, h // group].tolist()
        out, lse = scalar_row(q[i, h].tolist(), keys, values, score, float(sinks[h]), kept)
        outs[i, h], lses[h, i] = torch.tensor(out, dtype=torch.float64), lse
    return outs, lses


EVERYTHING = {"softmax_scale": 0.9, "softcap": 2.0, "dropout_p": 0.2}
MASKS = {
    "causal": {"causal": True},
    "window": {"window_left": 2, "window_right": 1},
    "causal and window": {"causal": True, "window_left": 1, "window_right": 3},
    "rows without keys": {"window_left": 0, "window_right": 0},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_everything_on_equals_a_scalar_loop(layout, mask):
    options = MASKS[mask]
    lengths = [(6, 6), (6, 6)] if layout == "dense" else [(5, 3), (0, 4), (3, 6)]
    q, k, v = make_qkv(1, sum(a for a, _ in lengths), sum(b for _, b in lengths), 4, 2, 3, 2)
    q, k, v = q[0], k[0], v[0]
    bias, slopes = randn(len(lengths), 4, 6, 6, seed=4), randn(len(lengths), 4, seed=5).abs()
    bias[:, :, 1, 2], sinks = -math.inf, randn(4, seed=6)
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32)
        for n in zip(*lengths, strict=True)
    )
    common = {**EVERYTHING, **options, "rng_state": RNG_STATE}
    if layout == "dense":
        split = [x.unflatten(0, (2, 6)) for x in (q, k, v)]
        out, lse = reference.attention(*split, bias, slopes, sinks, **common)
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    else:
        out, lse = reference.attention(q, k, v, bias, slopes, sinks, cu_q, cu_k, **common)
    window = (options.get("window_left", -1), options.get("window_right", -1))
    for b in range(len(lengths)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        expected = scalar_attention(
            q[rows], k[keys], v[keys], b, bias[b], slopes[b], sinks, 0.9,
            options.get("causal", False), window, 2.0, 0.2,
        )  # fmt: skip
        torch.testing.assert_close((out[rows], lse[:, rows]), expected, rtol=1e-12, atol=1e-12)


# ---- layouts -------------------------------------------------------------------------------------


def test_seqused_equals_slices_and_leaves_the_rest_empty():
    q, k, v = make_qkv(2, 5, 7, 2, 1, 4)
    seqused_q, seqused_k = torch.tensor([3, 5]).int(), torch.tensor([7, 2]).int()
    out, lse = reference.attention(q, k, v, seqused_q=seqused_q, seqused_k=seqused_k, causal=True)
    for b in range(2):
        rows, keys = seqused_q[b], seqused_k[b]
        part = reference.attention(
            q[b : b + 1, :rows], k[b : b + 1, :keys], v[b : b + 1, :keys], causal=True
        )
        assert torch.equal(out[b, :rows], part[0][0]) and torch.equal(lse[b, :, :rows], part[1][0])
        assert out[b, rows:].eq(0).all() and lse[b, :, rows:].isneginf().all()


def test_varlen_lengths_outside_the_tensor_are_clamped():
    q, k, v = (x[0] for x in make_qkv(1, 6, 6, 2, 2, 4))
    good, bad = torch.tensor([0, 2, 6]).int(), torch.tensor([-3, 2, 99]).int()
    expected = reference.attention(q, k, v, cu_seqlens_q=good, cu_seqlens_k=good)
    got = reference.attention(q, k, v, cu_seqlens_q=bad, cu_seqlens_k=bad)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    short = reference.attention(
        q, k, v, cu_seqlens_q=good, cu_seqlens_k=good, max_seqlen_q=3, max_seqlen_k=6
    )
    assert short[0][5].eq(0).all() and short[1][:, 5].isneginf().all()
    assert torch.equal(short[0][:5], expected[0][:5])


def test_pages_equal_the_contiguous_keys():
    q, k, v = make_qkv(2, 3, 10, 4, 2, 4)
    used = torch.tensor([10, 5]).int()
    table = torch.tensor(
        [[4, 0, 2, 5], [1, 3, -7, 99]]
    ).int()  # page size 3: the last two are unused
    pages = [torch.full((6, 3, 2, 4), torch.nan, dtype=torch.float64) for _ in range(2)]
    for page, x in zip(pages, (k, v), strict=True):
        for b, j in itertools.product(range(2), range(10)):
            if j < used[b]:
                page[table[b, j // 3], j % 3] = x[b, j]
    expected = reference.attention(q, k, v, seqused_k=used, causal=True)
    got = reference.attention(q, *pages, page_table=table, seqused_k=used, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("batch, seqlen_q, seqlen_k", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_tensors(batch, seqlen_q, seqlen_k):
    inputs = [x.requires_grad_() for x in make_qkv(batch, seqlen_q, seqlen_k, 2, 1, 4)]
    out, lse = reference.attention(*inputs, alibi_slopes=randn(2), causal=True)
    assert out.shape == (batch, seqlen_q, 2, 4) and lse.shape == (batch, 2, seqlen_q)
    assert out.eq(0).all() and lse.isneginf().all()
    for grad, x in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert grad.shape == x.shape and grad.eq(0).all()


# ---- gradients -----------------------------------------------------------------------------------


def gradcheck_cases():
    cu = torch.tensor([0, 2, 2, 5]).int()
    return {
        "causal, more rows than keys": ({"causal": True}, (1, 4, 3, 2, 1, 2)),
        "window": ({"window_left": 1, "window_right": 1, "softcap": 1.5}, (2, 3, 4, 2, 2, 2)),
        "dropout": ({"dropout_p": 0.4, "rng_state": RNG_STATE}, (1, 3, 5, 2, 1, 3)),
        "varlen": ({"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}, (1, 5, 5, 2, 1, 2)),
    }  # fmt: skip


@pytest.mark.parametrize("name", gradcheck_cases())
def test_gradients_equal_finite_differences(name):
    options, shape = gradcheck_cases()[name]
    q, k, v = make_qkv(*shape)
    if "cu_seqlens_q" in options:
        q, k, v = q[0], k[0], v[0]
    bias = randn(1, 2, shape[1], shape[2], seed=7)
    bias[..., 0, 0] = -1e3  # finite differences across -inf have no meaning
    extras = [bias, randn(2, seed=8).abs(), randn(2, seed=9)]
    inputs = [x.requires_grad_() for x in (q, k, v, *extras)]

    def call(*inputs):
        out, lse = reference.attention(*inputs, **options)
        return out, torch.where(lse.isneginf(), 0, lse)

    assert torch.autograd.gradcheck(call, inputs)


def test_second_derivatives_and_forward_mode():
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 3, 3, 1, 1, 2))
    bias = torch.full((1, 1, 3, 3), -3e38, dtype=torch.float64).requires_grad_()
    with torch.no_grad():
        bias[..., :2] = 0

    def call(*inputs):
        return reference.attention(*inputs, causal=True)

    assert torch.autograd.gradgradcheck(call, (q, k, v, bias))
    tangents = tuple(randn(*x.shape, seed=11) for x in (q, k, v, bias))
    _, (dout, dlse) = torch.func.jvp(call, (q, k, v, bias), tangents)
    cotangents = randn(*dout.shape, seed=12), randn(*dlse.shape, seed=13)
    grads = torch.autograd.grad(call(q, k, v, bias), (q, k, v, bias), cotangents)
    forward = sum((a * b).sum() for a, b in zip((dout, dlse), cotangents, strict=True))
    backward = sum((a * b).sum() for a, b in zip(tangents, grads, strict=True))
    torch.testing.assert_close(forward, backward)


def test_gradients_come_back_in_the_inputs_dtype():
    inputs = [x.bfloat16().requires_grad_() for x in make_qkv(1, 4, 4, 2, 1, 8)]
    for compute_dtype in (torch.float64, torch.float32, torch.bfloat16):
        out, lse = reference.attention(*inputs, compute_dtype=compute_dtype)
        assert out.dtype == compute_dtype
        assert lse.dtype == torch.promote_types(compute_dtype, torch.float32)
        grads = torch.autograd.grad(out.sum() + lse.sum(), inputs)
        assert [grad.dtype for grad in grads] == [torch.bfloat16] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_step_by_step_in_a_dtype_is_near_fp64(dtype):
    inputs = [x.to(dtype) for x in make_qkv(1, 33, 40, 4, 2, 16)]
    exact, exact_lse = reference.attention(*inputs, causal=True)
    rounded, lse = reference.attention(*inputs, causal=True, compute_dtype=dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(rounded.double(), exact, rtol=8 * eps, atol=8 * eps)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=8 * eps, atol=8 * eps)


# ---- edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", [None, 0.5, -math.inf])
def test_rows_without_keys(sink):
    inputs = [x.requires_grad_() for x in make_qkv(1, 5, 2, 2, 1, 4)]
    sinks = None if sink is None else torch.full((2,), sink).double().requires_grad_()
    out, lse = reference.attention(*inputs, sinks=sinks, causal=True)
    assert out[:, :3].eq(0).all()
    assert lse[..., :3].eq(-math.inf if sink is None else sink).all()
    # The gradient of -inf is ignored, whatever it is; that of lse = sink goes to the sink.
    dlse = torch.full_like(lse, math.nan) if sink is None else torch.ones_like(lse)
    dlse[..., 3:] = 0
    leaves = inputs if sink is None else [*inputs, sinks]
    dq, _, _, *dsinks = torch.autograd.grad([out, lse], leaves, [torch.zeros_like(out), dlse])
    assert dq.eq(0).all()
    if sink is not None:
        assert dsinks[0].eq(0.0 if math.isinf(sink) else 3.0).all()


def hiding(kind, key, rows):
    """A mask argument that hides one key from the first rows of (4, 6); None: causal does."""
    bias = torch.ones(1, 1, 4, 6).bool()
    bias[:, :, :rows, key] = False
    if kind == "float":
        bias = torch.zeros(1, 1, 4, 6).double().masked_fill(~bias, -math.inf)
    return bias


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["causal", "bool", "float"])
def test_a_poisoned_key_stays_out_of_the_rows_that_do_not_see_it(kind, poison):
    """Causal, 4 rows on 6 keys: row i sees keys up to i + 2, so rows 2 and 3 see key 4."""
    rows = 2 if kind == "causal" else 3
    options = {"causal": True, "softcap": 3.0}
    if kind != "causal":
        options["bias"] = hiding(kind, 4, rows)
    results = []
    for value in (1.0, poison):
        q, k, v = make_qkv(1, 4, 6, 2, 1, 3)
        k[:, 4], v[:, 4] = value, value
        q.requires_grad_()
        out, lse = reference.attention(q, k, v, **options)
        dq = torch.autograd.grad(out.square().sum() + lse.sum(), q)[0]
        results.append((out[:, :rows], lse[..., :rows], dq[:, :rows]))
        assert torch.isfinite(value + 0 * out[:, rows:]).all() == math.isfinite(value)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["bool", "float", "seqused", "cu_seqlens"])
def test_a_poisoned_key_that_no_row_sees_reaches_nothing(kind, poison):
    options = {
        "bool": {"bias": hiding("bool", 5, 4)},
        "float": {"bias": hiding("float", 5, 4)},
        "seqused": {"seqused_k": torch.tensor([5]).int()},
        "cu_seqlens": {
            "cu_seqlens_q": torch.tensor([0, 4]).int(),
            "cu_seqlens_k": torch.tensor([0, 5]).int(),
        },
    }[kind]
    runs = []
    for value in (1.0, poison):
        q, k, v = make_qkv(1, 4, 6, 2, 1, 3)
        k[:, 5], v[:, 5] = value, value
        if kind == "cu_seqlens":
            q, k, v = q[0], k[0], v[0]
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out, lse = reference.attention(*inputs, softcap=3.0, **options)
        runs.append((out, lse, torch.autograd.grad(out.square().sum() + lse.sum(), inputs)))
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


def test_seen_non_finite_values_are_shown():
    q, k, v = make_qkv(1, 4, 4, 1, 1, 3)
    v[0, 1, 0, 2] = math.nan
    v[0, 2, 0, 0] = math.inf
    v.requires_grad_(), q.requires_grad_()
    out, lse = reference.attention(q, k, v, causal=True)
    expected = torch.zeros(4, 3)
    expected[1:, 2], expected[2:, 0] = math.nan, math.inf
    shown = torch.where(torch.isfinite(out[0, :, 0]), 0, out[0, :, 0].float())
    assert torch.equal(shown.nan_to_num(7, 8), expected.nan_to_num(7, 8))
    assert torch.isfinite(lse).all()
    dq, dv = torch.autograd.grad(out, [q, v], torch.ones_like(out))
    assert torch.isfinite(dv).all()  # dv = p^T dout has no v in it
    assert torch.isfinite(dq[:, 0]).all() and dq[:, 1:].isnan().any(-1).all()
    k[0, 3] = math.nan
    out, lse = reference.attention(q, k, v, causal=True)
    assert lse[..., 3].isnan().all() and out[:, 3].isnan().all()
    assert torch.isfinite(lse[..., :3]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_finfo_min_are_uniform(dtype):
    q, k, v = (x.to(dtype) for x in make_qkv(1, 3, 8, 1, 1, 4))
    bias = torch.full((1, 1, 3, 8), torch.finfo(dtype).min, dtype=dtype)
    for compute_dtype in (torch.float32, dtype):
        out, lse = reference.attention(0 * q, k, v, bias, compute_dtype=compute_dtype)
        mean = v.double().mean(1, keepdim=True).expand(-1, 3, -1, -1).to(out.dtype)
        torch.testing.assert_close(out, mean, rtol=2e-2, atol=2e-2)
        assert torch.isfinite(lse).all()


@pytest.mark.parametrize("level", [1e5, -1e5])
def test_large_equal_scores_are_uniform(level):
    q, k = torch.ones(1, 2, 1, 4), torch.full((1, 6, 1, 4), level / 2)
    v = randn(1, 6, 1, 4, dtype=torch.float32)
    out, lse = reference.attention(q, k, v, compute_dtype=torch.float32)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, level + math.log(6)))


# ---- merge and probabilities ---------------------------------------------------------------------


def test_merge_of_two_halves_is_the_whole():
    q, k, v = make_qkv(2, 5, 9, 4, 2, 4)
    sinks = randn(4)
    whole = reference.attention(q, k, v, sinks=sinks)
    first = reference.attention(q, k[:, :4], v[:, :4], sinks=sinks)
    second = reference.attention(q, k[:, 4:], v[:, 4:])
    torch.testing.assert_close(reference.merge(*first, *second), whole, rtol=1e-12, atol=1e-12)


def test_merge_of_empty_parts():
    out, lse = randn(2, 3, 1, 4).requires_grad_(), randn(2, 1, 3)
    empty, never = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    merged = reference.merge(out, lse, empty, never)
    torch.testing.assert_close(merged, (out, lse))
    assert torch.autograd.grad(merged[0].sum(), out)[0].eq(1).all()
    nothing, lse = reference.merge(empty, never, empty, never)
    assert nothing.eq(0).all() and lse.isneginf().all()


def test_probabilities_with_dropout_signs():
    q, k, v = make_qkv(2, 5, 70, 4, 2, 4)
    options = {"causal": True, "dropout_p": 0.3, "rng_state": RNG_STATE}
    out, lse = reference.attention(q, k, v, **options)
    p = reference.attn_probs(q, k, lse, **options)
    keep = reference.dropout_keep(RNG_STATE, 0.3, 2, 4, 5, 70)
    assert torch.equal(torch.signbit(p), ~keep)
    torch.testing.assert_close(p.abs().sum(-1), torch.ones_like(lse))
    weights = torch.where(keep, p, 0) * 256 / (256 - 77)
    by_hand = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(2, dim=2))
    torch.testing.assert_close(by_hand, out)


def test_varlen_probabilities_are_padded_with_zero():
    q, k, v = (x[0] for x in make_qkv(1, 5, 7, 2, 1, 4))
    cu_q, cu_k = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 6, 7]).int()
    _, lse = reference.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    p = reference.attn_probs(
        q, k, lse, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=3, max_seqlen_k=6
    )
    assert p.shape == (2, 2, 3, 6)
    assert p[0, :, 2].eq(0).all() and p[1, :, :, 1:].eq(0).all()
    torch.testing.assert_close(p[0, :, :2].sum(-1), torch.ones(2, 2).double())
    assert p[1, :, :, 0].eq(1).all()
