"""The backward as a part of GPU programs: order, graphs, recomputation, memory, accuracy.

What it computes is compared with the reference case by case in test_gpu_semantics.py and
test_gpu_known_inputs.py.
"""

import gpu_util
import pytest
import torch
from gpu_util import check_inputs, inputs_of, int32, qkv, randn
from test_gpu_runtime import captured
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from util import ALL_FEATURES, Case, make_inputs, run_inputs, same_bits

from flash_ext import attention, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu_util.rows("backward"), reason="gpu: no kernel has a backward"),
]

BF16, FP16 = torch.bfloat16, torch.float16


def grads(function, leaves, dout):
    leaves = [x.detach().requires_grad_() for x in leaves]
    return torch.autograd.grad(function(*leaves), leaves, dout)


# ---- deterministic -------------------------------------------------------------------------------

DETERMINISTIC = {
    "full": Case(seqlens_q=(700, 700), seqlens_k=(900, 900)),
    "causal": Case(seqlens_q=(900, 900), seqlens_k=(900, 900), causal=True),
    "window": Case(seqlens_q=(900, 900), seqlens_k=(700, 700), window=(100, 30)),
    "packed": Case(layout="varlen", seqlens_q=(300, 0, 700), seqlens_k=(900, 9, 65), causal=True),
    "everything": Case(**ALL_FEATURES),
    "head_dim 256": Case(seqlens_q=(700, 700), seqlens_k=(700, 700), causal=True, head_dim=256),
    "head_dim 64": Case(seqlens_q=(900, 900), seqlens_k=(900, 900), causal=True, head_dim=64),
}


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_the_same_bits_50_times_under_load(name):
    """Another stream keeps some of the multiprocessors busy, so that blocks start in any order."""
    case = Case(**{**vars(DETERMINISTIC[name]), "dtype": BF16, "deterministic": True})
    inputs = make_inputs(case, "cuda")
    first = run_inputs(inputs)
    load, noise = torch.cuda.Stream(), randn(2048, 2048)
    for _ in range(50):
        with torch.cuda.stream(load):
            noise @ noise
        again = run_inputs(inputs)
        for key, x in first.grads.items():
            assert same_bits(x, again.grads[key]), key


def test_both_orders_agree():
    """The deterministic order and the other one add the same numbers."""
    q, k, v = qkv((2, 900, 4, 128), (2, 900, 2, 128))
    dout = randn(2, 900, 4, 128, seed=7)
    plain, ordered = (
        grads(lambda *x, d=d: attention(*x, causal=True, deterministic=d), (q, k, v), dout)
        for d in (False, True)
    )
    for x, y in zip(plain, ordered, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=1e-2)


# ---- graphs, recomputation, compilers ------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_graph_of_forward_and_backward_with_dropout(deterministic):
    """Replayed, each time with a mask of its own, which the backward knows too."""
    options = {"dropout_p": 0.2, "causal": True, "deterministic": deterministic}
    leaves = [x.requires_grad_() for x in qkv((2, 200, 4, 64))]
    dout = randn(2, 200, 4, 64, seed=9)

    def call():
        state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device="cuda")
        out = attention(*leaves, **options, rng_state=state)
        return state, out, *torch.autograd.grad(out, leaves, dout)

    graph, (state, out, *got) = captured(call)
    seen = []
    for _ in range(3):
        graph.replay()
        expected_out = attention(*leaves, **options, rng_state=state)
        expected = torch.autograd.grad(expected_out, leaves, dout)
        torch.cuda.synchronize()
        assert same_bits(out, expected_out)
        for x, y in zip(got, expected, strict=True):
            if deterministic:
                assert same_bits(x, y)
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
        seen.append(got[2].clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_checkpointed(dropout_p):
    """Recomputed in the backward, with the dropout of the forward."""
    q, k, v = qkv((2, 130, 4, 64))
    dout = randn(2, 130, 4, 64, seed=3)

    def attend(*x):
        return attention(*x, dropout_p=dropout_p, deterministic=True)

    torch.manual_seed(5)
    plain = grads(attend, (q, k, v), dout)
    torch.manual_seed(5)
    recomputed = grads(lambda *x: checkpoint(attend, *x, use_reentrant=False), (q, k, v), dout)
    assert all(same_bits(x, y) for x, y in zip(plain, recomputed, strict=True))


def test_compiled():
    q, k, v = qkv((2, 64, 4, 64))
    dout = randn(2, 64, 4, 64, seed=3)

    def attend(*x):
        return attention(*x, causal=True, deterministic=True)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    pairs = zip(grads(attend, (q, k, v), dout), grads(compiled, (q, k, v), dout), strict=True)
    assert all(same_bits(x, y) for x, y in pairs)


@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.2}], ids=str)
def test_opcheck(options):
    q, k, v = (x.requires_grad_() for x in qkv((2, 17, 4, 40), (2, 33, 2, 40)))
    if "dropout_p" in options:
        options = {**options, "rng_state": torch.tensor([3, 4], device="cuda")}
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.flash.attn.default, (q, k, v), options, test_utils=tests)


def test_a_side_stream():
    """Gradients that are asked for on a side stream, of tensors that appear there late."""
    q, k, v = qkv((2, 256, 4, 64))
    dout = randn(2, 256, 4, 64, seed=3)

    def attend(*x):
        return attention(*x, deterministic=True)

    expected = grads(attend, (q, k, v), dout)
    late = [torch.zeros_like(x) for x in (q, k, v)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for x, value in zip(late, (q, k, v), strict=True):
            x.copy_(value)
        got = grads(attend, late, dout)
    stream.synchronize()
    assert all(same_bits(x, y) for x, y in zip(got, expected, strict=True))


# ---- memory --------------------------------------------------------------------------------------


def peak_of(function):
    function()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = function()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak


def test_memory_is_linear_and_only_for_what_is_asked():
    """One fp32 accumulator of dq and a few row values above the gradients; none without dq."""
    q, k, v = qkv((1, 8192, 4, 64))
    size, rows = q.numel(), 4 * 8192
    out, lse = torch.ops.flash.attn(q, k, v)

    def call(*needed):
        return torch.ops.flash.attn_backward(
            out, None, q, k, v, out, lse, *[None] * 12, False, -1, -1, 0.0, 0.0, False, 0,
            [*needed, False, False, False],
        )  # fmt: skip

    slack = 16 * rows + (1 << 20)
    assert peak_of(lambda: call(True, True, True)) <= (3 * 2 + 4) * size + slack
    assert peak_of(lambda: call(False, True, True)) <= 2 * 2 * size + slack
    dq, dk, dv, *others = call(False, True, False)
    assert dq is None and dv is None and others == [None] * 3
    torch.testing.assert_close(dk, call(True, True, True)[1])


def test_large_grids():
    """More heads x sequences than a grid dimension of 65535 would hold."""
    q, k, v = qkv((70000, 3, 1, 16), (70000, 5, 1, 16))
    check_inputs(inputs_of(q[-2:], k[-2:], v[-2:], deterministic=True), "the last two")
    dout = randn(70000, 3, 1, 16, seed=3)
    whole = grads(attention, (q, k, v), dout)
    last = grads(attention, (q[-2:], k[-2:], v[-2:]), dout[-2:])
    for x, y in zip(whole, last, strict=True):
        assert same_bits(x[-2:], y)


def test_gradients_of_more_than_2_to_the_31_elements():
    """Offsets of 64 bits in dq's accumulator, dk and dv."""
    gpu_util.need_memory(40)
    q = torch.zeros(1, 131200, 64, 256, dtype=BF16, device="cuda")
    assert q.numel() > 2**31
    kv = torch.zeros(1, 1, 64, 256, dtype=BF16, device="cuda")
    q[0, -1] = 1
    kv[...] = 0.5
    dout = torch.ones_like(q)
    dq, dk, dv = grads(attention, (q, kv, kv), dout)
    assert (dv == 131200).all() or torch.allclose(dv.float(), torch.full_like(dv.float(), 131200))
    assert torch.isfinite(dq[0, -1]).all() and torch.isfinite(dk).all()


# ---- edges of tiles ------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("seqlen_q", [1, 31, 32, 33, 63, 64, 65, 129])
def test_sizes_around_tile_edges(head_dim, seqlen_q):
    for seqlen_k in (1, 63, 65, 127, 128, 129):
        case = Case(
            seqlens_q=(seqlen_q,) * 2,
            seqlens_k=(seqlen_k,) * 2,
            head_dim=head_dim,
            causal=(seqlen_q + seqlen_k) % 2 == 1,
            dtype=BF16 if seqlen_k % 2 else FP16,
        )
        gpu_util.check(case)


def test_packed_lengths_that_lie():
    """Lengths on the device are clamped, and row values never leave the workspace."""
    q, k, v = qkv((300, 4, 64), (300, 2, 64))
    dout = randn(300, 4, 64, seed=3)
    for values in ((0, 400, 100), (200, 100, 300), (-5, 10**6, 2**31 - 1), (300, 300, 0)):
        cu = int32(*values)
        options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 300, "max_seqlen_k": 300}
        for grad in grads(lambda *x, o=options: attention(*x, **o, causal=True), (q, k, v), dout):
            assert grad.shape[0] == 300
    torch.cuda.synchronize()


# ---- accuracy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_errors_beside_sdpa(head_dim, causal, dtype):
    """semantics.md: against fp64, RMS at most 1.05 times and the largest 1.5 times SDPA's."""
    q, k, v = qkv((2, 1024, 4, head_dim), None, dtype)
    dout = randn(2, 1024, 4, head_dim, dtype=dtype, seed=3)
    wide = [x.double() for x in (q, k, v)]
    exact = grads(lambda *x: reference.attention(*x, causal=causal)[0], wide, dout.double())

    def theirs(*x):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            x = [y.transpose(1, 2) for y in x]
            return scaled_dot_product_attention(*x, is_causal=causal).transpose(1, 2)

    ours = grads(lambda *x: attention(*x, causal=causal), (q, k, v), dout)
    for name, a, b, c in zip("qkv", ours, grads(theirs, (q, k, v), dout), exact, strict=True):
        (rms, most), (their_rms, their_most) = (
            (e.square().mean().sqrt().item(), e.abs().max().item()) for e in (a - c, b - c)
        )
        assert rms <= 1.05 * their_rms, f"d{name}: rms {rms:.3g} against {their_rms:.3g}"
        assert most <= 1.5 * their_most, f"d{name}: max {most:.3g} against {their_most:.3g}"


def test_a_small_model_trains_as_with_sdpa():
    """Fifty steps of one attention block: the losses stay together."""

    def train(attend):
        torch.manual_seed(0)
        block = torch.nn.Linear(64, 3 * 64, device="cuda"), torch.nn.Linear(64, 64, device="cuda")
        parameters = [p for layer in block for p in layer.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=3e-3)
        x = torch.randn(8, 128, 64, device="cuda")
        target = x.cumsum(1).tanh()
        for _ in range(50):
            with torch.autocast("cuda", BF16):
                q, k, v = block[0](x).view(8, 128, 3, 4, 16).unbind(2)
                y = block[1](attend(q, k, v).flatten(2))
            loss = (y.float() - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    def sdpa(q, k, v):
        x = [y.transpose(1, 2) for y in (q, k, v)]
        return scaled_dot_product_attention(*x, is_causal=True).transpose(1, 2)

    ours, theirs = train(lambda q, k, v: attention(q, k, v, causal=True)), train(sdpa)
    assert ours == pytest.approx(theirs, rel=5e-3)
