"""The functions that users call: signatures, results, refusals, padding, check_inputs."""

import inspect

import pytest
import torch
import util

import flash_ext
from flash_ext import _version, arguments, reference

BATCH, SEQLEN, HEADS, HEADS_K, DIM = 2, 6, 4, 2, 8
LENGTHS = (2, 4)  # of the packed sequences, SEQLEN together


def make_dense(requires_grad=False, num_heads_k=HEADS_K):
    qkv = util.make_qkv([SEQLEN] * BATCH, [SEQLEN] * BATCH, HEADS, num_heads_k, DIM)
    return [x.requires_grad_(requires_grad) for x in qkv]


def make_packed(requires_grad=False, num_heads_k=HEADS_K):
    """q, k, v and the lengths in flash-attn's order."""
    qkv = util.make_qkv(LENGTHS, LENGTHS, HEADS, num_heads_k, DIM, layout="varlen")
    cu_seqlens = util.cumulative(LENGTHS)
    qkv = [x.requires_grad_(requires_grad) for x in qkv]
    return qkv, (cu_seqlens, cu_seqlens, max(LENGTHS), max(LENGTHS))


def assert_close(got, expected):
    torch.testing.assert_close(got.to(expected.dtype), expected, rtol=1e-4, atol=1e-4)


# ---- signatures ----------------------------------------------------------------------------------

OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
FLASH_ATTN = {  # flash-attn 2.8's parameters before OPTIONS, and after them
    "flash_attn_func": ("q k v", {}),
    "flash_attn_kvpacked_func": ("q kv", {}),
    "flash_attn_qkvpacked_func": ("qkv", {}),
    "flash_attn_varlen_func": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
        {"block_table": None},
    ),
    "flash_attn_varlen_kvpacked_func": (
        "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
        {},
    ),
    "flash_attn_varlen_qkvpacked_func": ("qkv cu_seqlens max_seqlen", {}),
}


@pytest.mark.parametrize("name", FLASH_ATTN)
def test_signature_is_flash_attns(name):
    first, last = FLASH_ATTN[name]
    required = dict.fromkeys(first.split(), inspect.Parameter.empty)
    parameters = inspect.signature(getattr(flash_ext, name)).parameters
    positional = {n: p.default for n, p in parameters.items() if p.kind != p.KEYWORD_ONLY}
    assert list(positional.items()) == list((required | OPTIONS | last).items())
    keyword = {n: p.default for n, p in parameters.items() if p.kind == p.KEYWORD_ONLY}
    assert keyword == {"bias": None, "sinks": None}


HOUSE = {  # function: its operator, and what is its own
    "attention": ("attn", {"return_lse": False}),
    "explain": ("explain", {}),
    "check_inputs": ("attn", {}),
    "attn_probs": ("attn_probs", {}),
    "merge": ("merge", {}),
}


@pytest.mark.parametrize("name", HOUSE)
def test_names_and_defaults_are_the_schemas(name):
    operator, own = HOUSE[name]
    arguments = getattr(torch.ops.flash, operator).default._schema.arguments
    expected = {a.name: a.default_value for a in arguments}
    if "window_left" in expected:
        expected["window"] = (expected.pop("window_left"), expected.pop("window_right"))
    parameters = inspect.signature(getattr(flash_ext, name)).parameters
    got = {n: None if p.default is p.empty else p.default for n, p in parameters.items()}
    assert got == expected | own


def test_public_names():
    assert all(hasattr(flash_ext, name) for name in flash_ext.__all__)
    assert flash_ext.__version__ == _version.__version__


# ---- attention -----------------------------------------------------------------------------------


def test_arguments_reach_the_operator():
    q, k, v = make_dense()
    bias, slopes, sinks = torch.randn(1, HEADS, 1, SEQLEN), torch.rand(HEADS), torch.randn(HEADS)
    seqused = util.lengths([3, 6])
    out, lse = flash_ext.attention(
        *(q, k, v, bias, slopes, sinks),
        seqused_k=seqused,
        softmax_scale=0.2,
        causal=True,
        window=[4, 1],
        softcap=7,
        return_lse=True,
    )
    expected = reference.attention(
        *(q, k, v, bias, slopes, sinks),
        seqused_k=seqused,
        softmax_scale=0.2,
        causal=True,
        window_left=4,
        window_right=1,
        softcap=7,
    )
    assert_close(out, expected[0])
    assert_close(lse, expected[1])


def test_dropout_draws_from_torchs_generator():
    q, k, v = make_dense()
    torch.manual_seed(0)
    first, second = (flash_ext.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first, flash_ext.attention(q, k, v, dropout_p=0.5))
    torch.manual_seed(0)
    rng_state = torch.randint(2**63 - 1, (2,))
    given = flash_ext.attention(q, k, v, dropout_p=0.5, rng_state=rng_state)
    assert torch.equal(first, given)


def test_without_dropout_nothing_is_drawn():
    q, k, v = make_dense()
    before = torch.get_rng_state()
    flash_ext.attention(q, k, v)
    flash_ext.explain(q, k, v, dropout_p=0.5)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", [int, torch.tensor, lambda n: torch.tensor([n])])
def test_max_seqlen_as_int_or_tensor(kind):
    (q, k, v), (cu_seqlens, _, _, _) = make_packed()
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    for limit in (4, 3):
        got = flash_ext.attention(
            q, k, v, **lengths, max_seqlen_q=kind(limit), max_seqlen_k=kind(limit)
        )
        expected, _ = reference.attention(
            q, k, v, **lengths, max_seqlen_q=limit, max_seqlen_k=limit
        )
        assert_close(got, expected)


def test_max_seqlen_may_exceed_the_total():
    (q, k, v), (cu_seqlens, _, _, _) = make_packed()
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    lengths |= {"max_seqlen_q": 9, "max_seqlen_k": 10}
    bias = torch.randn(1, 1, 9, 10)
    out, lse = flash_ext.attention(q, k, v, bias, **lengths, return_lse=True)
    assert_close(out, reference.attention(q, k, v, bias, **lengths)[0])
    probs = flash_ext.attn_probs(q, k, lse, bias, **lengths)
    assert_close(probs, reference.attn_probs(q, k, lse, bias, **lengths))


# ---- refusals ------------------------------------------------------------------------------------

REFUSALS = {
    "q": ({"q": [1.0]}, TypeError, "q is a list"),
    "k": ({"k": None}, TypeError, "k is a NoneType"),
    "bias": ({"bias": 1.0}, TypeError, "bias is a float"),
    "seqused_k": ({"seqused_k": [1, 2]}, TypeError, "seqused_k is a list"),
    "rng_state": ({"rng_state": 5, "dropout_p": 0.1}, TypeError, "rng_state is a int"),
    "causal": ({"causal": 1}, TypeError, "causal is a int"),
    "deterministic": ({"deterministic": None}, TypeError, "deterministic is a NoneType"),
    "softmax_scale": ({"softmax_scale": "1"}, TypeError, "softmax_scale is a str"),
    "softcap": ({"softcap": None}, TypeError, "softcap is a NoneType"),
    "dropout_p": ({"dropout_p": True}, TypeError, "dropout_p is a bool"),
    "num_splits": ({"num_splits": 1.0}, TypeError, "num_splits is a float"),
    "window_int": ({"window": 3}, TypeError, "window is a int"),
    "window_float": ({"window": (1, 0.5)}, TypeError, r"window\[1\] is a float"),
    "window_bool": ({"window": (True, 1)}, TypeError, r"window\[0\] is a bool"),
    "window_length": ({"window": (1, 2, 3)}, ValueError, "window has 3 entries"),
    "window_value": ({"window": (-2, 0)}, ValueError, "window_left is -2"),
    "max_seqlen": ({"max_seqlen_q": 2.0}, TypeError, "max_seqlen_q is a float"),
    "max_seqlen_tensor": (
        {"max_seqlen_k": torch.ones(2)},
        TypeError,
        r"max_seqlen_k is a torch\.float32 tensor",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_argument(case):
    change, error, message = REFUSALS[case]
    arguments = dict(zip("qkv", make_dense(), strict=True)) | change
    with pytest.raises(error, match=message):
        flash_ext.attention(**arguments)


def test_flash_attn_names_its_own_arguments():
    q, k, v = make_dense()
    with pytest.raises(ValueError, match="window_size has 1 entries"):
        flash_ext.flash_attn_func(q, k, v, window_size=(1,))
    with pytest.raises(TypeError, match="kv is a tuple"):
        flash_ext.flash_attn_kvpacked_func(q, (k, v))
    with pytest.raises(ValueError, match=r"qkv has shape \(2, 6, 2, 4, 8\).*batch, seqlen, 3"):
        flash_ext.flash_attn_qkvpacked_func(torch.stack([q, q], 2))
    (q, k, v), lengths = make_packed()
    with pytest.raises(ValueError, match=r"kv has shape \(6, 2, 8\).*total, 2, num_heads"):
        flash_ext.flash_attn_varlen_kvpacked_func(q, k, *lengths)


def test_block_table_is_page_table():
    (q, _, _), lengths = make_packed()
    k, v = (torch.randn(3, 16, HEADS_K, DIM) for _ in range(2))
    pages = util.lengths([2, 0]).reshape(2, 1)
    out = flash_ext.flash_attn_varlen_func(q, k, v, *lengths, block_table=pages)
    used = lengths[1].diff()
    rest = {"max_seqlen_q": lengths[2], "max_seqlen_k": lengths[3]}
    same = flash_ext.attention(
        *(q, k, v), cu_seqlens_q=lengths[0], seqused_k=used, page_table=pages, **rest
    )
    assert torch.equal(out, same)


def test_varlen_functions_require_cu_seqlens():
    (q, k, v), lengths = make_packed(num_heads_k=HEADS)
    both = "cu_seqlens_q and cu_seqlens_k must be given"
    with pytest.raises(ValueError, match=f"cu_seqlens_q is None; {both}"):
        flash_ext.flash_attn_varlen_func(q, k, v, None, None, *lengths[2:])
    with pytest.raises(ValueError, match=f"cu_seqlens_k is None; {both}"):
        kv = torch.stack([k, v], 1)
        flash_ext.flash_attn_varlen_kvpacked_func(q, kv, lengths[0], None, *lengths[2:])
    with pytest.raises(ValueError, match="cu_seqlens is None; cu_seqlens must be given"):
        flash_ext.flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), None, 4)


def test_numpys_scalars_are_taken():
    np = pytest.importorskip("numpy")
    q, k, v = make_dense()
    got = flash_ext.attention(
        *(q, k, v),
        causal=np.bool_(True),
        softmax_scale=np.float32(0.25),
        softcap=np.int64(7),
        window=(np.int32(3), -1),
    )
    expected = flash_ext.attention(
        q, k, v, causal=True, softmax_scale=0.25, softcap=7, window=(3, -1)
    )
    assert torch.equal(got, expected)


def test_merge_takes_floating_tensors_alone():
    out, lse = torch.zeros(BATCH, SEQLEN, HEADS, DIM), torch.zeros(BATCH, HEADS, SEQLEN)
    with pytest.raises(TypeError, match="lse_a is a NoneType"):
        flash_ext.merge(out, None, out, lse)
    with pytest.raises(TypeError, match=r"out_b is a torch\.int32 tensor"):
        flash_ext.merge(out, lse, out.int(), lse)


# ---- flash-attn's functions ----------------------------------------------------------------------


def test_return_attn_probs_without_dropout():
    q, k, v = make_dense()
    out, lse, probs = flash_ext.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    expected_out, expected_lse = reference.attention(q, k, v, causal=True)
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)
    assert probs.shape == (BATCH, HEADS, SEQLEN, SEQLEN) and probs.dtype == q.dtype
    values = v.repeat_interleave(HEADS // HEADS_K, 2)
    assert_close(torch.einsum("bhqk,bkhd->bqhd", probs, values), expected_out)
    assert (probs.triu(1) == 0).all()


def test_return_attn_probs_with_dropout():
    q, k, v = make_dense(requires_grad=True)
    torch.manual_seed(5)
    out, _, probs = flash_ext.flash_attn_func(q, k, v, dropout_p=0.5, return_attn_probs=True)
    dropped = probs.detach().signbit()
    assert 0.3 < dropped.float().mean() < 0.7
    assert_close(probs.detach().abs().sum(-1), torch.ones(BATCH, HEADS, SEQLEN))
    kept = torch.where(dropped, 0, probs.detach()) * 2
    values = v.detach().repeat_interleave(HEADS // HEADS_K, 2)
    assert_close(torch.einsum("bhqk,bkhd->bqhd", kept, values), out.detach())
    out.sum().backward()
    assert q.grad is not None


def test_return_attn_probs_of_packed_sequences():
    (q, k, v), lengths = make_packed()
    function = flash_ext.flash_attn_varlen_func
    out, lse, probs = function(q, k, v, *lengths, return_attn_probs=True)
    assert lse.shape == (HEADS, SEQLEN) and probs.shape == (2, HEADS, 4, 4)
    assert (probs[0, :, 2:] == 0).all() and (probs[0, :, :, 2:] == 0).all()
    values = v.repeat_interleave(HEADS // HEADS_K, 1)
    assert_close(torch.einsum("hqk,khd->qhd", probs[1], values[2:]), out[2:])


def test_return_attn_probs_refuses_what_does_not_fit():
    q = torch.empty(1, 1, 1, 1).expand(1, 2**14 + 1, 1, 1)
    with pytest.raises(
        ValueError, match=r"seqlen_q 16385.*more than 268435456 elements.*return_lse=True"
    ):
        flash_ext.flash_attn_func(q, q, q, return_attn_probs=True)
    assert arguments.MAX_PROBS == 268435456


def test_wrong_ranks_with_return_attn_probs_are_the_operators_to_refuse():
    with pytest.raises(ValueError, match="q has 1 dimensions"):
        flash_ext.flash_attn_func(*[torch.zeros(3)] * 3, return_attn_probs=True)
    (q, k, v), (cu_seqlens, _, *longest) = make_packed()
    with pytest.raises(ValueError, match="cu_seqlens_q has shape"):
        flash_ext.flash_attn_varlen_func(
            *(q, k, v, cu_seqlens[0], cu_seqlens, *longest), return_attn_probs=True
        )


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("kind", [torch.tensor, int])
def test_compiled_probs_need_an_int_max_seqlen(kind, fullgraph):
    """Never another shape than eagerly: the tensor is refused, or read outside of the graph."""
    torch.compiler.reset()

    @torch.compile(backend="eager", fullgraph=fullgraph)
    def function(q, k, v, cu_seqlens, longest):
        return flash_ext.flash_attn_varlen_func(
            *(q, k, v, cu_seqlens, cu_seqlens, longest, longest), return_attn_probs=True
        )

    (q, k, v), (cu_seqlens, *_) = make_packed()
    if kind is int or not fullgraph:
        assert function(q, k, v, cu_seqlens, kind(4))[2].shape == (2, HEADS, 4, 4)
        return
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="max_seqlen_q is a tensor while compiling"
    ):
        function(q, k, v, cu_seqlens, kind(4))


def test_attn_probs_asks_for_the_mask_that_was_used():
    q, k, v = make_dense()
    _, lse = flash_ext.attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match="rng_state is None"):
        flash_ext.attn_probs(q, k, lse, dropout_p=0.5)
    with pytest.raises(TypeError, match="lse is a NoneType"):
        flash_ext.attn_probs(q, k, None)
    with pytest.raises(TypeError, match="dropout_p is a str"):
        flash_ext.attn_probs(q, k, lse, dropout_p="x")


@pytest.mark.parametrize("name", [name for name in FLASH_ATTN if "packed" in name])
def test_packed_equals_unpacked_with_one_gradient(name):
    function, lengths, packed_lengths = flash_ext.flash_attn_func, (), ()
    if "varlen" in name:
        function = flash_ext.flash_attn_varlen_func
        (q, k, v), lengths = make_packed(num_heads_k=HEADS)
        packed_lengths = lengths[1:3] if "qkv" in name else lengths
    else:
        q, k, v = make_dense(num_heads_k=HEADS)
    stacks = [(q, k, v)] if "qkv" in name else [(q,), (k, v)]
    packed = [torch.stack(x, -3) if len(x) > 1 else x[0] for x in stacks]
    leaves = [x.requires_grad_() for x in packed]
    parts = [y for x in leaves for y in (x.unbind(-3) if x.dim() > q.dim() else [x])]
    options = {"causal": True, "bias": torch.randn(1, HEADS, 1, 1), "sinks": torch.randn(HEADS)}
    out = getattr(flash_ext, name)(*leaves, *packed_lengths, **options)
    expected = function(*parts, *lengths, **options)
    assert torch.equal(out, expected)
    got = torch.autograd.grad(out.square().sum(), leaves)
    want = torch.autograd.grad(expected.square().sum(), leaves)
    for x, a, b in zip(leaves, got, want, strict=True):
        assert a.shape == x.shape and torch.equal(a, b)


# ---- explain, kernels ----------------------------------------------------------------------------


def test_kernels_are_parsed():
    kernels = flash_ext.kernels()
    assert {k["pass"] for k in kernels} == {"forward", "backward", "probs", "append", "rotary"}
    assert all(isinstance(k["features"], list) for k in kernels)


def test_explain_names_a_kernel_of_the_table():
    q, k, v = make_dense()
    names = {k["name"] for k in flash_ext.kernels()}
    for backward in (False, True):
        text = flash_ext.explain(q, k, v, causal=True, dropout_p=0.1, backward=backward)
        assert any(f"serves: {name}" in text for name in names)


# ---- padding -------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
UNUSED = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
def test_unpad_pad_round_trip(dtype):
    x = torch.randn(3, 4, 2, 5, requires_grad=True)
    output, indices, cu_seqlens, max_seqlen, seqused = flash_ext.unpad_input(x, MASK.to(dtype))
    assert torch.equal(output, x[MASK.bool()])
    assert indices.tolist() == [0, 1, 4, 5, 6, 7] and indices.dtype == torch.int64
    assert cu_seqlens.tolist() == [0, 2, 6, 6] and cu_seqlens.dtype == torch.int32
    assert max_seqlen == 4 and type(max_seqlen) is int
    assert seqused.tolist() == [2, 4, 0] and seqused.dtype == torch.int32
    padded = flash_ext.pad_input(output, indices, 3, 4)
    assert torch.equal(padded, x * MASK[:, :, None, None])
    weights = torch.randn_like(padded)
    (grad,) = torch.autograd.grad((padded * weights).sum(), x)
    assert torch.equal(grad, weights * MASK[:, :, None, None])


def test_unused_places_are_packed_but_not_used():
    unpadded = flash_ext.unpad_input(torch.randn(3, 4, 1), MASK, UNUSED)
    assert unpadded.indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    assert unpadded.cu_seqlens.tolist() == [0, 3, 7, 8]
    assert unpadded.seqused.tolist() == [2, 4, 0]
    assert unpadded.output.shape == (8, 1)


def test_unpad_of_nothing():
    unpadded = flash_ext.unpad_input(torch.randn(0, 4, 2), torch.ones(0, 4))
    assert unpadded.max_seqlen == 0 and unpadded.cu_seqlens.tolist() == [0]
    unpadded = flash_ext.unpad_input(torch.randn(2, 4, 2), torch.zeros(2, 4))
    assert unpadded.max_seqlen == 0 and unpadded.output.shape == (0, 2)


def test_padding_refuses_what_does_not_match():
    x = torch.randn(3, 4, 2)
    with pytest.raises(ValueError, match="attention_mask has shape"):
        flash_ext.unpad_input(x, MASK[:2])
    with pytest.raises(ValueError, match="unused_mask has shape"):
        flash_ext.unpad_input(x, MASK, UNUSED[:, :3])
    with pytest.raises(TypeError, match="attention_mask is a list"):
        flash_ext.unpad_input(x, MASK.tolist())
    with pytest.raises(IndexError, match="out of bounds"):
        flash_ext.pad_input(torch.randn(1, 2), torch.tensor([12]), 3, 4)
    with pytest.raises(ValueError, match="hidden_states has 5 rows and indices 4"):
        flash_ext.pad_input(torch.randn(5, 2), torch.arange(4), 3, 4)


# ---- check_inputs --------------------------------------------------------------------------------


def test_check_inputs_accepts_what_is_right():
    q, k, v = make_dense()
    bias = torch.full((1, 1, 1, SEQLEN), -torch.inf)
    sinks = torch.full((HEADS,), -torch.inf)
    flash_ext.check_inputs(q, k, v, bias, torch.rand(HEADS), sinks, seqused_k=util.lengths([0, 6]))
    (q, k, v), (cu_q, cu_k, max_q, max_k) = make_packed()
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    flash_ext.check_inputs(q, k, v, **lengths, max_seqlen_q=max_q, max_seqlen_k=torch.tensor(max_k))


BAD_PACKED = {
    "start": ({"cu_seqlens_q": [1, 2, 6]}, "cu_seqlens_q begins with 1"),
    "falls": ({"cu_seqlens_k": [0, 4, 2]}, "cu_seqlens_k falls from 4 to 2 at entry 2"),
    "total": ({"cu_seqlens_k": [0, 2, 7]}, "cu_seqlens_k ends with 7 but the tensor has 6"),
    "longer": ({"max_seqlen_q": 3}, "max_seqlen_q is 3 but sequence 1 has 4"),
    "seqused_long": ({"seqused_k": [2, 5]}, r"seqused_k\[1\] is 5 but sequence 1 has 4 keys"),
    "seqused_negative": ({"seqused_q": [-1, 4]}, r"seqused_q\[0\] is -1"),
}


@pytest.mark.parametrize("case", BAD_PACKED)
def test_check_inputs_finds_bad_lengths(case):
    change, message = BAD_PACKED[case]
    (q, k, v), (cu_q, cu_k, _, _) = make_packed()
    arguments = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    arguments |= {n: util.lengths(x) if isinstance(x, list) else x for n, x in change.items()}
    flash_ext.attention(q, k, v, **arguments)
    with pytest.raises(ValueError, match=message):
        flash_ext.check_inputs(q, k, v, **arguments)


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_check_inputs_finds_values_that_poison_rows(name):
    q, k, v = make_dense()
    x = torch.zeros((1, HEADS, 1, SEQLEN) if name == "bias" else HEADS)
    x.view(-1)[-1] = torch.nan
    with pytest.raises(ValueError, match=rf"{name}\[.*\] is nan"):
        flash_ext.check_inputs(q, k, v, **{name: x})


def test_check_inputs_refuses_what_attention_refuses():
    q, k, v = make_dense()
    with pytest.raises(ValueError, match="rng_state has dtype"):
        flash_ext.check_inputs(q, k, v, dropout_p=0.1, rng_state=torch.zeros(2))
    with pytest.raises(TypeError, match="window is a int"):
        flash_ext.check_inputs(q, k, v, window=1)


def test_probabilities_beside_a_sink_of_huge_logits():
    """lse alone has lost its last digits there: the sum must know of the sink."""
    q = torch.full((1, 1, 1, 1), 20.0)
    k = torch.full((1, 2, 1, 1), 20.0)
    sinks = torch.tensor([400.0])
    _, lse, probs = flash_ext.flash_attn_func(
        q, k, k, softmax_scale=1.0, return_attn_probs=True, sinks=sinks
    )
    assert_close(probs, torch.full((1, 1, 1, 2), 1 / 3))
    assert_close(flash_ext.attn_probs(q, k, lse, sinks=sinks, softmax_scale=1.0), probs)
