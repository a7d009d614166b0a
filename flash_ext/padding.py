"""Between padded batches and packed sequences, with flash-attn 2.8's names and results."""

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import type_error


class Unpadded(NamedTuple):
    """What `unpad_input` returns."""

    output: Tensor  # (total, …) the selected tokens, sequence after sequence
    indices: Tensor  # (total,) int64, their places in the flattened (batch * seqlen)
    cu_seqlens: Tensor  # (batch + 1,) int32, where the sequences begin and end in output
    max_seqlen: int  # the longest of them
    seqused: Tensor  # (batch,) int32, tokens that attention_mask selects


def unpad_input(hidden_states, attention_mask, unused_mask=None) -> Unpadded:
    """Packs the tokens that the masks select.

    Args:
        hidden_states: (batch, seqlen, …), any dtype; the gradient of what is not selected is 0.
        attention_mask: (batch, seqlen), bool or int; nonzero = a token.
        unused_mask: the same, for places that are allocated but hold no token yet; they are
            packed too, and seqused leaves them out. They follow a sequence's tokens.

    Returns:
        Unpadded (output, indices, cu_seqlens, max_seqlen, seqused). Reads max_seqlen back from
        the device.

    Raises:
        TypeError: hidden_states or a mask is no tensor.
        ValueError: a mask's shape is not (batch, seqlen).
    """
    masks = {"attention_mask": attention_mask}
    if unused_mask is not None:
        masks["unused_mask"] = unused_mask
    for name, x in ({"hidden_states": hidden_states} | masks).items():
        if not isinstance(x, Tensor):
            raise type_error(name, x, "a torch.Tensor", "convert it with torch.as_tensor")
    batch_shape = tuple(hidden_states.shape[:2])
    for name, mask in masks.items():
        if tuple(mask.shape) != batch_shape:
            raise ValueError(
                f"{name} has shape {tuple(mask.shape)} and hidden_states "
                f"{tuple(hidden_states.shape)}; a mask must be (batch, seqlen) = {batch_shape}"
            )
    used = attention_mask != 0
    selected = used if unused_mask is None else used | (unused_mask != 0)
    lengths = selected.sum(dim=-1, dtype=torch.int32)
    indices = selected.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    output = hidden_states.flatten(0, 1).index_select(0, indices)
    return Unpadded(output, indices, cu_seqlens, max_seqlen, used.sum(-1, dtype=torch.int32))


def pad_input(hidden_states, indices, batch: int, seqlen: int) -> Tensor:
    """Undoes `unpad_input`: (total, …) to (batch, seqlen, …), 0 where nothing was selected.

    Args:
        hidden_states: (total, …).
        indices: (total,) int64, from `unpad_input`.
        batch, seqlen: the padded shape.

    Raises:
        ValueError: hidden_states and indices differ in length.
        IndexError: an index is not 0 to batch * seqlen - 1; on a GPU a device-side assertion,
            as indexing in PyTorch has it.
    """
    if hidden_states.shape[0] != indices.shape[0]:
        raise ValueError(
            f"hidden_states has {hidden_states.shape[0]} rows and indices {indices.shape[0]} "
            "entries; there must be one index a row: pass the indices of unpad_input"
        )
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
