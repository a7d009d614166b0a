"""flash_attn.layers.rotary: rotary embeddings (Su et al. 2021) and XPos (Sun et al. 2022).

Every function rotates with flash_ext.apply_rotary_emb. Those whose name ends with _ change their
argument, as in flash-attn.
"""

import torch

import flash_ext

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]


def apply_rotary_emb(
    x,
    cos,
    sin,
    interleaved=False,
    inplace=False,
    seqlen_offsets=0,
    cu_seqlens=None,
    max_seqlen=None,
):
    """flash_ext.apply_rotary_emb."""
    return flash_ext.apply_rotary_emb(
        *(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)
    )


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """x (batch, seqlen, num_heads, head_dim) with cos, sin (seqlen, rotary_dim / 2)."""
    return flash_ext.apply_rotary_emb(x, cos, sin, interleaved)


def _queries_and_keys(qkv, num_heads_q):
    """The views q and k of (batch, seqlen, 3, heads, dim) or (batch, seqlen, heads of all, dim)."""
    if qkv.dim() == 5:
        return qkv[:, :, 0], qkv[:, :, 1]
    if num_heads_q is None:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)} and num_heads_q is None; without a dimension of 3 "
            "num_heads_q must say how many of its heads are queries"
        )
    num_heads_k = (qkv.shape[2] - num_heads_q) // 2
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + num_heads_k]


def apply_rotary_emb_qkv_(
    qkv,
    cos,
    sin,
    cos_k=None,
    sin_k=None,
    interleaved=False,
    seqlen_offsets=0,
    num_heads_q=None,
):
    """Rotates the queries and keys of qkv in place and returns it.

    Args:
        qkv: (batch, seqlen, 3, num_heads, head_dim), or (batch, seqlen, num_heads_q + 2 *
            num_heads_k, head_dim) with num_heads_q.
        cos, sin: (seqlen_rotary, rotary_dim / 2), also for the keys where cos_k, sin_k are None.
        seqlen_offsets: an int or (batch,), the position of each sequence's first row.
    """
    cos_k, sin_k = (cos if cos_k is None else cos_k), (sin if sin_k is None else sin_k)
    q, k = _queries_and_keys(qkv, num_heads_q)
    for x, table in ((q, (cos, sin)), (k, (cos_k, sin_k))):
        x.copy_(apply_rotary_emb(x, *table, interleaved, False, seqlen_offsets))
    return qkv


def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0):
    """Rotates the keys of kv (batch, seqlen, 2, num_heads_k, head_dim) in place and returns it."""
    k = kv[:, :, 0]
    k.copy_(apply_rotary_emb(k, cos, sin, interleaved, False, seqlen_offsets))
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotates qkv, or q and kv, with tables that it keeps.

    Args:
        dim: how many elements of a head are rotated.
        base: the largest wavelength is base * 2π.
        interleaved: pairs are neighbours and not halves.
        scale_base: XPos: keys fade with the distance; 512 is usual. None: plain rotation.
    """

    def __init__(self, dim, base=10000.0, interleaved=False, scale_base=None, device=None):
        super().__init__()
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = interleaved, scale_base
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("inv_freq", self.base ** (-even / dim), persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self._key = None  # what the tables were made for
        self._tables = ()

    def _tables_of(self, seqlen, device, dtype):
        """(cos, sin, cos of keys, sin of keys), each (seqlen or more, dim / 2).

        Angles are computed in fp32 from fp32 frequencies, also when the module is in bf16: large
        positions have no exact bf16.
        """
        key = (device, dtype, torch.is_inference_mode_enabled())
        if self._key == key and self._tables[0].shape[0] >= seqlen:
            return self._tables
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(positions, self.base ** (-even / self.dim))
        cos, sin = angles.cos(), angles.sin()
        tables = (cos, sin, cos, sin)
        if self.scale_base is not None:
            power = (positions - seqlen // 2) / self.scale_base
            scale = ((even + 0.4 * self.dim) / (1.4 * self.dim)) ** power[:, None]
            tables = (cos * scale, sin * scale, cos / scale, sin / scale)
        self._key, self._tables = key, tuple(x.to(dtype) for x in tables)
        return self._tables

    def forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None):
        """Rotates in place.

        Args:
            qkv: as apply_rotary_emb_qkv_; with kv, q alone (batch, seqlen, num_heads, head_dim).
            kv: (batch, seqlen, 2, num_heads_k, head_dim).
            seqlen_offset: an int or (batch,), the position of the first row.
            max_seqlen: the longest position + 1; needed where seqlen_offset is a tensor.

        Returns:
            qkv, or (q, kv).

        Raises:
            ValueError: seqlen_offset is a tensor and max_seqlen is None.
        """
        if isinstance(seqlen_offset, torch.Tensor) and max_seqlen is None:
            raise ValueError(
                "seqlen_offset is a tensor and max_seqlen is None; pass the longest position + 1, "
                "which is not read back from the device"
            )
        seqlen = qkv.shape[1] + seqlen_offset if max_seqlen is None else max_seqlen
        cos, sin, cos_k, sin_k = self._tables_of(seqlen, qkv.device, qkv.dtype)
        settings = (self.interleaved, seqlen_offset)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, *settings, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, *settings)
