"""flash_ext.integrations.xformers against softmax(q k^T + bias) v with the materialized bias."""

import dataclasses

import pytest
import torch

from flash_ext.integrations import xformers as xops

Q_LENGTHS, K_LENGTHS = (3, 1, 5), (4, 1, 7)


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def make_qkv(seqlen_q=6, seqlen_k=6, batch=2, heads=3, dim=8, dim_v=5):
    return (
        randn(batch, seqlen_q, heads, dim),
        randn(batch, seqlen_k, heads, dim, seed=1),
        randn(batch, seqlen_k, heads, dim_v, seed=2),
    )


def naive(q, k, v, bias=None, scale=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if bias is None else s + bias
    return (s.softmax(-1).nan_to_num() @ v).transpose(1, 2)


def check(tensors, bias=None, **options):
    q, k, v = tensors
    dense = bias
    if bias is not None and not isinstance(bias, torch.Tensor):
        dense = bias.materialize((q.shape[1], k.shape[1]), torch.float64)
    got = xops.memory_efficient_attention(q, k, v, bias, **options)
    expected = naive(q, k, v, dense, **options)
    torch.testing.assert_close(got, expected)
    dout = torch.randn(expected.shape, dtype=expected.dtype)
    for a, b in zip(
        torch.autograd.grad(got, tensors, dout),
        torch.autograd.grad(expected, tensors, dout),
        strict=True,
    ):
        torch.testing.assert_close(a, b.nan_to_num())


DENSE = {
    "causal": xops.LowerTriangularMask(),
    "bottom_right": xops.LowerTriangularFromBottomRightMask(),
    "bottom_right_local": xops.LowerTriangularFromBottomRightMask().make_local_attention(3),
    "local": xops.LocalAttentionFromBottomRightMask(window_left=1, window_right=2),
}


@pytest.mark.parametrize("seqlens", [(6, 6), (4, 7)], ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_dense_masks(name, seqlens):
    check(make_qkv(*seqlens), DENSE[name])


def test_causal_with_more_rows_than_keys():
    check(make_qkv(7, 4), DENSE["causal"])


@pytest.mark.parametrize("seqlens", [(6, 6), (4, 7), (7, 4)], ids=str)
def test_causal_with_a_tensor(seqlens):
    check(make_qkv(*seqlens), DENSE["causal"].add_bias(randn(2, 3, *seqlens, seed=3).detach()))


def test_tensor_bias_has_a_gradient():
    bias = randn(2, 3, 6, 6, seed=3)
    q, k, v = make_qkv()
    check((q, k, v), bias, scale=0.7)
    grads = [
        torch.autograd.grad(f(q, k, v, bias).sum(), bias)[0]
        for f in (xops.memory_efficient_attention, naive)
    ]
    torch.testing.assert_close(*grads)


def packed(q_lengths=Q_LENGTHS, k_total=None):
    return make_qkv(sum(q_lengths), sum(K_LENGTHS) if k_total is None else k_total, batch=1)


BLOCKS = xops.BlockDiagonalMask.from_seqlens(Q_LENGTHS, K_LENGTHS)
PADDED = (Q_LENGTHS, 9, K_LENGTHS)
PACKED = {
    "blocks": BLOCKS,
    "causal": BLOCKS.make_causal(),
    "bottom_right": BLOCKS.make_causal_from_bottomright(),
    "local": BLOCKS.make_local_attention(2),
    "bottom_right_local": BLOCKS.make_local_attention_from_bottomright(2),
    "padded": xops.BlockDiagonalPaddedKeysMask.from_seqlens(*PADDED),
    "padded_causal": xops.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(*PADDED),
}


@pytest.mark.parametrize("name", PACKED)
def test_blocks(name):
    check(packed(k_total=27 if "padded" in name else None), PACKED[name])


@pytest.mark.parametrize("make", ["make_causal", "make_causal_from_bottomright"])
def test_blocks_of_one_length(make):
    check(packed(k_total=9), getattr(xops.BlockDiagonalMask.from_seqlens(Q_LENGTHS), make)())


def test_tensor_list():
    tensors = [randn(2, 3, 2, 4), randn(1, 5, 2, 4, seed=1)]
    mask, x = xops.BlockDiagonalMask.from_tensor_list(tensors)
    assert x.shape == (1, 11, 2, 4)
    outs = mask.split(xops.memory_efficient_attention(x, x, x, mask))
    for out, y in zip(outs, tensors, strict=True):
        torch.testing.assert_close(out, xops.memory_efficient_attention(y, y, y))


def test_three_dimensions():
    q, k, v = (x[:, :, 0] for x in make_qkv())
    bias = randn(2, 6, 6, seed=3)
    got = xops.memory_efficient_attention(q, k, v, bias)
    expected = naive(*(x.unsqueeze(2) for x in (q, k, v)), bias.unsqueeze(1))[:, :, 0]
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("expanded", [True, False])
def test_grouped_heads(expanded):
    """k and v of a group are one head, expanded as xformers wants it, or heads of their own."""
    q, k, v = randn(2, 6, 2, 3, 8), randn(2, 6, 2, 1, 8, seed=1), randn(2, 6, 2, 1, 4, seed=2)
    k3, v3 = (x.expand(-1, -1, -1, 3, -1) for x in (k, v))
    if not expanded:
        k3, v3 = k3.contiguous(), v3.contiguous()
    got = xops.memory_efficient_attention(q, k3, v3, DENSE["causal"])
    flat = [x.flatten(2, 3) for x in (q, k3, v3)]
    expected = naive(*flat, DENSE["causal"].materialize((6, 6), torch.float64))
    torch.testing.assert_close(got.flatten(2, 3), expected)
    for a, b in zip(
        torch.autograd.grad(got.sin().sum(), [q, k, v]),
        torch.autograd.grad(expected.sin().sum(), [q, k, v]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_lse_and_output_dtype():
    q, k, v = make_qkv()
    out, lse = xops.memory_efficient_attention_forward_requires_grad(
        q, k, v, output_dtype=torch.float32
    )
    assert out.dtype == torch.float32
    scores = (q.transpose(1, 2) @ k.transpose(1, 2).mT) * q.shape[-1] ** -0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_dropout_is_used():
    assert xops.memory_efficient_attention(*make_qkv(), p=1.0).eq(0).all()


@pytest.mark.parametrize("name", [*DENSE, *PACKED])
def test_R097_masks_stay_what_they_are_when_moved(name):
    mask = (DENSE | PACKED)[name] if name in DENSE else PACKED[name]
    moved = mask.to("meta")
    assert type(moved) is type(mask)
    assert moved._rule() == mask._rule()


def test_classes_of_the_same_name_elsewhere():
    """xformers' own objects are known by name and attributes."""

    @dataclasses.dataclass
    class BlockDiagonalCausalMask:
        q_seqinfo: object
        k_seqinfo: object

    foreign = BlockDiagonalCausalMask(BLOCKS.q_seqinfo, BLOCKS.k_seqinfo)
    tensors = packed()
    torch.testing.assert_close(
        xops.memory_efficient_attention(*tensors, foreign),
        xops.memory_efficient_attention(*tensors, BLOCKS.make_causal()),
    )


def test_refusals():
    q, k, v = make_qkv()
    with pytest.raises(ValueError, match="op is"):
        xops.memory_efficient_attention(q, k, v, op="cutlass")
    with pytest.raises(TypeError, match=r"attn_bias is a Own.*LowerTriangularMask"):
        xops.memory_efficient_attention(q, k, v, type("Own", (xops.LowerTriangularMask,), {})())
    with pytest.raises(ValueError, match="key has shape"):
        xops.memory_efficient_attention(q, k[:, :, 0], v)
    with pytest.raises(ValueError, match="batch of 2"):
        xops.memory_efficient_attention(q, k, v, BLOCKS)
    more_rows = xops.BlockDiagonalMask.from_seqlens([4, 2], [2, 4]).make_causal()
    with pytest.raises(ValueError, match="block 0 has 4 queries and 2 keys"):
        xops.memory_efficient_attention(*make_qkv(batch=1), more_rows)
    with pytest.raises(ValueError, match="above 5"):
        xops.BlockDiagonalPaddedKeysMask.from_seqlens([1], 5, [6])
    with pytest.raises(ValueError, match=r"must be \(1, 9"):
        BLOCKS.split(torch.zeros(1, 8, 2))


def test_masks_that_would_lose_something_refuse():
    """No bias at the top left for one counted from the bottom right, no padding forgotten."""
    bias = torch.zeros(1, 1, 3, 4)
    with pytest.raises(NotImplementedError, match="top left"):
        xops.attn_bias.LowerTriangularFromBottomRightMask().add_bias(bias)
    padded = xops.attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([2, 1], 5, [3, 4])
    for make in (padded.make_causal, padded.make_causal_from_bottomright):
        with pytest.raises(NotImplementedError, match="padding"):
            make()


@pytest.mark.parametrize("window_size", [0, -1])
def test_windows_have_a_key(window_size):
    masks = xops.attn_bias
    with pytest.raises(ValueError, match=f"window_size is {window_size}"):
        masks.LowerTriangularFromBottomRightMask().make_local_attention(window_size)
    blocks = masks.BlockDiagonalMask.from_seqlens([2, 3])
    with pytest.raises(ValueError, match=f"window_size is {window_size}"):
        blocks.make_local_attention(window_size)
