"""Which points are measured: anchors for dense attention, and a few for everything else.

A grid is a list of groups; a group's points are timed together, so that what they are compared with
(the same call without the feature, say) meets the same state of the machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

MODES = ("fwd", "bwd", "gqa", "varlen", "features", "decode", "host", "accuracy", "memory")
# Modes with head dims, or lengths, of their own, which cannot be asked for.
FIXED_HEAD_DIM = ("host", "decode")
FIXED_SEQLEN = ("varlen", "features", "decode", "host", "accuracy")


@dataclass(frozen=True)
class Point:
    """One row to be: a problem, and what of it is measured."""

    mode: str  # fwd, varlen_bwd, features_fwd, host_fwdbwd, rms_error, memory_fwd, …
    head_dim: int
    mask: str  # "full" or "causal"
    seqlen: int  # packed: the longest sequence
    batch: int
    heads_q: int
    heads_k: int
    dtype: str  # bf16, fp16, fp32
    unit: str = "TFLOP/s"
    head_dim_v: int = 0  # 0: head_dim
    features: str = ""  # a name of FEATURES or of DECODE_FEATURES
    lengths: tuple[int, ...] = field(default=(), repr=False)  # packed: of each sequence

    def __post_init__(self):
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def backward(self) -> bool:
        """Whether the backward pass is what is measured, or part of it."""
        return self.mode.endswith("bwd")

    @property
    def window(self) -> int:
        """The keys that a row sees at most, 0 for all."""
        word, _, width = self.features.partition(" ")
        return int(width) if word == "window" else 0

    @property
    def page_size(self) -> int:
        """Keys of a page, 0 where they are not in pages."""
        word, _, size = self.features.partition(" ")
        return int(size) if word == "pages" else 0

    @property
    def tokens(self) -> int:
        """Query rows of a sequence that decodes."""
        count, _, word = self.features.partition(" ")
        return int(count) if word == "tokens" else 1

    def row(self) -> dict:
        """The row's key."""
        names = ("mode", "head_dim", "mask", "seqlen", "batch", "heads_q", "heads_k", "unit")
        return {name: getattr(self, name) for name in (*names, "dtype", "head_dim_v", "features")}

    def flop(self) -> float:
        """4 · visible pairs · head_dim a head, a causal half being exactly half; backward 2.5 ×."""
        lengths = self.lengths or (self.seqlen,) * self.batch
        pairs = sum(n * n for n in lengths) / (2 if self.causal else 1)
        if self.window:  # (window - 1, 0): row i sees min(i + 1, window) keys
            w = min(self.window, self.seqlen)
            pairs = self.batch * (w * (w + 1) / 2 + (self.seqlen - w) * w)
        forward = 2 * pairs * self.heads_q * (self.head_dim + self.head_dim_v)
        return 2.5 * forward if self.backward else forward

    def rate(self, seconds: float) -> float:
        """What a call of so long a time reaches, in `unit`: TFLOP/s, or GB/s of q, k, v, out."""
        if self.unit == "TFLOP/s":
            return self.flop() / seconds / 1e12
        dims = self.head_dim + self.head_dim_v
        elements = dims * self.batch * (self.seqlen * self.heads_k + self.tokens * self.heads_q)
        return elements * (4 if self.dtype == "fp32" else 2) / seconds / 1e9

    def __str__(self) -> str:
        heads = f"h{self.heads_q}" + ("" if self.heads_q == self.heads_k else f"/{self.heads_k}")
        size = f"{self.seqlen // 1024}k" if self.seqlen % 1024 == 0 else str(self.seqlen)
        parts = [self.mode, f"d{self.head_dim}", self.mask, size, f"b{self.batch}", heads]
        return " ".join([*parts, self.dtype, *([self.features] if self.features else [])])


# The features whose cost is measured, one at a time.
FEATURES = ("softcap", "alibi", "dropout", "sinks", "bool mask", "bias")
WINDOW = 512
# One token over a cache, and what else is compared with it.
DECODE_FEATURES = ("", "pages 16", "pages 64", "4 tokens")
DECODE_HEAD_DIM = 128


@dataclass(frozen=True)
class Sizes:
    """What is right for a device: enough work to fill it, in a few minutes."""

    tokens: int
    hidden: int
    seqlens: tuple[int, ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    gqa: tuple[int, int]  # query heads, key heads
    varlen: tuple[int, int, int]  # sequences, shortest, longest
    feature_seqlen: int
    window_seqlen: int
    host_seqlen: int  # so short that the host is what takes time
    accuracy: tuple[int, int, int]  # batch, heads, seqlen
    accuracy_dtypes: tuple[str, ...]
    decode: tuple[tuple[int, int], ...]  # (batch, keys)


SIZES = {
    "cuda": Sizes(
        tokens=16384,
        hidden=2048,
        seqlens=(1024, 4096, 16384),
        head_dims=(64, 128, 256),
        dtypes=("bf16",),
        gqa=(32, 8),
        varlen=(16, 100, 4000),
        feature_seqlen=4096,
        window_seqlen=16384,
        host_seqlen=128,
        accuracy=(2, 4, 2048),
        accuracy_dtypes=("bf16", "fp16"),
        decode=tuple((b, n << 10) for n in (8, 32, 128) for b in (1, 16, 128)),
    ),
    "cpu": Sizes(
        tokens=4096,
        hidden=512,
        seqlens=(512, 1024, 4096),
        head_dims=(64, 128),
        dtypes=("fp32", "bf16"),
        gqa=(8, 2),
        varlen=(8, 30, 1000),
        feature_seqlen=1024,
        window_seqlen=4096,
        host_seqlen=1,
        accuracy=(1, 4, 1024),
        accuracy_dtypes=("fp32", "bf16"),
        decode=((1, 8192), (8, 1024)),
    ),
}


def sizes_for(device: str, quick: bool) -> Sizes:
    """Quick ones show that everything runs; a GPU's are still large enough to mean something."""
    sizes = SIZES[device]
    if quick and device == "cpu":
        return replace(
            sizes,
            **{"tokens": 256, "hidden": 128, "seqlens": (128, 256), "head_dims": (64,)},
            **{"gqa": (4, 2), "varlen": (3, 10, 100), "feature_seqlen": 128},
            **{"window_seqlen": 1024, "accuracy": (1, 2, 128), "decode": ((2, 128),)},
        )
    if quick:
        decode = sizes.decode[:2]
        return replace(sizes, seqlens=sizes.seqlens[1:2], head_dims=(64, 128), decode=decode)
    return sizes


def draw_lengths(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """The same ones in every run."""
    return tuple(random.Random(0).choices(range(shortest, longest + 1), k=count))


def groups(mode: str, device: str, quick: bool = False, head_dims=(), seqlens=()) -> list[list]:
    """The points of one mode; head_dims and seqlens, when given, replace the device's own."""
    sizes = sizes_for(device, quick)
    sizes = replace(
        sizes,
        head_dims=tuple(head_dims) or sizes.head_dims,
        seqlens=tuple(seqlens) or sizes.seqlens,
    )
    return _BUILDERS[mode](sizes)


def _dense(sizes: Sizes, mode: str, head_dims, heads=None) -> list[list[Point]]:
    """The anchors' grid: a fixed number of tokens and a fixed hidden size."""
    found = []
    for dtype in sizes.dtypes:
        for head_dim in head_dims:
            heads_q, heads_k = heads or (max(sizes.hidden // head_dim, 1),) * 2
            for mask in ("full", "causal"):
                for seqlen in sizes.seqlens:
                    batch = max(sizes.tokens // seqlen, 1)
                    shape = (head_dim, mask, seqlen, batch, heads_q, heads_k, dtype)
                    found.append([Point(mode, *shape)])
    return found


def _gqa(sizes: Sizes) -> list[list[Point]]:
    head_dim = 128 if 128 in sizes.head_dims else sizes.head_dims[0]
    return [g for mode in ("fwd", "bwd") for g in _dense(sizes, mode, (head_dim,), sizes.gqa)]


def _varlen(sizes: Sizes) -> list[list[Point]]:
    lengths = draw_lengths(*sizes.varlen)
    head_dim = 128 if 128 in sizes.head_dims else sizes.head_dims[0]
    heads = max(sizes.hidden // head_dim, 1)
    return [
        [Point(mode, head_dim, mask, max(lengths), len(lengths), heads, heads, dtype,
               lengths=lengths)]
        for mode in ("varlen_fwd", "varlen_bwd")
        for dtype in sizes.dtypes
        for mask in ("full", "causal")
    ]  # fmt: skip


def _features(sizes: Sizes) -> list[list[Point]]:
    """Each group begins with the call that the others are to be compared with."""
    found = []
    head_dim = 128 if 128 in sizes.head_dims else sizes.head_dims[0]
    heads = max(sizes.hidden // head_dim, 1)
    for mode in ("features_fwd", "features_bwd"):
        for dtype in sizes.dtypes:
            n, far = sizes.feature_seqlen, sizes.window_seqlen
            batch, far_batch = max(sizes.tokens // n, 1), max(sizes.tokens // far, 1)
            plain = Point(mode, head_dim, "full", n, batch, heads, heads, dtype)
            found.append(
                [
                    *(plain, replace(plain, mask="causal")),
                    *(replace(plain, features=name) for name in FEATURES),
                ]
            )
            whole = Point(mode, head_dim, "causal", far, far_batch, heads, heads, dtype)
            found.append([whole, replace(whole, features=f"window {WINDOW}")])
    return found


def _decode(sizes: Sizes) -> list[list[Point]]:
    heads = (32, 8) if sizes.gqa[0] > 8 else sizes.gqa
    return [
        [
            Point("decode", DECODE_HEAD_DIM, "causal" if "tokens" in features else "full", seqlen,
                  batch, *heads, dtype, "GB/s", features=features)
            for features in DECODE_FEATURES
        ]
        for dtype in sizes.dtypes
        for batch, seqlen in sizes.decode
    ]  # fmt: skip


def _host(sizes: Sizes) -> list[list[Point]]:
    return [
        [Point(mode, 64, "causal", sizes.host_seqlen, 1, 8, 8, dtype, "µs")]
        for mode in ("host_fwd", "host_fwdbwd")
        for dtype in sizes.dtypes
    ]


def _accuracy(sizes: Sizes) -> list[list[Point]]:
    """Two rows each, of one run."""
    batch, heads, seqlen = sizes.accuracy
    return [
        [
            Point(f"{kind}_error", head_dim, mask, seqlen, batch, heads, heads, dtype, "abs")
            for kind in ("rms", "max")
        ]
        for dtype in sizes.accuracy_dtypes
        for head_dim in sizes.head_dims
        for mask in ("full", "causal")
    ]


def _memory(sizes: Sizes) -> list[list[Point]]:
    points = [g[0] for mode in ("fwd", "bwd") for g in _dense(sizes, mode, sizes.head_dims[:2])]
    return [[replace(p, mode=f"memory_{p.mode}", unit="MiB")] for p in points]


_BUILDERS = {
    "fwd": lambda sizes: _dense(sizes, "fwd", sizes.head_dims),
    "bwd": lambda sizes: _dense(sizes, "bwd", sizes.head_dims),
    "gqa": _gqa,
    "varlen": _varlen,
    "features": _features,
    "decode": _decode,
    "host": _host,
    "accuracy": _accuracy,
    "memory": _memory,
}
