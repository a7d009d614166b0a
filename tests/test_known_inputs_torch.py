"""Inputs that broke attention libraries in public: autograd, dtypes, compilers, signatures.

The second half of test_known_inputs.py, with its helpers.
"""

import inspect
import math

import pytest
import torch
from test_known_inputs import (
    assert_close,
    assert_same_bits,
    dense,
    int32,
    packed,
    randn,
    run,
    uninitialised_memory_is_nan,  # noqa: F401 (a fixture of every test here too)
)
from torch.utils.checkpoint import checkpoint

import flash_ext
from flash_ext import attention

# ---- autograd ------------------------------------------------------------------------------------


def test_R072_gradient_of_lse():
    q, k, v = dense((4, 64, 4, 64), dtype=torch.bfloat16)
    dlse = torch.full((4, 4, 64), 1 / 1024)
    assert_close(q, k, v, dout=torch.zeros(q.shape, dtype=q.dtype), dlse=dlse)
    _, lse = attention(q, k, v, return_lse=True)
    dq, dk = torch.autograd.grad(lse.mean(), [q, k])
    assert dq.ne(0).any() and dk.ne(0).any()


def test_R073_unused_lse_changes_no_bit():
    q, k, v = dense((2, 50, 2, 64), dtype=torch.float16)
    expected = torch.autograd.grad(attention(q, k, v).sum(), [q, k, v])
    out, lse = attention(q, k, v, return_lse=True)
    assert_same_bits(torch.autograd.grad(out.sum(), [q, k, v], retain_graph=True), expected)
    dv = torch.autograd.grad(out.sum() + lse.sum(), [q, k, v])[2]
    assert torch.equal(dv, expected[2])


def test_R074_loss_on_lse_alone():
    q, k, v = dense((2, 50, 2, 64), dtype=torch.float16)
    _, lse = attention(q, k, v, return_lse=True, causal=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), [q, k, v], materialize_grads=True)
    assert dq.ne(0).any() and dk.ne(0).any() and dv.eq(0).all()


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_R075_gradient_of_alibi_slopes(shape):
    q, k, v = dense((2, 30, 4, 32), (2, 37, 4, 32), torch.float32)
    slopes = randn(*shape, seed=5).abs().requires_grad_()
    assert_close(q, k, v, alibi_slopes=slopes, causal=True)
    (grad,) = torch.autograd.grad(attention(q, k, v, alibi_slopes=slopes).sum(), [slopes])
    assert grad.shape == shape and grad.ne(0).all()


def test_R076_alibi_slopes_of_any_dtype_and_shape():
    q, k, v = dense((2, 9, 4, 32), (2, 14, 4, 32), torch.float16)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])  # exact in every dtype
    expected = attention(q, k, v, alibi_slopes=slopes)
    for other in (slopes.half(), slopes.bfloat16(), slopes.double(), slopes.half().expand(2, 4)):
        assert torch.equal(attention(q, k, v, alibi_slopes=other), expected)
    assert_close(q, k, v, alibi_slopes=slopes.half())
    for wrong in (slopes[:3], slopes.expand(3, 4), slopes[:, None]):
        with pytest.raises(ValueError, match=r"alibi_slopes.*\(.*num_heads"):
            attention(q, k, v, alibi_slopes=wrong)


def test_R077_lse_with_alibi_is_the_true_one():
    q, k, v = (x.detach() for x in dense((1, 9, 2, 16), (1, 14, 2, 16), torch.float32))
    slopes = torch.tensor([0.5, 2.0])
    _, lse = attention(q, k, v, alibi_slopes=slopes, causal=True, return_lse=True)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    offset = torch.arange(14) - torch.arange(9)[:, None] - 5
    scores = scores - slopes[:, None, None] * offset.abs()
    expected = scores.masked_fill(offset > 0, -math.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected)


@pytest.mark.parametrize("softcap", [15.0, 30.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_R078_saturated_softcap(softcap, dtype):
    q, k, v = dense((1, 64, 2, 64), None, dtype, 5, 3)
    assert_close(q, k, v, softcap=softcap)


@pytest.mark.parametrize(
    "shape_q, shape_k, dtype, scale, causal",
    [
        ((1, 256, 2, 128), (1, 256, 2, 128), torch.float16, 3, True),
        ((1, 238, 8, 64), (1, 238, 8, 64), torch.bfloat16, 1, True),
        ((8, 256, 1, 128), (8, 128, 1, 128), torch.float16, 1, False),
    ],
)
def test_R080_finite_and_repeatable(shape_q, shape_k, dtype, scale, causal):
    q, k, v = dense(shape_q, shape_k, dtype, scale, scale)
    first = run(q, k, v, causal=causal)
    assert all(torch.isfinite(x).all() for x in first)
    for _ in range(3):
        assert_same_bits(run(q, k, v, causal=causal), first)
    assert_close(q, k, v, causal=causal)


@pytest.mark.parametrize("kind", ["plain", "gqa and window", "varlen"])
def test_R081_same_bits_every_time(kind):
    options = {"deterministic": True, "causal": True}
    if kind == "varlen":
        q, k, v = dense((200, 4, 64), (200, 2, 64), torch.float16)
        options |= packed((3, 150, 200), (3, 150, 200))
    elif kind == "plain":
        q, k, v = dense((2, 256, 4, 64), (2, 256, 4, 64), torch.float16)
    else:
        q, k, v = dense((1, 256, 16, 128), (1, 256, 2, 128), torch.bfloat16)
        options["window"] = (100, 0)
    first, threads = run(q, k, v, **options), torch.get_num_threads()
    try:
        for count in (1, threads, 1, threads):
            torch.set_num_threads(count)
            assert_same_bits(run(q, k, v, **options), first)
    finally:
        torch.set_num_threads(threads)


def test_R082_grad_modes():
    q, k, v = dense((1, 20, 2, 32))
    expected = run(q, k, v)
    with torch.no_grad():
        assert attention(q, k, v).grad_fn is None
        with torch.enable_grad():
            assert_same_bits(run(q, k, v), expected)
    with torch.inference_mode():
        out = attention(q, k, v)
    assert out.is_inference() and torch.equal(out, expected[0])
    out = checkpoint(attention, q, k, v, use_reentrant=False)
    assert_same_bits(torch.autograd.grad(out.sum(), [q, k, v]), expected[2:])


def test_R082_checkpoint_draws_the_same_dropout():
    q, k, v = dense((1, 20, 2, 32))
    torch.manual_seed(1)
    expected = torch.autograd.grad(attention(q, k, v, dropout_p=0.5).square().sum(), [q, k, v])
    torch.manual_seed(1)
    out = checkpoint(lambda *x: attention(*x, dropout_p=0.5), q, k, v, use_reentrant=False)
    torch.randn(5)
    assert_same_bits(torch.autograd.grad(out.square().sum(), [q, k, v]), expected)


def test_R084_mixed_dtypes():
    q, k, v = dense((1, 20, 2, 32))
    half = v.bfloat16()
    with pytest.raises(ValueError, match=r"float32.*bfloat16"):
        attention(q, k, half)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, half)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), half))
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32


def test_R085_double_backward_is_refused():
    q, k, v = dense((1, 5, 2, 8))
    with pytest.raises(NotImplementedError, match="attn"):
        (dq,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
        dq.sum().backward()


def test_R086_function_transforms():
    q, k, v = (x.detach() for x in dense((3, 1, 5, 2, 8)))
    with pytest.raises(NotImplementedError, match="attn"):
        torch.func.jvp(lambda q: attention(q, k[0], v[0]), (q[0],), (q[1],))
    loops = torch.stack([attention(*x) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.func.vmap(attention)(q, k, v), loops)

    def loss(q, k, v):
        return attention(q, k, v, causal=True).square().sum()

    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    total = sum(loss(*x) for x in zip(*inputs, strict=True))
    torch.testing.assert_close(got, torch.autograd.grad(total, inputs))


# ---- compile, signatures, helpers ----------------------------------------------------------------


def test_R087_strides_of_a_transposed_query():
    q, k, v = (randn(2, 3, 20, 16, seed=s).transpose(1, 2).requires_grad_() for s in range(3))
    torch.library.opcheck(torch.ops.flash.attn.default, (q, k, v), {"causal": True})
    out, lse = torch.compile(
        lambda *x: attention(*x, return_lse=True), backend="aot_eager", fullgraph=True
    )(q, k, v)
    assert out.is_contiguous() and lse.is_contiguous()
    assert torch.equal(out, attention(q, k, v))


@pytest.mark.parametrize("kind", ["int", "tensor", "none"])
def test_R089_compiled_varlen_of_many_lengths(kind):
    torch.compiler.reset()

    @torch.compile(backend="aot_eager", dynamic=True, fullgraph=True)
    def call(q, k, v, cu_seqlens, longest):
        options = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "causal": True}
        return attention(q, k, v, max_seqlen_q=longest, max_seqlen_k=longest, **options)

    for total in (30, 41, 57):
        q, k, v = (x.detach() for x in dense((total, 2, 16), (total, 2, 16), torch.float32))
        longest = {"int": total - 9, "tensor": torch.tensor(total - 9), "none": None}[kind]
        cu_seqlens = int32(0, 9, total)
        with torch._dynamo.config.patch(error_on_recompile=total > 30):
            out = call(q, k, v, cu_seqlens, longest)
        options = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "causal": True}
        torch.testing.assert_close(out, attention(q, k, v, **options))


def test_R091_max_seqlen_as_a_tensor():
    q, k, v = dense((30, 2, 16), (30, 2, 16), torch.float16)
    cu_seqlens = int32(0, 10, 30)
    expected = flash_ext.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 20, 20)
    for dtype in (torch.int32, torch.int64):
        longest = torch.tensor(20, dtype=dtype)
        for _ in range(2):
            got = flash_ext.flash_attn_varlen_func(
                q, k, v, cu_seqlens, cu_seqlens, longest, longest
            )
            assert torch.equal(got, expected)


def test_R092_positional_calls_of_old_releases():
    options = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"]
    options += ["deterministic", "return_attn_probs"]
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    expected = {
        "flash_attn_func": ["q", "k", "v", *options],
        "flash_attn_qkvpacked_func": ["qkv", *options],
        "flash_attn_kvpacked_func": ["q", "kv", *options],
        "flash_attn_varlen_func": ["q", "k", "v", *lengths, *options, "block_table"],
        "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *options],
        "flash_attn_varlen_kvpacked_func": ["q", "kv", *lengths, *options],
    }
    for name, names in expected.items():
        parameters = inspect.signature(getattr(flash_ext, name)).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == names, name
    q, k, v = (x.detach() for x in dense((1, 9, 2, 16), (1, 9, 2, 16), torch.float16))
    got = flash_ext.flash_attn_func(q, k, v, 0.0, 0.3, True, (4, 0), 9.0, None, False, True)
    out = attention(q, k, v, softmax_scale=0.3, causal=True, window=(4, 0), softcap=9.0)
    assert len(got) == 3 and torch.equal(got[0], out)


def test_R093_explicit_softmax_scale():
    q, k, v = dense((1, 9, 2, 24), (1, 9, 2, 24), torch.float16)
    assert torch.equal(attention(q, k, v, softmax_scale=24**-0.5), attention(q, k, v))
    assert_close(q, k, v, softmax_scale=0.5)
    assert_close(q, k, v, softmax_scale=-0.5)
    assert_close(q, k, v, softmax_scale=0.0)


def test_R096_unpad_input_returns_five_by_name():
    x = randn(2, 4, 3)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    unpadded = flash_ext.unpad_input(x, mask)
    assert unpadded._fields == ("output", "indices", "cu_seqlens", "max_seqlen", "seqused")
    output, indices, cu_seqlens, max_seqlen, *_ = unpadded
    assert torch.equal(output, x[mask.bool()]) and indices.tolist() == [0, 1, 4, 5, 6]
    assert torch.equal(cu_seqlens, int32(0, 2, 5)) and max_seqlen == 3
    assert torch.equal(flash_ext.pad_input(output, indices, 2, 4), x * mask[..., None])


@pytest.mark.parametrize("head_dim", [40, 59, 72, 80, 96, 111, 120, 160, 192, 224, 256])
def test_R099_scale_of_the_unpadded_head_dim(head_dim):
    q, k, v = dense((1, 20, 2, head_dim), (1, 33, 1, head_dim), torch.bfloat16)
    assert_close(q, k, v, causal=True)
    _, _, *grads = run(q, k, v)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
