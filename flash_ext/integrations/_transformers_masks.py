"""What Transformers' mask functions mean, as the few values that attention needs.

Transformers describes a mask as a Python function of (batch, head, row, key) and leaves it to the
attention implementation what to make of it. `make_mask` recognises the functions that are causal,
a window or packed sequences, with or without padding, and keeps them as a `Mask` of O(seqlen)
memory; any other function becomes the (batch, 1, q_length, kv_length) bool tensor that it
describes, which is exact too.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from transformers import masking_utils as hf

# Functions from one factory share a code object, which tells what a mask function is.
_AND = hf.and_masks(hf.causal_mask_function).__code__
_WINDOW = hf.sliding_window_overlay(1).__code__
_WINDOW_BOTH_SIDES = hf.sliding_window_bidirectional_overlay(1).__code__
_PACKED = hf.packed_sequence_mask_function(torch.zeros(1, 1)).__code__
_REMAPPED = (  # there since 5.18: before, positions in the whole row did, one mask less
    hf.remap_positions_for_packed_sequence(None, torch.zeros(1, 1)).__code__
    if hasattr(hf, "remap_positions_for_packed_sequence")
    else None
)


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a row sees, without a tensor of rows × keys.

    It travels through a model in the place of an attention mask. `ndim` and `shape` are those of
    the tensor that it stands for.
    """

    shape: tuple  # (batch, 1, q_length, kv_length)
    causal: bool
    window: tuple = (-1, -1)  # (left, right) around the diagonal, inclusive; -1 is unbounded
    key_mask: Tensor | None = None  # (batch, kv_length) bool, True = a token
    seqused_k: Tensor | None = None  # (batch,) int32, keys of a cache that are filled
    cu_seqlens: Tensor | None = None  # (sequences + 1,) int32 in the flattened (batch * q_length)
    max_seqlen: int | None = None

    ndim = 4

    def to(self, device, non_blocking=False):
        """The same mask elsewhere; Accelerate moves the inputs of a layer to its device by it."""
        if isinstance(device, torch.dtype):
            return self.dtype  # the error below
        moved = {
            f.name: getattr(self, f.name).to(device, non_blocking=non_blocking)
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    def __getattr__(self, name):
        raise AttributeError(
            f"flash_ext's attention mask has no {name!r}: this model works on its mask itself "
            "instead of handing it to the attention function; load it with "
            'attn_implementation="sdpa"'
        )


def _cells(function) -> dict:
    """A closure's variables by name."""
    cells = function.__closure__ or ()
    return {n: c.cell_contents for n, c in zip(function.__code__.co_freevars, cells, strict=True)}


def _conjuncts(function):
    """The functions that and_masks joined; the function itself when it is no such join."""
    return _cells(function)["mask_functions"] if function.__code__ is _AND else (function,)


def _base_pattern(function):
    """(causal, window) of a mask function that looks at distances only; None of any other."""
    if function is hf.causal_mask_function:
        return True, (-1, -1)
    if function is hf.bidirectional_mask_function:
        return False, (-1, -1)
    first, *others = _conjuncts(function)
    if first.__code__ is _WINDOW and others == [hf.causal_mask_function]:
        return True, (_cells(first)["sliding_window"] - 1, -1)
    if first.__code__ is _WINDOW_BOTH_SIDES and others == [hf.bidirectional_mask_function]:
        return False, (_cells(first)["sliding_window"],) * 2
    return None


def _packed_pattern(function):
    """(causal, window, sequence ids) of a mask over packed sequences; None of any other.

    The ids (batch, q_length) change where a sequence begins; the window counts positions, which
    rise by one inside a sequence.
    """
    first, *others = _conjuncts(function)
    if len(others) != 1 or others[0].__code__ is not _PACKED:
        return None
    if first.__code__ is _REMAPPED:
        first = _cells(first)["mask_function"]
    base = _base_pattern(first)
    return base and (*base, _cells(others[0])["packed_sequence_mask"])


def _traced_pattern(function, local_size, causal_allowed, bidirectional_allowed, config):
    """(causal, window) while a compiler traces, which shows no closure; None when unsure.

    The flags say that the caller left its own mask as it was: causal, a window of
    config.sliding_window, or chunks of config.attention_chunk_size.
    """
    if local_size is None:
        if causal_allowed and function is hf.causal_mask_function:
            return True, (-1, -1)
        if bidirectional_allowed and function is hf.bidirectional_mask_function:
            return False, (-1, -1)
        return None
    if local_size != getattr(config, "sliding_window", None):
        return None
    if causal_allowed and local_size != getattr(config, "attention_chunk_size", None):
        return True, (local_size - 1, -1)
    return (False, (local_size, local_size)) if bidirectional_allowed else None


def packed_lengths(starts):
    """(cu_seqlens, max_seqlen) of packed sequences; starts (tokens,) is True where one begins."""
    places = starts.nonzero().flatten().to(torch.int32)
    cu_seqlens = torch.nn.functional.pad(places, (0, 1), value=starts.shape[0])
    return cu_seqlens, int(cu_seqlens.diff().max())


def _key_mask(attention_mask, kv_length, kv_offset, filled):
    """(batch, kv_length) bool, True = a token; None when the filled keys all are, if readable."""
    if attention_mask is None:
        return None
    missing = kv_length + kv_offset - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    key_mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    if hf.is_tracing(key_mask):
        return key_mask
    seen = key_mask[:, :filled] if isinstance(filled, int) else key_mask
    return None if bool(seen.all()) else key_mask


def make_mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=hf.causal_mask_function,
    attention_mask=None,
    local_size=None,
    allow_is_causal_skip=True,
    allow_is_bidirectional_skip=False,
    use_vmap=False,
    device="cpu",
    config=None,
    **kwargs,
):
    """Transformers' mask interface: a `Mask`, a bool tensor, or None for nothing to say.

    None leaves causal or not to the attention module, as Transformers' own "sdpa" does. The
    arguments are those of transformers.masking_utils.sdpa_mask, where allow_is_* say whether the
    caller can do without a tensor; kwargs hold what other implementations need (a dtype).
    """
    if isinstance(attention_mask, Mask):
        return attention_mask  # made before, by generate for a static cache
    sequence_ids = None
    if torch.compiler.is_compiling():
        flags = allow_is_causal_skip, allow_is_bidirectional_skip
        pattern = _traced_pattern(mask_function, local_size, *flags, config)
    elif packed := _packed_pattern(mask_function):
        *pattern, sequence_ids = packed
    else:
        pattern = _base_pattern(mask_function)
        if pattern and not (allow_is_causal_skip if pattern[0] else allow_is_bidirectional_skip):
            pattern = None
    shape = (batch_size, 1, q_length, kv_length)
    # The last row's key on the diagonal, counted from the first key that the cache still holds.
    filled = q_offset + q_length - kv_offset
    aligned = isinstance(filled, int) and filled == kv_length
    if pattern is not None and not pattern[0] and pattern[1] != (-1, -1) and not aligned:
        pattern = None
    if pattern is None:
        return hf.sdpa_mask(
            *(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function),
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
    causal, window = pattern
    if sequence_ids is not None:
        starts = sequence_ids.diff(prepend=sequence_ids[:, :1] - 1) != 0
        cu_seqlens, max_seqlen = packed_lengths(starts.flatten())
        return Mask(shape, causal, window, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    key_mask = _key_mask(attention_mask, kv_length, kv_offset, filled if causal else kv_length)
    seqused_k = None
    if causal and not aligned:
        seqused_k = torch.as_tensor(filled, device=device).to(torch.int32).expand(batch_size)
    if window[0] >= kv_length - 1:
        window = (-1, -1)
    if key_mask is None and seqused_k is None and window == (-1, -1):
        return None
    return Mask(shape, causal, window, key_mask, seqused_k)
