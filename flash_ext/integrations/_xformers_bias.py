"""xformers' attention biases: which keys a row sees, as objects.

Names, constructors and attributes are xformers' (`xformers.ops.fmha.attn_bias`), so that
`memory_efficient_attention` reads objects of either library. Every class has `materialize`, the
bias as a tensor, for looking at and for tests.
"""

import itertools
import math
from dataclasses import dataclass

import torch


def _band(shape, from_bottom_right, left, right):
    """bool shape[-2:]: whether key j - row i lies in -left … right; None is unbounded."""
    rows, keys = shape[-2:]
    shift = keys - rows if from_bottom_right else 0
    distance = torch.arange(keys)[None] - torch.arange(rows)[:, None] - shift
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


class AttentionBias:
    """The base of all; a dense one sees the keys of `_band(shape, *_rule())`."""

    def _rule(self):
        """(from_bottom_right, left, right)."""
        return False, None, None

    def _seen(self, shape):
        return _band(shape, *self._rule())

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        """(…, rows, keys) to add to the scores: 0 where a key is seen, elsewhere -inf."""
        hidden = ~self._seen(shape)
        return torch.zeros(shape, dtype=dtype).masked_fill(hidden, -math.inf).to(device)

    def to(self, device):
        """The same bias with its tensors on the device."""
        return self


def _check_window_size(window_size):
    if window_size <= 0:
        raise ValueError(f"window_size is {window_size}; a window has at least one key")


class LowerTriangularMask(AttentionBias):
    """Row i sees keys j <= i, counted from the top left."""

    def _rule(self):
        return False, None, 0

    def add_bias(self, bias):
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """The same, and bias (batch, heads, rows, keys) is added."""

    def __init__(self, bias):
        self._bias = bias

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        return super().materialize(shape, dtype, device) + self._bias.to(device, dtype)

    def to(self, device):
        return type(self)(self._bias.to(device))


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    """Row i sees keys j <= i + keys - rows."""

    def _rule(self):
        return True, None, 0

    def add_bias(self, bias):
        raise NotImplementedError(
            f"{type(self).__name__} with a bias is not supported: the class with a bias counts "
            "from the top left; pass a tensor that holds -inf where keys are masked"
        )

    def make_local_attention(self, window_size):
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """The same, and only the last window_size of them."""

    _window_size: int

    def __post_init__(self):
        _check_window_size(self._window_size)

    def _rule(self):
        return True, self._window_size - 1, 0


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """Keys from window_left before to window_right after the row's own, both inclusive."""

    window_left: int
    window_right: int

    def _rule(self):
        return True, self.window_left, self.window_right


# ---- blocks --------------------------------------------------------------------------------------


@dataclass
class _SeqLenInfo:
    """Where packed sequences begin and end."""

    seqstart: torch.Tensor  # (sequences + 1,) int32
    max_seqlen: int
    seqstart_py: list

    @classmethod
    def from_seqlens(cls, seqlens):
        starts = [*itertools.accumulate(seqlens, initial=0)]
        return cls(torch.tensor(starts, dtype=torch.int32), max(seqlens, default=0), starts)

    def intervals(self):
        return itertools.pairwise(self.seqstart_py)

    def to(self, device):
        return type(self)(**(self.__dict__ | {"seqstart": self.seqstart.to(device)}))

    def split(self, x, batch_sizes=None):
        """x (1, total, …) as a list of (batch_sizes[i], length, …), of one sequence by default."""
        if x.shape[:2] != (1, self.seqstart_py[-1]):
            raise ValueError(
                f"the tensor has shape {tuple(x.shape)}; it must be (1, {self.seqstart_py[-1]}, …)"
            )
        batch_sizes = [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else batch_sizes
        ends = [self.seqstart_py[i] for i in itertools.accumulate(batch_sizes, initial=0)]
        chunks = x.split([b - a for a, b in itertools.pairwise(ends)], dim=1)
        return [c.reshape(n, -1, *x.shape[2:]) for n, c in zip(batch_sizes, chunks, strict=True)]


@dataclass
class _PaddedSeqLenInfo(_SeqLenInfo):
    """Sequences in slots of padding rows each, of which the first seqlen are used."""

    seqlen: torch.Tensor = None  # (sequences,) int32
    seqlen_py: tuple = ()
    padding: int = 0

    @classmethod
    def from_seqlens_padded(cls, seqlens, padding):
        if any(n > padding for n in seqlens):
            raise ValueError(f"the longest sequence has {max(seqlens)} keys, above {padding}")
        starts = list(range(0, padding * len(seqlens) + 1, padding))
        return cls(
            *(torch.tensor(starts, dtype=torch.int32), max(seqlens, default=0), starts),
            *(torch.tensor(seqlens, dtype=torch.int32), tuple(seqlens), padding),
        )

    def intervals(self):
        return [(a, a + n) for a, n in zip(self.seqstart_py, self.seqlen_py, strict=False)]

    def to(self, device):
        tensors = {"seqstart": self.seqstart.to(device), "seqlen": self.seqlen.to(device)}
        return type(self)(**(self.__dict__ | tensors))


@dataclass
class BlockDiagonalMask(AttentionBias):
    """Packed sequences: a row sees the keys of its own."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: list = None

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None):
        """Of the sequences' lengths; those of the keys are the queries' by default."""
        q_seqinfo = _SeqLenInfo.from_seqlens(q_seqlen)
        same = kv_seqlen is None or list(kv_seqlen) == list(q_seqlen)
        k_seqinfo = q_seqinfo if same else _SeqLenInfo.from_seqlens(kv_seqlen)
        if len(q_seqinfo.seqstart_py) != len(k_seqinfo.seqstart_py):
            raise ValueError(f"{len(q_seqlen)} lengths of queries and {len(kv_seqlen)} of keys")
        return cls(q_seqinfo, k_seqinfo)

    @classmethod
    def from_tensor_list(cls, tensors):
        """(the mask, the tensors (batch, seqlen, …) joined to (1, total, …))."""
        mask = cls.from_seqlens([x.shape[1] for x in tensors for _ in range(x.shape[0])])
        mask._batch_sizes = [x.shape[0] for x in tensors]
        return mask, torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], dim=1)

    def split(self, tensor):
        """What from_tensor_list joined."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    split_queries = split

    def split_kv(self, tensor):
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def _seen(self, shape):
        seen = torch.zeros(shape[-2:], dtype=torch.bool)
        blocks = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for (q_start, q_end), (k_start, k_end) in blocks:
            size = (q_end - q_start, k_end - k_start)
            seen[q_start:q_end, k_start:k_end] = _band(size, *self._rule())
        return seen

    def _as(self, cls, *more):
        return cls(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, *more)

    def to(self, device):
        infos = {"q_seqinfo": self.q_seqinfo.to(device), "k_seqinfo": self.k_seqinfo.to(device)}
        return type(self)(**(self.__dict__ | infos))

    def make_causal(self):
        return self._as(BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self):
        return self._as(BlockDiagonalCausalFromBottomRightMask)

    def make_local_attention(self, window_size):
        return self._as(BlockDiagonalCausalLocalAttentionMask, window_size)

    def make_local_attention_from_bottomright(self, window_size):
        return self._as(BlockDiagonalCausalLocalAttentionFromBottomRightMask, window_size)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """The same, causal inside each block from its top left."""

    def _rule(self):
        return False, None, 0


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """The same, causal inside each block from its bottom right."""

    def _rule(self):
        return True, None, 0


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Causal from the top left, and only the last window_size keys."""

    _window_size: int = 0

    def __post_init__(self):
        _check_window_size(self._window_size)

    def _rule(self):
        return False, self._window_size - 1, 0


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Causal from the bottom right, and only the last window_size keys."""

    _window_size: int = 0

    def __post_init__(self):
        _check_window_size(self._window_size)

    def _rule(self):
        return True, self._window_size - 1, 0


class BlockDiagonalPaddedKeysMask(BlockDiagonalMask):
    """Sequences whose keys lie in slots of one size, as in a cache."""

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_padding, kv_seqlen):
        """kv_padding: rows of a slot. kv_seqlen: how many of each are used."""
        k_seqinfo = _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding)
        return cls(_SeqLenInfo.from_seqlens(q_seqlen), k_seqinfo)

    def _as(self, cls, *more):
        raise NotImplementedError(
            f"{type(self).__name__} has no causal or local form but "
            "BlockDiagonalCausalWithOffsetPaddedKeysMask: the others do not know of padding"
        )


class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same, causal from the bottom right of the used keys."""

    def _rule(self):
        return True, None, 0
