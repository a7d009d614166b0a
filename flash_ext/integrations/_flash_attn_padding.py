"""flash_attn.bert_padding: between padded batches and packed sequences."""

import torch

from flash_ext import pad_input, unpad_input

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input, indices):
    """The rows indices (n,) of input (rows, …), differentiable: (n, …)."""
    return input.index_select(0, indices)


def index_put_first_axis(values, indices, first_axis_dim):
    """values (n, …) as the rows indices (n,) of a tensor (first_axis_dim, …), elsewhere 0."""
    empty = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return empty.index_copy(0, indices, values)


def index_first_axis_residual(input, indices):
    """(index_first_axis(input, indices), input), whose gradients add up."""
    return input.index_select(0, indices), input.view_as(input)


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """Packs rows that hold several short samples each, one after the other.

    Args:
        hidden_states: (batch, seqlen, …).
        attention_mask_in_length: (batch, seqlen) int, the lengths of a row's samples, then 0.

    Returns:
        (output (total, …), indices (total,), cu_seqlens (samples + 1,) int32, max_seqlen).
    """
    totals = attention_mask_in_length.sum(-1, keepdim=True)
    places = torch.arange(attention_mask_in_length.shape[1], device=totals.device)
    output, indices, *_ = unpad_input(hidden_states, places < totals)
    lengths = attention_mask_in_length[attention_mask_in_length > 0].to(torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return output, indices, cu_seqlens, int(lengths.max()) if lengths.numel() else 0
