"""How each library is called on a point: ours, and what else torch has.

Every contestant gets the same values. SDPA's layout (batch, heads, seqlen, head_dim) is a view of
the same memory, as in a model that projects to (batch, seqlen, heads, head_dim). A function here
returns the call to be timed, without anything that its user would do once before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_ext

from .grid import Point

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BACKENDS = {
    "fa2": SDPBackend.FLASH_ATTENTION,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,  # its name on CPUs, where it is no FlashAttention-2
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "mem_eff": SDPBackend.EFFICIENT_ATTENTION,
    "naive": SDPBackend.MATH,
}
NAMES = (*BACKENDS, "flex", "op")
SOFTCAP, DROPOUT_P = 30.0, 0.1
MOST_TOKENS = 4  # of a decode point
# Slow to run or to compile: timed at this head_dim alone.
SLOW, SLOW_HEAD_DIM = ("mem_eff", "flex", "naive"), 128


class NotHere(Exception):
    """A contestant that does not take part in a point, with the reason."""


@dataclass
class Tensors:
    """A point's inputs, random normal; q, k, v (batch, seqlen, heads, head_dim) or packed."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    cu_seqlens: torch.Tensor | None

    def leaves(self) -> list[torch.Tensor]:
        return [self.q, self.k, self.v]


def make_tensors(point: Point, device: torch.device, seed: int = 0) -> Tensors:
    """The point's inputs; they require grad where the backward pass is measured."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads, dim, needed):
        rows = (sum(point.lengths),) if point.lengths else (point.batch, point.seqlen)
        if point.mode == "decode":  # in place: a cache in fp32 beside it might not fit
            return torch.randn(
                *rows, heads, dim, generator=generator, device=device, dtype=DTYPES[point.dtype]
            )
        x = torch.randn(*rows, heads, dim, generator=generator, device=device)
        return x.to(DTYPES[point.dtype]).requires_grad_(needed)

    cu_seqlens = None
    if point.lengths:
        ends = torch.tensor((0, *point.lengths)).cumsum(0)
        cu_seqlens = ends.to(device, torch.int32)
    if point.mode == "decode":
        q = torch.randn(point.batch, MOST_TOKENS, point.heads_q, point.head_dim,
                        generator=generator, device=device).to(DTYPES[point.dtype])  # fmt: skip
        k, v = (
            draw(point.heads_k, point.head_dim, False),
            draw(point.heads_k, point.head_dim_v, False),
        )
        return Tensors(q, k, v, q, None)
    return Tensors(
        q=draw(point.heads_q, point.head_dim, point.backward),
        k=draw(point.heads_k, point.head_dim, point.backward),
        v=draw(point.heads_k, point.head_dim_v, point.backward),
        dout=draw(point.heads_q, point.head_dim_v, False),
        cu_seqlens=cu_seqlens,
    )


# ---- ours ----------------------------------------------------------------------------------------


def our_options(point: Point, t: Tensors) -> dict:
    """The keywords of flash_ext.attention that make up the point."""
    options: dict = {"causal": point.causal}
    if point.lengths:
        options |= {"cu_seqlens_q": t.cu_seqlens, "cu_seqlens_k": t.cu_seqlens}
        options |= {"max_seqlen_q": point.seqlen, "max_seqlen_k": point.seqlen}
    if point.window:
        options["window"] = (point.window - 1, 0)
    return options | _feature(point, t.q.device, t.q.dtype)


def _feature(point: Point, device, dtype) -> dict:
    """The keyword of a feature, its tensors drawn anew."""
    square = (1, 1, point.seqlen, point.seqlen)
    if size := point.page_size:  # in a random order, all of them full
        pages = torch.randperm(point.batch * point.seqlen // size, device=device)
        used = torch.full((point.batch,), point.seqlen, dtype=torch.int32, device=device)
        return {"page_table": pages.int().view(point.batch, -1), "seqused_k": used}
    if point.features == "softcap":
        return {"softcap": SOFTCAP}
    if point.features == "alibi":
        return {"alibi_slopes": torch.rand(point.heads_q, device=device)}
    if point.features == "sinks":
        return {"sinks": torch.randn(point.heads_q, device=device)}
    if point.features == "dropout":
        # A fixed state: drawing one is another kernel.
        state = torch.tensor([1, 2], dtype=torch.int64, device=device)
        return {"dropout_p": DROPOUT_P, "rng_state": state}
    if point.features == "bool mask":
        return {"bias": torch.rand(square, device=device) < 0.9}
    if point.features == "bias":
        return {"bias": torch.randn(square, device=device, dtype=dtype)}
    return {}


def ours(point: Point, t: Tensors) -> Callable:
    """flash_ext's call."""
    options = our_options(point, t)
    q, k, v = _our_tensors(point, t)
    return lambda: flash_ext.attention(q, k, v, **options)


def _our_tensors(point: Point, t: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as the call takes them: a decode point's tokens, its keys perhaps in pages."""
    if point.mode != "decode":
        return t.q, t.k, t.v
    k, v = t.k, t.v
    if size := point.page_size:
        k, v = (x.view(-1, size, *x.shape[2:]) for x in (k, v))
    return t.q[:, : point.tokens], k, v


def served_by(point: Point, t: Tensors) -> str:
    """The kernel that serves ours; NotHere when none does.

    A backward pass is asked about with the features of the call alone, which is what is measured:
    gradients of q, k and v.
    """
    tensors, options = _our_tensors(point, t), our_options(point, t)
    text = flash_ext.explain(*tensors, **options, backward=point.backward)
    name = text.split("serves: ", 1)[1].split("\n", 1)[0]
    if name == "no kernel":
        raise NotHere(f"no kernel for {text.splitlines()[0].removeprefix('required: ')}")
    return name


# ---- peers ---------------------------------------------------------------------------------------


def peer_names(point: Point, device: torch.device) -> tuple[str, ...]:
    """Who is measured beside ours."""
    gpu = device.type == "cuda"
    flash = "fa2" if gpu else "sdpa_flash"
    if point.mode.startswith("host"):
        return ("op", flash)
    if point.lengths:
        return (flash,) if gpu else ()
    if point.mode == "decode":
        return () if point.features else ((flash, "cudnn") if gpu else (flash,))
    if point.features:
        others = {"dropout": (flash,), "bool mask": ("mem_eff",), "bias": ("mem_eff",)}
        return others.get(point.features, ()) if gpu else ()
    if point.mode.startswith("features"):
        return (flash,)
    if point.mode.endswith("error"):
        return (flash, "cudnn") if gpu else (flash,)
    if point.mode.startswith("memory") or not gpu:
        return (flash, "naive")
    return (flash, "cudnn", *(SLOW if point.head_dim == SLOW_HEAD_DIM else ()))


def peer(name: str, point: Point, t: Tensors) -> Callable:
    """The peer's call; NotHere when it does not take part."""
    if name == "op":
        return _operator(point, t)
    if name == "flex":
        return _flex(point, t)
    if point.lengths:
        return _packed(point, t)
    if name == "naive":
        _check_memory(point, t)
    q, k, v = (x.transpose(1, 2) for x in (t.q, t.k, t.v))
    if point.mode == "decode":
        q = q[:, :, : point.tokens]
    options: dict = {"is_causal": point.causal, "enable_gqa": point.heads_q != point.heads_k}
    if name == "mem_eff" and options.pop("enable_gqa"):  # which it does not know
        group = point.heads_q // point.heads_k
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    feature = _feature(point, t.q.device, t.q.dtype)
    options |= {"attn_mask": feature.get("bias"), "dropout_p": feature.get("dropout_p", 0.0)}
    backend = BACKENDS[name]

    def call():
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return call


def host_peer(name: str, point: Point, t: Tensors) -> Callable:
    """For host times: with the backend chosen by the caller, outside the loop."""
    if name == "op":
        return _operator(point, t)
    q, k, v = (x.transpose(1, 2) for x in t.leaves())
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=point.causal)


def host_ours(point: Point, t: Tensors) -> Callable:
    """The function that flash-attn's users know."""
    return lambda: flash_ext.flash_attn_func(t.q, t.k, t.v, causal=point.causal)


def _operator(point: Point, t: Tensors) -> Callable:
    """The operator itself, without the Python function's checks."""
    attn = torch.ops.flash.attn
    return lambda: attn(t.q, t.k, t.v, causal=point.causal)[0]


def _check_memory(point: Point, t: Tensors) -> None:
    """SDPA's MATH keeps several score matrices, in fp32 at worst."""
    needed = 5 * 4 * point.batch * point.heads_q * point.seqlen**2
    free = torch.cuda.mem_get_info(t.q.device)[0] if t.q.is_cuda else 4 << 30
    if needed > free / 2:
        raise NotHere(f"its score matrices need about {needed / 2**30:.0f} GiB")


def _packed(point: Point, t: Tensors) -> Callable:
    """torch's own FlashAttention-2 over packed sequences, forward and backward."""
    cu, n = t.cu_seqlens, point.seqlen
    forward = torch.ops.aten._flash_attention_forward
    if not point.backward:
        return lambda: forward(t.q, t.k, t.v, cu, cu, n, n, 0.0, point.causal, False)[0]
    backward = torch.ops.aten._flash_attention_backward
    with torch.no_grad():
        q, k, v = (x.detach() for x in t.leaves())
        out, lse, seed, offset, _ = forward(q, k, v, cu, cu, n, n, 0.0, point.causal, False)
    saved = (out, lse, cu, cu, n, n, 0.0, point.causal, seed, offset)
    return lambda: backward(t.dout, q, k, v, *saved)


@functools.cache
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 64  # one a shape
    return torch.compile(flex_attention, dynamic=False)


def _flex(point: Point, t: Tensors) -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = (x.transpose(1, 2) for x in t.leaves())
    mask = None
    if point.causal:
        n = point.seqlen
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=t.q.device)
    flex, gqa = _compiled_flex(), point.heads_q != point.heads_k
    return lambda: flex(q, k, v, block_mask=mask, enable_gqa=gqa).transpose(1, 2)


def backward_of(call: Callable, t: Tensors) -> Callable:
    """The call's backward pass alone, for q, k and v."""
    out = call()
    leaves = t.leaves()
    return lambda: torch.autograd.grad(out, leaves, t.dout, retain_graph=True)


def both_passes(call: Callable, t: Tensors) -> Callable:
    """The call and its backward pass for q, k and v."""
    leaves = t.leaves()
    dout = torch.randn_like(call())
    return lambda: torch.autograd.grad(call(), leaves, dout)
