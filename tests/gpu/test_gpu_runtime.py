"""How kernels live with the rest of a GPU program: streams, graphs, compilers, accuracy."""

import gpu_util
import pytest
import torch
from gpu_util import check_inputs, inputs_of, qkv, randn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from util import Case, make_inputs, same_bits

import flash_ext
from flash_ext import attention, reference

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
SLEEP = 50_000_000  # cycles, tens of milliseconds


# ---- streams and devices -------------------------------------------------------------------------


def test_R040_the_current_stream_is_used():
    """The inputs appear on a side stream only after a while; nobody waits for the default one."""
    q, k, v = qkv((2, 256, 4, 64))
    expected = attention(q, k, v)
    late = [torch.zeros_like(x) for x in (q, k, v)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        for x, value in zip(late, (q, k, v), strict=True):
            x.copy_(value)
        out = attention(*late)
    stream.synchronize()
    assert same_bits(out, expected)


def test_a_busy_default_stream_does_not_delay_a_side_stream():
    q, k, v = qkv((1, 128, 2, 64))
    expected = attention(q, k, v)
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # so that no memory has to be asked for below
        attention(q, k, v)
    torch.cuda.synchronize()
    torch.cuda._sleep(20 * SLEEP)
    with torch.cuda.stream(stream):
        out = attention(q, k, v)
        done.record()
    done.synchronize()
    busy = not torch.cuda.default_stream().query()
    torch.cuda.synchronize()
    assert same_bits(out, expected)
    assert busy, "the call waited for the default stream"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs a second one")
def test_R038_another_device_than_the_current_one():
    q, k, v = qkv((2, 100, 4, 64))
    expected = attention(q, k, v)
    there = [x.to("cuda:1") for x in (q, k, v)]
    out = attention(*there)
    assert out.device == torch.device("cuda", 1) and torch.cuda.current_device() == 0
    assert same_bits(out.to("cuda:0"), expected)
    with pytest.raises(ValueError, match="device"):
        attention(q, there[1], there[2])


def test_tensors_of_two_devices_are_refused():
    q, k, v = qkv((1, 8, 2, 32))
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)device|cpu|cuda"):
        attention(q, k.cpu(), v.cpu())


# ---- graphs --------------------------------------------------------------------------------------


def captured(function):
    """(graph, its results): after a warm-up on a side stream, as torch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 10.0}], ids=str)
def test_graph_of_the_forward(options):
    """Captured once, replayed over other values."""
    q, k, v = qkv((2, 200, 4, 64), (2, 300, 2, 64))
    static = [torch.zeros_like(x) for x in (q, k, v)]
    graph, (out, lse) = captured(lambda: attention(*static, **options, return_lse=True))
    for scale in (1.0, 0.5):
        for x, value in zip(static, (q, k, v), strict=True):
            x.copy_(scale * value)
        graph.replay()
        expected = attention(*static, **options, return_lse=True)
        torch.cuda.synchronize()
        assert same_bits(out, expected[0]) and same_bits(lse, expected[1])


def test_R070_graph_with_dropout_draws_a_new_mask_each_replay():
    q, k, v = qkv((2, 130, 4, 64))
    if not gpu_util.declares("dropout"):
        pytest.skip("gpu: no kernel has dropout")

    def call():
        state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device="cuda")
        return state, attention(q, k, v, dropout_p=0.2, rng_state=state)

    graph, (state, out) = captured(call)
    hidden, drawn_inside = captured(lambda: attention(q, k, v, dropout_p=0.2))
    seen = []
    for _ in range(3):
        graph.replay()
        hidden.replay()
        torch.cuda.synchronize()
        assert same_bits(out, attention(q, k, v, dropout_p=0.2, rng_state=state))
        seen.append((out.clone(), drawn_inside.clone()))
    for a, b in ((0, 1), (1, 2)):
        assert not torch.equal(seen[a][0], seen[b][0])
        assert not torch.equal(seen[a][1], seen[b][1])


def test_graph_of_packed_sequences_with_new_lengths():
    q, k, v = qkv((256, 4, 64), (256, 2, 64))
    cu = torch.tensor([0, 100, 256], dtype=torch.int32, device="cuda")
    options = {"max_seqlen_q": 256, "max_seqlen_k": 256, "causal": True}
    graph, out = captured(lambda: attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **options))
    for middle in (100, 1, 200):
        cu[1] = middle
        graph.replay()
        expected = attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **options)
        torch.cuda.synchronize()
        assert same_bits(out, expected)


# ---- torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.2}], ids=str)
def test_opcheck(options):
    q, k, v = qkv((2, 17, 4, 40), (2, 33, 2, 40))
    if "dropout_p" in options:
        options = {**options, "rng_state": torch.tensor([3, 4], device="cuda")}
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.flash.attn.default, (q, k, v), options, test_utils=tests)


def test_compiled_without_a_graph_break():
    q, k, v = qkv((2, 64, 4, 64))
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, causal=True) * 2, backend="aot_eager", fullgraph=True
    )
    assert same_bits(compiled(q, k, v), attention(q, k, v, causal=True) * 2)


def test_autocast():
    q, k, v = qkv((2, 64, 4, 64), None, torch.float32)
    for dtype in (BF16, FP16):
        with torch.autocast("cuda", dtype):
            out = attention(q, k, v)
        assert same_bits(out, attention(q.to(dtype), k.to(dtype), v.to(dtype)))


def test_uninitialised_results_are_all_written():
    """torch fills what it allocates with NaN in its deterministic mode."""
    inputs = make_inputs(Case(dtype=BF16, causal=True, seqlens_q=(130, 130)), "cuda")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        check_inputs(inputs, "deterministic mode")
    finally:
        torch.use_deterministic_algorithms(before)


def test_memory_is_linear():
    """Nothing above out and lse is held at the peak."""
    q, k, v = qkv((1, 8192, 4, 64))
    attention(q, k, v)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(q, k, v)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= out.numel() * 2 + 4 * 8192 * 4 + (1 << 20)


# ---- accuracy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_errors_beside_sdpa(head_dim, causal, scale, dtype):
    """semantics.md: against fp64, RMS at most 1.05 times and the largest 1.5 times SDPA's."""
    q, k, v = (scale * x for x in qkv((2, 1024, 4, head_dim), None, dtype))
    exact = reference.attention(q, k, v, causal=causal)[0]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal
        ).transpose(1, 2)
    (rms, most), (their_rms, their_most) = (
        (e.square().mean().sqrt().item(), e.abs().max().item())
        for e in (attention(q, k, v, causal=causal) - exact, theirs - exact)
    )
    assert rms <= 1.05 * their_rms, f"rms {rms:.3g} against {their_rms:.3g}"
    assert most <= 1.5 * their_most, f"max {most:.3g} against {their_most:.3g}"


def test_long_sequences():
    """Many tiles a row: 16384 keys, whose errors must not add up."""
    q, k, v = qkv((1, 256, 2, 128), (1, 16384, 2, 128))
    check_inputs(inputs_of(q, k, v, causal=True), "16384 keys")
    ones = torch.ones_like(v)
    torch.testing.assert_close(attention(q, k, ones), torch.ones_like(q), rtol=0, atol=1e-2)


def test_explain_names_a_kernel_of_this_gpu():
    q, k, v = (randn(1, 256, 2, 64, seed=s) for s in range(3))
    text = flash_ext.explain(q, k, v, causal=True)
    name = text.split("serves: ", 1)[1].split("\n", 1)[0]
    assert name.startswith(f"{gpu_util.arch()}_") and name.endswith("fwd_bf16_d64")
