"""flash_ext.scaled_dot_product_attention and route_sdpa against torch's own function."""

import inspect
import threading

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

import flash_ext
from flash_ext import sdpa

SERVED = "required: forward\nserves: a_kernel\nnot another: reason"


def randn(*shape, seed=0, dtype=torch.float64, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(grad)


def torch_sdpa(*args, **kwargs):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def check(tensors, attn_mask=None, **options):
    """Outputs and gradients equal torch's, in fp64."""
    inputs = [*tensors, *([attn_mask] if attn_mask is not None and attn_mask.requires_grad else [])]
    expected = torch_sdpa(*tensors, attn_mask, **options)
    got = flash_ext.scaled_dot_product_attention(*tensors, attn_mask, **options)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    torch.testing.assert_close(got, expected)
    dout = randn(*expected.shape, seed=9, grad=False)
    for a, b in zip(
        torch.autograd.grad(got, inputs, dout, allow_unused=True),
        torch.autograd.grad(expected, inputs, dout, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def qkv(lead=(2,), heads=4, heads_k=None, rows=5, keys=7, dim=8, dim_v=None, **options):
    heads_k, dim_v = heads_k or heads, dim_v or dim
    shapes = [(heads, rows, dim), (heads_k, keys, dim), (heads_k, keys, dim_v)]
    return [randn(*lead, *shape, seed=i, **options) for i, shape in enumerate(shapes)]


def test_signature_is_torchs():
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema.arguments
    ours = inspect.signature(flash_ext.scaled_dot_product_attention).parameters.values()
    assert [a.name for a in schema] == [p.name for p in ours]
    assert [a.kwarg_only for a in schema] == [p.kind == p.KEYWORD_ONLY for p in ours]
    assert [a.default_value for a in schema[3:]] == [p.default for p in list(ours)[3:]]


@pytest.mark.parametrize("rows,keys", [(6, 6), (3, 7), (7, 3), (1, 5), (5, 1)])
def test_causal_is_top_left(rows, keys):
    check(qkv(rows=rows, keys=keys), is_causal=True)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_batch_dimensions(lead, masked):
    mask = randn(*lead, 1, 5, 7, seed=5) if masked else None
    check(qkv(lead), mask)


def test_two_dimensions():
    check([randn(5, 8), randn(7, 8, seed=1), randn(7, 6, seed=2)])


def test_batch_dimensions_broadcast():
    q, k, v = qkv((2, 3))
    k, v = (x.detach()[:1].requires_grad_() for x in (k, v))
    check([q, k, v])
    q, k, v = qkv((4,), heads_k=1)
    check([q, k, v])


@pytest.mark.parametrize(
    "shape", [(5, 7), (1, 7), (4, 5, 7), (2, 1, 5, 7), (2, 4, 1, 7), (1, 1, 5, 1)], ids=str
)
@pytest.mark.parametrize("kind", ["bool", "number"])
def test_masks(shape, kind):
    mask = randn(*shape, seed=5)
    check(qkv(), mask > 0 if kind == "bool" else mask)


def test_row_that_sees_no_key_is_zero():
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    check(qkv(), mask)


@pytest.mark.parametrize("make", [bias.causal_upper_left, bias.causal_lower_right])
def test_causal_bias_classes(make):
    tensors = qkv(rows=4, keys=7)
    got = flash_ext.scaled_dot_product_attention(*tensors, make(4, 7))
    dense = make(4, 7)._materialize("cpu")
    torch.testing.assert_close(got, torch_sdpa(*tensors, dense))


def test_grouped_heads_scale_and_head_dims():
    check(qkv(heads=6, heads_k=2, dim_v=5), enable_gqa=True, scale=0.3)


def test_dropout():
    q, k, v = qkv(grad=False)
    torch.manual_seed(0)
    a = flash_ext.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(0)
    b = flash_ext.scaled_dot_product_attention(q, k, v, None, 0.5)
    assert torch.equal(a, b)
    assert not torch.allclose(a, torch_sdpa(q, k, v))
    assert flash_ext.scaled_dot_product_attention(q, k, v, dropout_p=1.0).eq(0).all()


def test_memory_layout_suits_joined_heads():
    out = flash_ext.scaled_dot_product_attention(*qkv())
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"is_causal": True, "attn_mask": torch.ones(5, 7).bool()}, "attn_mask .* is_causal"),
        ({"key": randn(7, 8)}, "query has 4 dimensions, key 2"),
        ({"key": randn(2, 2, 7, 8), "value": randn(2, 2, 7, 8)}, "enable_gqa"),
    ],
)
def test_refusals(change, message):
    names = dict(zip(("query", "key", "value"), qkv(), strict=True))
    with pytest.raises(ValueError, match=message):
        flash_ext.scaled_dot_product_attention(**(names | change))


def test_types_are_checked():
    with pytest.raises(TypeError, match="query is a list"):
        flash_ext.scaled_dot_product_attention([1.0], *qkv()[1:])


@pytest.mark.parametrize("rows,keys", [(6, 6), (7, 3)])
def test_compile(rows, keys):
    torch._dynamo.reset()
    tensors = qkv(rows=rows, keys=keys, dtype=torch.float32)
    function = torch.compile(
        flash_ext.scaled_dot_product_attention, backend="aot_eager", fullgraph=True
    )
    got, expected = (f(*tensors, is_causal=True) for f in (function, torch_sdpa))
    torch.testing.assert_close(got, expected)


# ---- route_sdpa ----------------------------------------------------------------------------------


def test_routed_calls_are_served():
    q, k, v = qkv(dtype=torch.bfloat16)
    original = F.scaled_dot_product_attention
    with flash_ext.route_sdpa() as routing:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert F.scaled_dot_product_attention is original
    assert (routing.served, len(routing.left)) == (1, 0)
    assert torch.equal(out, flash_ext.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize(
    "make,reason",
    [
        (lambda: qkv(dim=300), "head_dim 300 is above 256"),
        (lambda: [x.to(torch.complex64) for x in qkv()], "ComplexFloat"),
        (lambda: [x.to("meta") for x in qkv()], "device meta"),
    ],
    ids=["head_dim", "dtype", "meta"],
)
def test_other_calls_stay_with_torch(make, reason):
    tensors = make()
    with flash_ext.route_sdpa() as routing:
        try:
            out = F.scaled_dot_product_attention(*tensors)
        except RuntimeError:
            out = None  # torch's own refusal
    assert routing.served == 0 and sum(routing.left.values()) == 1
    assert reason in next(iter(routing.left))
    if out is not None and not out.is_meta:
        torch.testing.assert_close(out, F.scaled_dot_product_attention(*tensors))


def test_what_no_kernel_serves_stays_with_torch(monkeypatch):
    """Here is no such call: on a GPU fp32, say."""
    text = "required: backward, float32, head_dim 8\nserves: no kernel\nnot x: is for bfloat16"
    monkeypatch.setattr(sdpa, "explain", lambda *args, backward, **kw: text if backward else SERVED)
    sdpa._unserved.cache_clear()
    with flash_ext.route_sdpa() as routing:
        F.scaled_dot_product_attention(*qkv())
        with torch.no_grad():
            F.scaled_dot_product_attention(*qkv())
    sdpa._unserved.cache_clear()
    assert routing.served == 1
    assert routing.left == {"no kernel; required: backward, float32, head_dim 8": 1}


def test_a_served_call_is_explained_as_sdpa_reads_it():
    q = torch.empty(1, 1, 1, 8)
    lines = flash_ext.explain(q, q, q).splitlines()
    assert lines[0].startswith("required: forward") and lines[1].startswith("serves: cpu_")


def test_mask_with_is_causal_is_torchs_affair():
    with flash_ext.route_sdpa() as routing:
        F.scaled_dot_product_attention(*qkv(), torch.ones(5, 7).bool(), is_causal=True)
    assert routing.left == {"attn_mask with is_causal": 1}


def test_subclasses_stay_with_torch():
    class Own(torch.Tensor):
        pass

    q, k, v = (x.detach().as_subclass(Own) for x in qkv())
    with flash_ext.route_sdpa() as routing:
        F.scaled_dot_product_attention(q, k, v)
    assert routing.left == {"a tensor of a class of its own": 1}


def test_routing_nests_and_decorates():
    original = F.scaled_dot_product_attention

    @flash_ext.route_sdpa()
    def call():
        return F.scaled_dot_product_attention(*qkv())

    with flash_ext.route_sdpa() as outer:
        with flash_ext.route_sdpa() as inner:
            F.scaled_dot_product_attention(*qkv())
        assert F.scaled_dot_product_attention is not original
        call()
        F.scaled_dot_product_attention(*qkv())
    assert F.scaled_dot_product_attention is original
    assert (outer.served, inner.served) == (1, 1)
    assert "served=1" in repr(outer)
    with pytest.raises(KeyError), flash_ext.route_sdpa():
        raise KeyError
    assert F.scaled_dot_product_attention is original


def test_routing_holds_for_other_threads():
    with flash_ext.route_sdpa() as routing:
        threads = [
            threading.Thread(target=F.scaled_dot_product_attention, args=qkv()) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert routing.served == 3


def test_routed_multihead_attention():
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = randn(2, 9, 32, dtype=torch.float32)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(9)
    padding = torch.zeros(2, 9).bool()
    padding[1, 6:] = True
    padding = torch.zeros(2, 9).masked_fill(padding, -torch.inf)

    def run():
        return layer(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)[0]

    expected = run()
    with flash_ext.route_sdpa() as routing:
        got = run()
    assert routing.served == 1
    torch.testing.assert_close(got, expected)


def test_routed_under_autocast():
    q, k, v = qkv(dtype=torch.float32)
    with flash_ext.route_sdpa() as routing, torch.autocast("cpu", torch.bfloat16):
        out = F.scaled_dot_product_attention(q, k, v)
    assert routing.served == 1 and out.dtype == torch.bfloat16


@pytest.mark.parametrize("dim,target", [(8, "flash.attn"), (300, "scaled_dot_product")])
def test_routed_under_compile(dim, target):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def function(q, k, v):
        return F.scaled_dot_product_attention(2 * q, k, v, is_causal=True)

    tensors = qkv(dtype=torch.float32, dim=dim)
    expected = torch_sdpa(2 * tensors[0], *tensors[1:], is_causal=True)
    with flash_ext.route_sdpa():
        torch.testing.assert_close(function(*tensors), expected)
    assert len(graphs) == 1 and target in graphs[0]


# ---- a model that knows nothing of flash_ext -----------------------------------------------------


class Block(torch.nn.Module):
    """As the well-known small GPTs call torch: heads transposed, dropout 0 as an int in eval."""

    def __init__(self, width=32, heads=4, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, seqlen, width = x.size()
        q, k, v = self.qkv(self.norms[0](x)).split(width, dim=2)
        shape = (batch, seqlen, self.heads, width // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).contiguous().view(batch, seqlen, width))
        return x + self.mlp(self.norms[1](x))


class SmallGPT(torch.nn.Module):
    def __init__(self, vocabulary=32, block_size=16, width=32, layers=2):
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.positions = torch.nn.Embedding(block_size, width)
        self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        logits = self.head(self.blocks(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def losses(steps=15):
    torch.manual_seed(0)
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(32, (4, 17))
    history = []
    for _ in range(steps):
        loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history


def test_a_gpt_trains_unchanged():
    expected = losses()
    with flash_ext.route_sdpa() as routing:
        got = losses()
    assert routing.served == 2 * 15 and not routing.left
    assert expected[-1] < 0.5 * expected[0]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_a_kept_function_is_torchs_after_the_last_route():
    """A from-import made inside the context outlives it."""
    with flash_ext.route_sdpa():
        kept = torch.nn.functional.scaled_dot_product_attention
    x = torch.randn(1, 2, 4, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    assert kept is not torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(kept(x, x, x), expected)


@pytest.mark.parametrize(
    "shape_q, shape_k",
    [((4, 8), (6, 8)), ((2, 3, 4, 8), (3, 6, 8)), ((2, 1, 4, 8), (2, 4, 6, 8))],
    ids=["rank 2", "other ranks", "fewer query heads"],
)
def test_shapes_that_torch_broadcasts_stay_with_torch(shape_q, shape_k):
    q, k = torch.randn(shape_q), torch.randn(shape_k)
    expected = F.scaled_dot_product_attention(q, k, k)
    with flash_ext.route_sdpa() as routing:
        assert torch.equal(F.scaled_dot_product_attention(q, k, k), expected)
    assert routing.served == 0 and sum(routing.left.values()) == 1
