"""Caches for tests: a case's dense keys put into pages, and NaN wherever no key in use lies."""

import math

import torch
from util import GRADIENT_NAMES, assert_close_to_reference, lengths, reference_options

from flash_ext import attention, reference


def page_table_for(batch, seqlen, page_size, seed=0, spare=3):
    """(batch, max_pages) int32 of distinct pages in a random order, and the number of pages."""
    generator = torch.Generator().manual_seed(seed)
    max_pages = -(-seqlen // page_size)
    num_pages = batch * max_pages + spare
    names = torch.randperm(num_pages, generator=generator)[: batch * max_pages]
    return names.view(batch, max_pages).int(), num_pages


def into_pages(x, used, page_table, num_pages, page_size, fill=math.nan):
    """x (batch, seqlen, heads, dim) as pages; what no key in use takes is `fill`."""
    pages = x.new_full((num_pages, page_size, *x.shape[2:]), fill)
    for b, n in enumerate(used):
        for j in range(n):
            pages[page_table[b, j // page_size], j % page_size] = x[b, j]
    return pages


def paged(inputs, used, page_size, seed=0):
    """The Inputs of a dense case with its keys in pages; entries not in use name no page.

    used: how many keys of each sequence are in use; None: all, and no seqused_k.
    """
    seqused_k = lengths(used, inputs.k.device)
    used = [inputs.k.shape[1]] * inputs.k.shape[0] if used is None else used
    table, num_pages = page_table_for(*inputs.k.shape[:2], page_size, seed)
    k, v = (into_pages(x, used, table, num_pages, page_size) for x in (inputs.k, inputs.v))
    for b, n in enumerate(used):
        table[b, -(-n // page_size) :] = 10**9 if b % 2 else -7
    device = inputs.k.device
    return inputs.replace(
        k=k.to(device),
        v=v.to(device),
        page_table=table.to(device),
        seqused_k=seqused_k,
        max_seqlen_k=inputs.k.shape[1],  # a bias has these columns, not those of whole pages
    )


def forward(inputs):
    first = [getattr(inputs, name) for name in GRADIENT_NAMES]
    with torch.no_grad():
        return attention(*first, **inputs.options, return_lse=True)


def forward_references(inputs):
    first = [getattr(inputs, name) for name in GRADIENT_NAMES]
    wide = [x if x is None or x.dtype == torch.bool else x.double() for x in first]
    options = reference_options(inputs)
    return (
        reference.attention(*wide, **options),
        reference.attention(*first, **options, compute_dtype=inputs.q.dtype),
    )


class Forward:
    """out and lse as what assert_close_to_reference takes."""

    def __init__(self, out, lse):
        self.out, self.lse, self.grads = out, lse, {}


def check_forward(inputs, label, judged=None):
    """Against the reference; `judged` are dense Inputs of the same meaning, for max_score."""
    ref, pt = forward_references(inputs)
    result = forward(inputs)
    assert_close_to_reference(
        Forward(*result), Forward(*ref), Forward(*pt), judged or inputs, label
    )
    return result


def tables(rows, rotary_dim, device="cpu", dtype=torch.float32):
    """cos and sin (rows, rotary_dim / 2)."""
    rates = 10000.0 ** (-torch.arange(rotary_dim // 2) / max(rotary_dim // 2, 1))
    angles = torch.arange(rows)[:, None] * rates
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def new_keys(batch, seqlen, heads, dims, device, dtype, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, seqlen, heads, d, generator=generator).to(device, dtype) for d in dims
    ]
