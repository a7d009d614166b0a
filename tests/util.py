"""What every test of attention shares: inputs, both ways to run them, and how close is right.

A `Case` says everything that `flash_ext.attention` takes, in small printable values. `run` sends it
through flash_ext forward and backward, `run_reference` through flash_ext.reference in fp64 and step
by step in the case's dtype, and `assert_close_to_reference` compares the three by semantics.md,
"How close is right". `check` is all of that in one call.

Inputs are drawn on the CPU from the case's seed and then moved, so a case means the same numbers on
every device.
"""

import functools
import itertools
import math
import os
import random
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch

import flash_ext
from flash_ext import reference

GRADIENT_NAMES = ("q", "k", "v", "bias", "alibi_slopes", "sinks")

# ---- inputs --------------------------------------------------------------------------------------


def make_qkv(
    seqlens_q,
    seqlens_k,
    num_heads=4,
    num_heads_k=2,
    head_dim=64,
    head_dim_v=None,
    dtype=torch.float32,
    seed=0,
    device="cpu",
    layout="dense",
    gap=(0, 0),
):
    """Random q, k, v.

    seqlens_q, seqlens_k: one length a sequence; dense ones are all alike. layout "dense" gives
    (batch, seqlen, heads, dim), "varlen" (gap[0] + sum + gap[1], heads, dim): gap rows belong to no
    sequence.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(seqlens, heads, dim):
        if layout == "dense":
            shape = (len(seqlens), seqlens[0] if seqlens else 0, heads, dim)
            assert all(n == shape[1] for n in seqlens), f"dense lengths differ: {seqlens}"
        else:
            shape = (sum(seqlens) + sum(gap), heads, dim)
        return torch.randn(shape, generator=generator).to(device, dtype)

    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return (
        draw(seqlens_q, num_heads, head_dim),
        draw(seqlens_k, num_heads_k, head_dim),
        draw(seqlens_k, num_heads_k, head_dim_v),
    )


def cumulative(seqlens, start=0, device="cpu"):
    """cu_seqlens (batch + 1,) int32 that begin at `start`."""
    return torch.tensor([*itertools.accumulate(seqlens, initial=start)], dtype=torch.int32).to(
        device
    )


def lengths(values, device="cpu"):
    """An int32 tensor, or None for None."""
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)


def bits(x):
    """x as integers of its width, so that NaN equals the same NaN and -0 differs from 0."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(widths[x.element_size()])


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


class GuardBands:
    """Tensors inside larger buffers of NaN, at odd offsets and strides; `check` after use.

    A kernel that reads the band shows NaN, one that writes it or the tensor is caught by `check`.
    """

    FILLERS: ClassVar = {torch.int32: 2**30, torch.int64: -1, torch.bool: True}

    def __init__(self):
        self._buffers = []

    def wrap(self, x, last_stride=1, name="tensor"):
        """A copy of x; its last dimension has the given stride."""
        filler = self.FILLERS.get(x.dtype, math.nan)
        if x.dim() == 0:
            return x
        *outer, last = x.shape
        padded = [n + 3 for n in outer] + [last * last_stride + 5]
        buffer = x.new_full((math.prod(padded) + 7,), filler)
        inside = buffer[3 : 3 + math.prod(padded)].view(padded)
        window = [slice(1, 1 + n) for n in outer] + [slice(2, 2 + last * last_stride, last_stride)]
        view = inside[tuple(window)]
        view.copy_(x)
        self._buffers.append((name, buffer, buffer.clone()))
        return view

    def check(self):
        for name, buffer, before in self._buffers:
            assert same_bits(buffer, before), f"{name} or the memory around it was written"


def transposed(x):
    """The same values with heads before rows in memory, as models that keep (b, h, s, d) have."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


# ---- cases ---------------------------------------------------------------------------------------

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.bool: "bool",
}


@dataclass(frozen=True)
class Case:
    """One call of attention and of its backward. `str(case)` names what is not the default."""

    seqlens_q: tuple = (65, 65)  # one length a sequence
    seqlens_k: tuple = (100, 100)
    num_heads: int = 4
    num_heads_k: int = 2
    head_dim: int = 32
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float32
    layout: str = "dense"  # or "varlen"
    gap: tuple = (0, 0)  # varlen: rows before the first and after the last sequence
    max_seqlen: str = "exact"  # varlen: "exact", "none", or "loose" (more than any length)
    causal: bool = False
    window: tuple = (-1, -1)
    softcap: float = 0.0
    bias: str | None = None  # its dimensions: any of "bhqk", each letter or "1"
    bias_dtype: torch.dtype | None = None  # None: the case's
    bias_hides: float = 0.0  # the share of its entries that are -inf; a bool bias hides half
    alibi: str | None = None  # "h" or "bh"
    sinks: str | None = None  # "finite", or "some": every second one -inf
    heads_dtype: torch.dtype = torch.float32  # of alibi_slopes and sinks
    dropout_p: float = 0.0
    seqused_q: tuple | None = None
    seqused_k: tuple | None = None
    softmax_scale: float | None = None
    num_splits: int = 0
    deterministic: bool = False
    lse_grad: bool = True
    magnitude: float = 1.0  # q and k are multiplied by it
    strides: str = "plain"  # "transposed", "odd" (in guard bands) or "last" (last stride 2)
    seed: int = 0
    name: str = ""  # what the case is there for

    def __str__(self):
        parts = [self.name] if self.name else []
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("name", "seed") or value == item.default:
                continue
            value = DTYPE_NAMES.get(value, value) if item.name.endswith("dtype") else value
            text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
            parts.append(item.name if value is True else f"{item.name}={text}")
        return "-".join(parts) or "default"

    @property
    def batch(self):
        return len(self.seqlens_q)

    @property
    def is_varlen(self):
        return self.layout == "varlen"

    def max_seqlens(self):
        """(max_seqlen_q, max_seqlen_k) as passed: None when dense or left out."""
        if not self.is_varlen or self.max_seqlen == "none":
            return None, None
        more = 3 if self.max_seqlen == "loose" else 0
        return tuple(max(n, default=0) + more for n in (self.seqlens_q, self.seqlens_k))

    def bias_size(self):
        """(batch, num_heads, seqlen_q, seqlen_k) of a bias that is not broadcast."""
        totals = [sum(n) + sum(self.gap) for n in (self.seqlens_q, self.seqlens_k)]
        given = self.max_seqlens()
        if not self.is_varlen:
            given = [max(n, default=0) for n in (self.seqlens_q, self.seqlens_k)]
        return (
            self.batch,
            self.num_heads,
            *(total if n is None else n for n, total in zip(given, totals, strict=True)),
        )


# Everything at once, in a case of the default shapes.
ALL_FEATURES = {
    **{"bias": "1hqk", "alibi": "bh", "sinks": "some", "softcap": 4.0, "dropout_p": 0.2},
    **{"causal": True, "window": (50, -1), "seqused_k": (100, 40)},
}


@dataclass
class Inputs:
    """A case's tensors. `differentiable` go first into attention, `options` are its keywords."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    options: dict  # window is a pair
    dout: torch.Tensor
    dlse: torch.Tensor | None
    bands: GuardBands = field(default_factory=GuardBands)

    def differentiable(self):
        """Those of GRADIENT_NAMES that have a gradient, by name."""
        named = {name: getattr(self, name) for name in GRADIENT_NAMES}
        return {n: x for n, x in named.items() if x is not None and x.dtype != torch.bool}

    def tensors(self):
        """Every tensor that goes in, by name."""
        named = {name: getattr(self, name) for name in (*GRADIENT_NAMES, "dout", "dlse")}
        named |= self.options
        return {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}

    def replace(self, **tensors):
        """The same inputs with other tensors or options."""
        names = {item.name for item in fields(self)}
        mine = {name: x for name, x in tensors.items() if name in names}
        options = {**self.options, **{n: x for n, x in tensors.items() if n not in names}}
        return replace(self, **mine, options=options)


def _make_bias(case, generator):
    if case.bias is None:
        return None
    shape = [
        n if letter != "1" else 1 for n, letter in zip(case.bias_size(), case.bias, strict=True)
    ]
    dtype = case.bias_dtype or case.dtype
    chance = torch.rand(shape, generator=generator)
    if dtype == torch.bool:
        return chance < 0.5
    bias = torch.randn(shape, generator=generator).to(dtype)
    return bias.masked_fill(chance < case.bias_hides, -math.inf)


def _make_heads(case, generator):
    """alibi_slopes and sinks."""
    shapes = {"h": (case.num_heads,), "bh": (case.batch, case.num_heads), None: ()}
    slopes = 0.3 * torch.rand(shapes[case.alibi], generator=generator)
    sinks = torch.randn(case.num_heads, generator=generator)
    if case.sinks == "some":
        sinks[1::2] = -math.inf
    return (
        slopes.to(case.heads_dtype) if case.alibi else None,
        sinks.to(case.heads_dtype) if case.sinks else None,
    )


def _arrange(x, name, case, bands):
    """The same values with the strides that the case asks for."""
    if x is None or case.strides == "plain":
        return x
    if case.strides == "transposed":
        return transposed(x) if x.dim() >= 3 and name != "dlse" else x
    return bands.wrap(x, last_stride=2 if case.strides == "last" else 1, name=name)


def make_inputs(case, device="cpu"):
    """The tensors of a case."""
    q, k, v = make_qkv(
        case.seqlens_q,
        case.seqlens_k,
        case.num_heads,
        case.num_heads_k,
        case.head_dim,
        case.head_dim_v,
        torch.float32,
        case.seed,
        layout=case.layout,
        gap=case.gap,
    )
    generator = torch.Generator().manual_seed(1000 + case.seed)
    bias = _make_bias(case, generator)
    slopes, sinks = _make_heads(case, generator)
    dout = torch.randn((*q.shape[:-1], v.shape[-1]), generator=generator).to(case.dtype)
    lse_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    dlse = torch.randn(lse_shape, generator=generator).to(lse_dtype) if case.lse_grad else None
    cu_q = cu_k = None
    if case.is_varlen:
        cu_q, cu_k = (cumulative(n, case.gap[0]) for n in (case.seqlens_q, case.seqlens_k))
    rng_state = None
    if case.dropout_p > 0:
        rng_state = torch.tensor([0x123456789ABCDEF - case.seed, -case.seed], dtype=torch.int64)
    tensors = {
        "q": (case.magnitude * q).to(case.dtype),
        "k": (case.magnitude * k).to(case.dtype),
        "v": v.to(case.dtype),
        "bias": bias,
        "alibi_slopes": slopes,
        "sinks": sinks,
        "dout": dout,
        "dlse": dlse,
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "seqused_q": lengths(case.seqused_q),
        "seqused_k": lengths(case.seqused_k),
        "rng_state": rng_state,
    }
    bands = GuardBands()
    for name, x in tensors.items():
        tensors[name] = _arrange(x if x is None else x.to(device), name, case, bands)
    max_seqlen_q, max_seqlen_k = case.max_seqlens()
    scalars = {
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "window": case.window,
        "softcap": case.softcap,
        "dropout_p": case.dropout_p,
        "deterministic": case.deterministic,
        "num_splits": case.num_splits,
    }
    first = (*GRADIENT_NAMES, "dout", "dlse")
    options = {name: x for name, x in tensors.items() if name not in first} | scalars
    return Inputs(**{name: tensors[name] for name in first}, options=options, bands=bands)


def pairwise(levels, seed=0):
    """Rows {factor: level} such that every pair of levels of two factors is in some row.

    levels: {factor: its levels}. Greedy: each row starts from a pair not seen yet and takes, factor
    by factor, the level that adds most pairs. The same seed gives the same rows.
    """
    generator = random.Random(seed)
    place = {factor: i for i, factor in enumerate(levels)}

    def pair(a, b):
        return (a, b) if place[a[0]] < place[b[0]] else (b, a)

    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(levels, 2)
        for x in levels[a]
        for y in levels[b]
    }
    starts = sorted(missing, key=repr)
    generator.shuffle(starts)
    rows = []
    for start in starts:
        if start not in missing:
            continue
        row = dict(start)
        rest = [factor for factor in levels if factor not in row]
        generator.shuffle(rest)
        for factor in rest:
            options = list(levels[factor])
            generator.shuffle(options)
            row[factor] = max(
                options,
                key=lambda x: sum(pair((factor, x), other) in missing for other in row.items()),
            )
        missing -= {pair(a, b) for a, b in itertools.combinations(row.items(), 2)}
        rows.append(row)
    return rows


# ---- running -------------------------------------------------------------------------------------


class Result(NamedTuple):
    """out, lse and the gradients by their input's name."""

    out: torch.Tensor
    lse: torch.Tensor
    grads: dict

    def tensors(self):
        return {"out": self.out, "lse": self.lse} | {f"d{n}": g for n, g in self.grads.items()}


def _differentiate(function, inputs, cast, needed=None, unused_is_zero=False):
    """Result of function(*the six differentiable arguments), which are cast first."""
    leaves = {name: cast(name, x).detach() for name, x in inputs.differentiable().items()}
    wanted = {n: x.requires_grad_() for n, x in leaves.items() if needed is None or n in needed}
    arguments = [leaves.get(name, getattr(inputs, name)) for name in GRADIENT_NAMES]
    out, lse = function(*arguments)
    outputs, grads = [out], [inputs.dout.to(out.dtype)]
    if inputs.dlse is not None:
        outputs, grads = [out, lse], [*grads, inputs.dlse.to(lse.dtype)]
    results = []
    if wanted:
        leaves = list(wanted.values())
        results = torch.autograd.grad(outputs, leaves, grads, materialize_grads=unused_is_zero)
    return Result(out.detach(), lse.detach(), dict(zip(wanted, results, strict=True)))


class _UninitialisedIsNan:
    """What a kernel allocates and does not write reads as NaN: torch's deterministic mode."""

    def __init__(self, active):
        self.active = active

    def __enter__(self):
        self.before = torch.are_deterministic_algorithms_enabled()
        if self.active:
            torch.use_deterministic_algorithms(True)

    def __exit__(self, *_):
        torch.use_deterministic_algorithms(self.before)


def run_inputs(inputs, needed=None, fill=None):
    """flash_ext on these inputs, forward and backward; asserts that no input was written.

    needed: the names that require a gradient; None: all that can have one. fill: uninitialised
    memory reads as NaN, which also asks for deterministic kernels; None: on the CPU.
    """
    fill = inputs.q.device.type == "cpu" if fill is None else fill
    before = {name: x.clone() for name, x in inputs.tensors().items()}
    with _UninitialisedIsNan(fill):
        result = _differentiate(
            lambda *args: flash_ext.attention(*args, **inputs.options, return_lse=True),
            inputs,
            lambda _, x: x,
            needed,
        )
    for name, x in inputs.tensors().items():
        assert same_bits(x, before[name]), f"{name} was written"
    inputs.bands.check()
    return result


def reference_options(inputs):
    """The options in the names of flash::attn."""
    options = dict(inputs.options)
    options["window_left"], options["window_right"] = options.pop("window")
    return options


def _run_reference(inputs, compute_dtype):
    """Differentiates flash_ext.reference; fp64 leaves where compute_dtype is fp64."""
    options = reference_options(inputs)
    exact = compute_dtype == torch.float64
    return _differentiate(
        lambda *args: reference.attention(*args, **options, compute_dtype=compute_dtype),
        inputs,
        lambda _, x: x.double() if exact else x,
        unused_is_zero=True,  # with no sequence at all nothing is used
    )


def run_reference_inputs(inputs):
    """(ref, pt): the fp64 reference, and the same step by step in the inputs' dtype."""
    exact = _run_reference(inputs, torch.float64)
    if inputs.q.dtype == torch.float64:
        return exact, exact
    return exact, _run_reference(inputs, inputs.q.dtype)


def run(case, device="cpu", needed=None):
    """flash_ext on a case, forward and backward."""
    return run_inputs(make_inputs(case, device), needed)


def run_reference(case, device="cpu"):
    """(ref, pt) of a case."""
    return run_reference_inputs(make_inputs(case, device))


# ---- how close is right --------------------------------------------------------------------------
#
# The rule is that of semantics.md. One thing it leaves open: in which form PyTorch does "the same
# math". Autograd's backward of a softmax knows p and dp of the whole row at once. Every flash
# backward has instead delta = <dout, out>, with out as it was stored. Where the gradients of the
# scores cancel (rows of one key; sums over a broadcast bias, a slope, a sink) only the second form
# rounds at all, and a sum of few numbers may happen to be off by less than what it is made of. So a
# gradient that is outside by the first form is judged by the second: the fp64 reference on inputs
# off by a rounding of the accumulator, delta off by the roundings of out (`flash_roundings`).

ROW_ERROR = {torch.float32: 1e-5, torch.float64: 1e-12}  # of the row's norm, on the CPU
NUM_DRAWS = 4  # of roundings: one alone may happen to cancel


def flash_roundings(inputs, ref, pt, draw):
    """The fp64 reference's gradients when a flash backward rounds, by input."""
    generator = torch.Generator().manual_seed(draw)

    def noise(x):
        return (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1).to(x.device)

    def nudged(x):
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        return x.double() * (1 + eps * noise(x))

    products = inputs.dout.double() * ref.out
    signs = noise(products).sign()
    delta = (signs * inputs.dout.double() * (pt.out.double() - ref.out)).sum(-1)
    # A sum of head_dim_v products in the accumulator's type.
    eps = torch.finfo(ref.out.dtype if ref is pt else torch.float32).eps
    spread = products.norm(dim=-1) * products.shape[-1] ** 0.5
    delta = (delta + eps * noise(spread) * spread).transpose(-1, -2)
    dlse = torch.zeros_like(ref.lse) if inputs.dlse is None else inputs.dlse.double()
    rounded = inputs.replace(
        **{name: nudged(x) for name, x in inputs.differentiable().items()},
        dout=nudged(inputs.dout),
        dlse=dlse - delta,  # ds = p (dp - delta + dlse)
    )
    return _run_reference(rounded, torch.float64).grads


def assert_same_specials(x, ref, what):
    """inf, -inf and NaN stand where the reference has them."""
    for test, kind in ((torch.isnan, "NaN"), (torch.isposinf, "inf"), (torch.isneginf, "-inf")):
        wrong = test(x) != test(ref)
        if wrong.any():
            index = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{what}: {kind} in the wrong place, first at {list(index)}: got "
                f"{x[index].item()}, expected {ref[index].item()}"
            )


def _assert_within(x, ref, limit, what, pt=None):
    """|x - ref| <= limit, elementwise; limit broadcasts."""
    error = torch.where(torch.isfinite(ref), (x.double() - ref).abs(), 0)
    excess = error - limit
    if error.numel() == 0 or excess.max() <= 0:
        return
    index = tuple(torch.unravel_index(excess.argmax(), excess.shape))
    place = [int(i) for i in index]
    allowed = torch.as_tensor(limit).expand(excess.shape)[index].item()
    other = "" if pt is None else f", PyTorch in this dtype {pt[index].item():.8g}"
    raise AssertionError(
        f"{what}: worst at {place}: got {x[index].item():.8g}, expected {ref[index].item():.8g}"
        f"{other}; error {error[index].item():.3g}, allowed {allowed:.3g}"
    )


def assert_close(x, ref, pt, what, factor=2.0, others=None):
    """out or a gradient x against the fp64 reference; pt is PyTorch's in x's dtype.

    others: a function that gives results as good as pt, asked where pt is not enough.
    """
    assert x.shape == ref.shape, f"{what}: shape {tuple(x.shape)}, expected {tuple(ref.shape)}"
    assert_same_specials(x, ref, what)
    if x.numel() == 0:
        return
    finite = torch.where(torch.isfinite(ref), ref, 0)
    shifted = finite.to(x.dtype)
    atol = 2 * ((shifted + 0.3 - 0.3).double() - finite).abs().max()
    pt_error = torch.where(torch.isfinite(ref), (pt.double() - ref).abs(), 0).max()
    limit = factor * pt_error + atol
    if x.dtype in ROW_ERROR and x.device.type == "cpu":
        row = ROW_ERROR[x.dtype] * finite.norm(dim=-1, keepdim=True)
        # A row that is a difference of larger numbers has the general rule.
        limit = torch.maximum(row, limit.expand_as(row))
    if others is not None and ((x.double() - finite).abs() > limit).any():
        worst = max((other - finite).abs().max() for other in others())
        limit = (factor * worst + atol).clamp(min=limit)
    _assert_within(x, ref, limit, what, pt)


def max_score(inputs, lse):
    """max|s| over what rows see, out of the reference's probabilities."""
    options = reference_options(inputs)
    for name in ("page_table", "deterministic", "num_splits", "leftpad_k"):
        options.pop(name, None)
    p = reference.attn_probs(
        inputs.q, inputs.k, lse, inputs.bias, inputs.alibi_slopes, **options
    ).abs()
    if inputs.options["cu_seqlens_q"] is None:
        rows = lse
    else:  # a sequence at a time: (num_heads, max_seqlen_q)
        cu = inputs.options["cu_seqlens_q"].tolist()
        rows = lse.new_zeros(p.shape[:-1])
        for b, (begin, end) in enumerate(itertools.pairwise(cu)):
            count = min(end - begin, rows.shape[-1])
            rows[b, :, :count] = lse[:, begin : begin + count]
    s = torch.where(p > 0, p.log() + rows[..., None], 0)
    return s.abs().max().item() if s.numel() else 0.0


def assert_lse_close(lse, ref, inputs, what):
    assert_same_specials(lse, ref, what)
    if lse.dtype == torch.float64:
        _assert_within(lse, ref, 1e-12 * (1 + ref.nan_to_num(0, 0, 0).abs()), what)
        return
    limit = 1e-4 + 6e-4 * inputs.options["softcap"]
    error = torch.where(torch.isfinite(ref), (lse.double() - ref).abs(), 0)
    if error.numel() and error.max() > limit:
        _assert_within(lse, ref, limit + 2e-6 * max_score(inputs, ref), what)


def assert_close_to_reference(result, ref, pt, inputs, label):
    """Every tensor of a result by semantics.md, "How close is right".

    label: the case and its seed, for the message. Gradients come in their inputs' shapes and
    dtypes.
    """
    assert result.out.dtype == inputs.q.dtype and result.out.is_contiguous(), label
    assert result.lse.is_contiguous(), label
    assert_lse_close(result.lse, ref.lse, inputs, f"lse of {label}")
    assert_close(result.out, ref.out, pt.out, f"out of {label}")
    factor = 3.0 if inputs.options["softcap"] > 0 else 2.0
    draws = functools.cache(
        lambda: [flash_roundings(inputs, ref, pt, draw) for draw in range(NUM_DRAWS)]
    )
    for name, grad in result.grads.items():
        given = getattr(inputs, name)
        assert grad.shape == given.shape and grad.dtype == given.dtype, f"d{name} of {label}"
        assert_close(
            *(grad, ref.grads[name], pt.grads[name], f"d{name} of {label}", factor),
            others=lambda name=name: [grads[name] for grads in draws()],
        )


def skip_unless_served(case, device):
    """GPU kernels take fp16 and bf16 alone."""
    if torch.device(device).type != "cpu" and case.dtype in ROW_ERROR:
        pytest.skip(f"gpu: no {DTYPE_NAMES[case.dtype]} kernels")


def _served(inputs, backward):
    first = [getattr(inputs, name) for name in GRADIENT_NAMES]
    text = flash_ext.explain(*first, **inputs.options, backward=backward)
    return "serves: no kernel" not in text


def check(case, device="cpu"):
    """A case against the reference: out, lse and every gradient.

    The CPU has every kernel. On a GPU a case is skipped where no forward kernel has its features,
    and its gradients are left out where no backward kernel has.
    """
    skip_unless_served(case, device)
    inputs, needed = make_inputs(case, device), None
    if torch.device(device).type != "cpu":
        if not _served(inputs, backward=False):
            pytest.skip(f"gpu: no kernel for {case}")
        needed = None if _served(inputs, backward=True) else ()
    ref, pt = run_reference_inputs(inputs)
    result = run_inputs(inputs, needed)
    assert_close_to_reference(result, ref, pt, inputs, f"{case}, seed {case.seed}")
    return result


def assert_same(a, b, what=""):
    """Two results bit for bit; b may hold fewer gradients."""
    others = a.tensors()
    for name, x in b.tensors().items():
        if not same_bits(x, others[name]):
            wrong = (bits(x) != bits(others[name])).nonzero()
            raise AssertionError(
                f"{what}: {name} differs in {len(wrong)} of {x.numel()} entries, first at "
                f"{wrong[0].tolist()}: {x[tuple(wrong[0])]} and {others[name][tuple(wrong[0])]}"
            )


def environment():
    """For a process that is to find this flash_ext."""
    root = str(Path(flash_ext.__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
