"""Exact attention in plain differentiable PyTorch: what every kernel is tested against.

Arguments carry the names, order and meaning of the operator ``flash::attn``. Nothing here is fast:
each sequence's score matrix is built whole. With ``compute_dtype=torch.float64`` (the default) the
result is the judge; with ``compute_dtype=q.dtype`` it is the same math rounded after every step,
whose error says what can be asked of that dtype. The file needs torch alone.
"""

import itertools

import torch

BIAS_FLOOR = -1e38  # finite biases stop here, so that finfo.min plus a score stays finite in fp32
_MASK32, _MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


class _Substitute(torch.autograd.Function):
    """The value of ``value`` with the gradient of ``x``."""

    @staticmethod
    def forward(x, value):
        return value.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad, None

    @staticmethod
    def jvp(ctx, tangent, _):
        return tangent.clone()


def _finite(x):
    """x with NaN and Inf read as 0, so that a product with an exact 0 is 0; the gradient passes."""
    ok = torch.isfinite(x)
    return x if ok.all() else _Substitute.apply(x, torch.where(ok, x, 0).detach())


# ---- dropout -------------------------------------------------------------------------------------


def _multiply_hi_lo(a, x):
    """High and low words of the 32 x 32 bit product, in halves because int64 holds 63 bits."""
    low = a * (x & 0xFFFF)
    high = a * (x >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32_7(counter, key):
    """Philox4x32 with 7 rounds (Salmon et al., Random123).

    counter: four int64 tensors of 32-bit words that broadcast; key: two ints of 32 bits.
    Returns four int64 tensors of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        hi0, lo0 = _multiply_hi_lo(0xD2511F53, c0)
        hi1, lo1 = _multiply_hi_lo(0xCD9E8D57, c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def _splitmix64(x):
    """One step of splitmix64 on a 64-bit int: spreads the offset over two counter words."""
    z = (x + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _threshold(dropout_p):
    """Bytes below this are dropped: dropout happens in steps of 1/256."""
    return int(256 * dropout_p + 0.5)


def _keep_sequences(rng_state, dropout_p, sequences, num_heads, seqlen_q, seqlen_k):
    """dropout_keep for the batch indices ``sequences`` (int64 tensor)."""
    seed, offset = (int(word) & _MASK64 for word in rng_state.tolist())
    spread = _splitmix64(offset)
    device = sequences.device
    blocks = (seqlen_k + 63) // 64
    counter = (  # axes: sequence, head, row, (block of 64 keys, t)
        torch.arange(4 * blocks, device=device),
        torch.arange(seqlen_q, device=device)[:, None],
        torch.arange(num_heads, device=device)[:, None, None] ^ (spread & _MASK32),
        sequences[:, None, None, None] ^ (spread >> 32),
    )
    words = torch.stack(philox4x32_7(counter, (seed & _MASK32, seed >> 32)), dim=-1)
    shifts = torch.arange(0, 32, 8, device=device)
    values = (words[..., None] >> shifts) & 0xFF
    # Byte 2n + c of call t in block a belongs to key 64a + 8n + 2t + c.
    values = values.reshape(*words.shape[:3], blocks, 4, 8, 2).transpose(-3, -2).flatten(3)
    return values[..., :seqlen_k] >= _threshold(dropout_p)


def dropout_keep(rng_state, dropout_p, batch, num_heads, seqlen_q, seqlen_k):
    """Which probabilities dropout keeps: bool (batch, num_heads, seqlen_q, seqlen_k).

    rng_state: int64 tensor (2,), seed and offset. Rows and keys are counted inside their sequence,
    so a shorter sequence has the top-left part of this mask. Kept entries are scaled by
    256 / (256 - T), T = floor(256 * dropout_p + 0.5).
    """
    sequences = torch.arange(batch, device=rng_state.device)
    return _keep_sequences(rng_state, dropout_p, sequences, num_heads, seqlen_q, seqlen_k)


# ---- one sequence: q (seqlen_q, num_heads, head_dim), k and v (seqlen_k, num_heads_k, ...) -------


def _diagonal_offset(seqlen_q, seqlen_k, device):
    """j - (i + seqlen_k - seqlen_q) as (seqlen_q, seqlen_k): 0 on the bottom-right diagonal."""
    rows = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    return torch.arange(seqlen_k, device=device)[None] - rows


def _visible(offset, bias, causal, window_left, window_right, leftpad=0):
    """Which row sees which key: bool (num_heads|1, seqlen_q, seqlen_k)."""
    seen = torch.ones_like(offset, dtype=torch.bool)
    seen[:, :leftpad] = False
    if causal:
        seen = seen & (offset <= 0)
    if window_left >= 0:
        seen = seen & (offset >= -window_left)
    if window_right >= 0:
        seen = seen & (offset <= window_right)
    if bias is not None:
        seen = seen & (bias if bias.dtype == torch.bool else ~torch.isneginf(bias))
    return seen if seen.dim() == 3 else seen[None]


def _add(s, x):
    """s + x in their common dtype; a sum of finite numbers stays finite (fp16 ends at -65504)."""
    total = s + x
    fell = torch.isneginf(total) & torch.isfinite(s) & torch.isfinite(x)
    return torch.where(fell, torch.finfo(total.dtype).min, total)


def _scores(q, k, seen, offset, bias, slopes, softmax_scale, softcap):
    """Steps 1 to 4: scores (num_heads, seqlen_q, seqlen_k) and which of them take part."""
    product = softmax_scale * (_finite(q) @ _finite(k).mT)
    if not (torch.isfinite(q).all() and torch.isfinite(k).all()):
        with torch.no_grad():  # the true value, which seen entries must show
            value = softmax_scale * (q @ k.mT)
        product = _Substitute.apply(product, value)
    s = torch.where(seen, product, 0)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None and bias.dtype != torch.bool:
        bias = bias.to(torch.promote_types(s.dtype, bias.dtype))
        floor = max(BIAS_FLOOR, torch.finfo(bias.dtype).min)
        # The clamp guards the sum against overflow; the gradient is that of the plain sum.
        s = _add(s, _Substitute.apply(bias, bias.detach().clamp(min=floor)))
    if slopes is not None:
        slopes = slopes.to(torch.promote_types(s.dtype, torch.float32))
        s = s - slopes[:, None, None] * offset.abs()
    seen = seen & ~torch.isneginf(s)
    return torch.where(seen, s, -torch.inf), seen


def _softmax(s, seen, sinks):
    """Step 5: p (num_heads, seqlen_q, seqlen_k) and lse (num_heads, seqlen_q).

    Both come from scores minus the row's maximum. exp(s - lse) would not do: next to a maximum of
    -1e38 the logarithm of the row's sum is lost in lse.
    """
    wide = torch.promote_types(s.dtype, torch.float32)
    sink = s.new_full((*s.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        sink = sinks.to(wide)[:, None, None].expand_as(sink)
    logits = torch.cat([s, sink], dim=-1)
    empty = torch.isneginf(logits).all(-1, keepdim=True)
    logits = torch.where(empty, 0, logits)  # with the next ones: no NaN to multiply gradients by
    p = torch.where(seen, torch.softmax(logits, dim=-1)[..., :-1], 0)
    row_max = logits.detach().amax(-1, keepdim=True).to(wide)
    lse = row_max + torch.log(torch.exp(logits.to(wide) - row_max).sum(-1, keepdim=True))
    return p, torch.where(empty, -torch.inf, lse).squeeze(-1)


def _dropped(p, keep, dropout_p):
    """Step 6."""
    threshold = _threshold(dropout_p)
    scale = 256 / (256 - threshold) if threshold < 256 else 0.0
    return torch.where(keep, p * scale, 0)


def _weighted_values(p, v, seen):
    """Step 7: p @ v, where a non-finite value reaches exactly the rows that see its key."""
    out = p @ _finite(v)
    if torch.isfinite(v).all():
        return out
    weight = seen.to(v.dtype)

    def reached(bad, value):
        return torch.where(weight @ bad.to(v.dtype) > 0, value, 0.0)

    spoil = reached(v.isnan(), torch.nan)
    spoil = spoil + reached(v.isposinf(), torch.inf) + reached(v.isneginf(), -torch.inf)
    if p.requires_grad:
        bad_key = ~torch.isfinite(v).all(-1)[:, None]
        p.register_hook(lambda grad: torch.where(seen & bad_key, torch.nan, grad))
    return _Substitute.apply(out, (out + spoil).detach())


# ---- layouts -------------------------------------------------------------------------------------


def _sequence_rows(x, cu_seqlens, seqused, max_seqlen, page_table=None):
    """For each sequence the indices of its rows in x.flatten(0, 1) (varlen: in x itself).

    Lengths and page numbers are clamped into x, as the kernels do.
    """
    if page_table is not None:
        pages, page_size = x.shape[0], x.shape[1]
        inside = torch.arange(page_size, device=x.device)
        table = page_table.long().clamp(0, max(pages - 1, 0))
        rows = list((table[:, :, None] * page_size + inside).flatten(1))
    elif cu_seqlens is not None:
        edges = cu_seqlens.tolist()
        starts = [min(max(edge, 0), x.shape[0]) for edge in edges]
        rows = [
            torch.arange(start, max(start, end), device=x.device)
            for start, end in itertools.pairwise(starts)
        ]
    else:
        rows = list(torch.arange(x.shape[0] * x.shape[1], device=x.device).view(x.shape[:2]))
    used = seqused.tolist() if seqused is not None else [len(r) for r in rows]
    limit = torch.iinfo(torch.int64).max if max_seqlen is None else int(max_seqlen)
    rows = [r[: max(min(u, limit), 0)] for r, u in zip(rows, used, strict=True)]
    # Batch 0 counts as one sequence of no rows: empty results stay attached to their inputs.
    return rows or [torch.arange(0, device=x.device)]


def _pieces(x, rows, compute_dtype):
    """The sequences of x as (num_heads, length, head_dim), by one gather: a linear backward."""
    flat = x.to(compute_dtype) if x.dim() == 3 else x.to(compute_dtype).flatten(0, 1)
    parts = flat.index_select(0, torch.cat(rows)).split([len(r) for r in rows])
    return [part.transpose(0, 1) for part in parts]


def _per_sequence(x, batch):
    """One entry for each sequence; the first dimension of x is the batch or broadcasts over it."""
    if x is None:
        return [None] * batch
    return x.expand(batch, *x.shape[1:]).unbind(0) if x.shape[0] > 0 else [None]


def _assemble(parts, rows, q, fill):
    """Back to q's layout: parts (num_heads, length, ...) to (batch, seqlen_q, num_heads, ...)."""
    lead = q.shape[:-2]
    joined = torch.cat(parts, dim=1).transpose(0, 1)
    flat = joined.new_full((lead.numel(), *joined.shape[1:]), fill)
    return flat.index_copy(0, torch.cat(rows), joined).view(*lead, *joined.shape[1:])


def _score_blocks(
    q,
    k,
    bias,
    alibi_slopes,
    rng_state,
    softmax_scale,
    causal,
    window,
    softcap,
    dropout_p,
    leftpad_k=None,
):
    """Sequence by sequence, for lists q and k of pieces: (scores, seen, kept or None)."""
    if dropout_p > 0 and rng_state is None:
        raise ValueError("dropout_p > 0 needs rng_state, an int64 tensor of 2 (seed, offset)")
    if alibi_slopes is not None and alibi_slopes.dim() == 1:
        alibi_slopes = alibi_slopes[None]
    biases, slopes = _per_sequence(bias, len(q)), _per_sequence(alibi_slopes, len(q))
    for index, (q_, k_, bias_, slopes_) in enumerate(zip(q, k, biases, slopes, strict=True)):
        num_heads, seqlen_q, seqlen_k = q_.shape[0], q_.shape[1], k_.shape[1]
        k_ = k_.repeat_interleave(num_heads // k_.shape[0], dim=0)
        bias_ = None if bias_ is None else bias_[:, :seqlen_q, :seqlen_k]
        offset = _diagonal_offset(seqlen_q, seqlen_k, q_.device)
        leftpad = 0 if leftpad_k is None else max(int(leftpad_k[index]), 0)
        seen = _visible(offset, bias_, causal, *window, leftpad)
        scale = q_.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        s, seen = _scores(q_, k_, seen, offset, bias_, slopes_, scale, softcap)
        keep = None
        if dropout_p > 0:
            number = torch.tensor([index], device=rng_state.device)
            keep = _keep_sequences(rng_state, dropout_p, number, num_heads, seqlen_q, seqlen_k)[0]
        yield s, seen, keep


def attention(
    q,
    k,
    v,
    bias=None,
    alibi_slopes=None,
    sinks=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    page_table=None,
    rng_state=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    window_left=-1,
    window_right=-1,
    softcap=0.0,
    dropout_p=0.0,
    deterministic=False,
    num_splits=0,
    leftpad_k=None,
    compute_dtype=torch.float64,
):
    """``flash::attn`` by definition. Returns (out, lse).

    Shapes, masks and edges are those of the operator: dense (batch, seqlen, num_heads, head_dim),
    varlen with cu_seqlens, or k and v in pages. out (..., num_heads, head_dim_v) is in
    compute_dtype, lse (batch, num_heads, seqlen_q) or varlen (num_heads, total_q) in the same but
    at least fp32. Differentiable in q, k, v, bias, alibi_slopes and sinks, through out and lse.
    deterministic and num_splits choose among kernels and change nothing here. leftpad_k hides the
    first keys of each sequence. Raises ValueError when dropout_p > 0 comes without rng_state.
    """
    rows_q = _sequence_rows(q, cu_seqlens_q, seqused_q, max_seqlen_q)
    rows_k = _sequence_rows(k, cu_seqlens_k, seqused_k, max_seqlen_k, page_table)
    pieces_q, pieces_k = _pieces(q, rows_q, compute_dtype), _pieces(k, rows_k, compute_dtype)
    settings = (softmax_scale, causal, (window_left, window_right), softcap, dropout_p, leftpad_k)
    blocks = _score_blocks(pieces_q, pieces_k, bias, alibi_slopes, rng_state, *settings)
    outs, lses = [], []
    for v_, (s, seen, keep) in zip(_pieces(v, rows_k, compute_dtype), blocks, strict=True):
        p, lse = _softmax(s, seen, sinks)
        if keep is not None:
            p = _dropped(p, keep, dropout_p)
        v_ = v_.repeat_interleave(s.shape[0] // v_.shape[0], dim=0)
        outs.append(_weighted_values(p.to(compute_dtype), v_, seen))
        lses.append(lse)
    lse = _assemble(lses, rows_q, q, -torch.inf)
    return _assemble(outs, rows_q, q, 0.0), lse.transpose(-2, -1).contiguous()


def attn_probs(
    q,
    k,
    lse,
    bias=None,
    alibi_slopes=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    rng_state=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    window_left=-1,
    window_right=-1,
    softcap=0.0,
    dropout_p=0.0,
    compute_dtype=torch.float64,
):
    """``flash::attn_probs`` by definition: exp(s - lse), the sign bit set where dropout drops.

    Returns (batch, num_heads, seqlen_q, seqlen_k) in compute_dtype but at least fp32; varlen: the
    last two are max_seqlen_q and max_seqlen_k (None: the totals), padded with 0.
    """
    rows_q = _sequence_rows(q, cu_seqlens_q, seqused_q, max_seqlen_q)
    rows_k = _sequence_rows(k, cu_seqlens_k, seqused_k, max_seqlen_k)
    pieces_q, pieces_k = _pieces(q, rows_q, compute_dtype), _pieces(k, rows_k, compute_dtype)
    settings = (softmax_scale, causal, (window_left, window_right), softcap, dropout_p)
    blocks = _score_blocks(pieces_q, pieces_k, bias, alibi_slopes, rng_state, *settings)
    width_q = q.shape[-3] if cu_seqlens_q is None or max_seqlen_q is None else int(max_seqlen_q)
    width_k = k.shape[-3] if cu_seqlens_k is None or max_seqlen_k is None else int(max_seqlen_k)
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    lse_rows = lse.transpose(-2, -1).reshape(-1, q.shape[-2])
    probs = []
    for rows, (s, seen, keep) in zip(rows_q, blocks, strict=True):
        row_lse = lse_rows[rows].to(s.dtype).t()[..., None]
        p = torch.where(seen, torch.exp(s - row_lse), 0)
        if keep is not None:
            p = torch.where(keep, p, -p)
        padding = (0, width_k - p.shape[2], 0, width_q - p.shape[1])
        probs.append(torch.nn.functional.pad(p, padding))
    return torch.stack(probs)[:batch]


def _new_rows(x, cu_seqlens):
    """For each sequence the indices of its rows in x.flatten(0, 1) (packed: in x itself)."""
    return _sequence_rows(x, cu_seqlens, None, None)


def rotary(
    x,
    cos,
    sin,
    seqlen_offsets=None,
    cu_seqlens=None,
    interleaved=False,
    conjugate=False,
    compute_dtype=torch.float64,
):
    """``flash::rotary`` by definition, in compute_dtype: pairs turned by their row's position.

    Positions past the tables stay at the last one; packed rows of no sequence are 0.
    """
    flat = x.to(compute_dtype) if cu_seqlens is not None else x.to(compute_dtype).flatten(0, 1)
    half = cos.shape[1]
    cos, sin = cos.to(compute_dtype), sin.to(compute_dtype) * (-1 if conjugate else 1)
    out = torch.zeros_like(flat)
    for b, rows in enumerate(_new_rows(x, cu_seqlens) if x.shape[0] else []):
        first = 0 if seqlen_offsets is None else int(seqlen_offsets[b])
        position = (first + torch.arange(len(rows), device=x.device)).clamp(0, cos.shape[0] - 1)
        c, s = cos[position][:, None], sin[position][:, None]
        turning, rest = flat[rows].split([2 * half, x.shape[-1] - 2 * half], dim=-1)
        if interleaved:
            a, b_ = turning.unflatten(-1, (half, 2)).unbind(-1)
            turned = torch.stack([a * c - b_ * s, a * s + b_ * c], dim=-1).flatten(-2)
        else:
            a, b_ = turning[..., :half], turning[..., half:]
            turned = torch.cat([a * c - b_ * s, a * s + b_ * c], dim=-1)
        out = out.index_copy(0, rows, torch.cat([turned, rest], dim=-1))
    return out.view(x.shape)


def cache_append(
    k_cache,
    v_cache,
    k,
    v,
    cache_seqlens,
    page_table=None,
    cu_seqlens=None,
    rotary_cos=None,
    rotary_sin=None,
    rotary_interleaved=True,
):
    """``flash::cache_append`` by definition, in place, row by row. Returns seqused_k.

    A row past the capacity, or of a page that does not exist, is dropped.
    """
    if rotary_cos is not None:
        tables = (rotary_cos, rotary_sin, cache_seqlens.clamp(min=0), cu_seqlens)
        k = rotary(k, *tables, rotary_interleaved).to(k.dtype)
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    flat_k, flat_v = (x if cu_seqlens is not None else x.flatten(0, 1) for x in (k, v))
    used = []
    for b, rows in enumerate(_new_rows(k, cu_seqlens) if len(cache_seqlens) else []):
        before = max(int(cache_seqlens[b]), 0)
        used.append(min(before + len(rows), capacity))
        for key, row in zip(range(before, capacity), rows.tolist(), strict=False):
            block, place = b, key
            if page_table is not None:
                block, place = int(page_table[b, key // k_cache.shape[1]]), key % k_cache.shape[1]
            if 0 <= block < k_cache.shape[0]:
                k_cache[block, place], v_cache[block, place] = flat_k[row], flat_v[row]
    return torch.tensor(used, dtype=torch.int32, device=k.device)


def merge(out_a, lse_a, out_b, lse_b):
    """Attention over two disjoint key sets from the results over each, in fp64: (out, lse).

    out (..., seqlen_q, num_heads, head_dim_v), lse (..., num_heads, seqlen_q). A part whose lse is
    -inf contributes nothing, whatever its out holds; two such parts give out 0 and lse -inf.
    """
    parts = torch.stack([lse_a.double(), lse_b.double()])
    top = parts.detach().amax(0)
    top = torch.where(torch.isneginf(top), 0, top)
    weights = torch.exp(parts - top)
    total = weights.sum(0)
    empty = total == 0
    total = torch.where(empty, 1, total)
    lse = torch.where(empty, -torch.inf, top + torch.log(total))
    share = (weights / total).transpose(-2, -1).unsqueeze(-1)
    outs = torch.stack([out_a.double(), out_b.double()])
    return torch.where(share > 0, share * outs, 0).sum(0), lse


# ---- the algorithm -------------------------------------------------------------------------------


def _tile_scores(q, k, rows, keys, scale, causal):
    """Scores of one tile, (batch, num_heads, rows, keys): all that ever exists of the matrix."""
    s = scale * q[..., rows, :] @ k[..., keys, :].mT
    if causal:
        i = torch.arange(q.shape[-2], device=q.device)[rows, None] + k.shape[-2] - q.shape[-2]
        s = s.masked_fill(torch.arange(k.shape[-2], device=q.device)[keys] > i, -torch.inf)
    return s


class _Tiled(torch.autograd.Function):
    """Over q, k, v (batch, num_heads, seqlen, head_dim); docs/algorithm.md explains the lines."""

    @staticmethod
    def forward(ctx, q, k, v, scale, causal, row_blocks, key_blocks):
        out, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
        for rows in row_blocks:
            acc_o = out[..., rows, :]  # unnormalised until the last key
            row_max = torch.full_like(lse[..., rows, None], -torch.inf)
            row_sum = torch.zeros_like(row_max)
            for keys in key_blocks:
                s = _tile_scores(q, k, rows, keys, scale, causal)
                new_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
                base = new_max.masked_fill(new_max == -torch.inf, 0)  # where no key was seen yet
                p, rescale = torch.exp(s - base), torch.exp(row_max - base)
                row_sum = rescale * row_sum + p.sum(-1, keepdim=True)
                acc_o.mul_(rescale).add_(p @ v[..., keys, :])
                row_max = new_max
            acc_o.div_(row_sum.masked_fill(row_sum == 0, 1))
            lse[..., rows] = (row_max + row_sum.log()).squeeze(-1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = scale, causal, row_blocks, key_blocks
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        scale, causal, row_blocks, key_blocks = ctx.settings
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (dout * out).sum(-1, keepdim=True) - dlse[..., None]
        base = lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]  # no key: p is 0, not NaN
        for keys in key_blocks:
            for rows in row_blocks:
                s = _tile_scores(q, k, rows, keys, scale, causal)
                p = torch.exp(s - base[..., rows, :])  # normalised at once: lse knows all keys
                dp = dout[..., rows, :] @ v[..., keys, :].mT
                ds = scale * p * (dp - delta[..., rows, :])
                dv[..., keys, :] += p.mT @ dout[..., rows, :]
                dk[..., keys, :] += ds.mT @ q[..., rows, :]
                dq[..., rows, :] += ds @ k[..., keys, :]
        return dq, dk, dv, None, None, None, None


def _blocks(length, size):
    return [slice(begin, min(begin + size, length)) for begin in range(0, length, size)]


def tiled_attention(q, k, v, softmax_scale=None, causal=False, block_m=64, block_n=64):
    """What the kernels do, in PyTorch: tiles, online softmax, recomputation in the backward.

    For reading and for experiments. It is slow, but its memory is O(seqlen) in both passes.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim). k: (batch, seqlen_k, num_heads, head_dim).
            v: (batch, seqlen_k, num_heads, head_dim_v). One floating dtype, in which everything is
            computed, and no groups of query heads.
        softmax_scale: default 1 / sqrt(head_dim).
        causal: key j is visible to row i when j <= i + seqlen_k - seqlen_q (bottom right).
        block_m, block_n: query rows and keys of a tile; the result depends on them by rounding
            alone.

    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v) and lse (batch, num_heads, seqlen_q) in q's
        dtype, both differentiable, once. A row that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: shapes or dtypes that do not go together, a block below 1.

    Source: Dao, FlashAttention-2 (2023), algorithms 1 and 2.
    """
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; cast them to one dtype")
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k = k.shape[1]
    for name, x, dim in (("k", k, head_dim), ("v", v, v.shape[-1])):
        if x.shape != (batch, seqlen_k, num_heads, dim):
            raise ValueError(
                f"{name} is {tuple(x.shape)}; with this q and k it must be "
                f"{(batch, seqlen_k, num_heads, dim)}: repeat key heads to q's number of heads"
            )
    if block_m < 1 or block_n < 1:
        raise ValueError(f"block_m {block_m} and block_n {block_n} must be at least 1")
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    blocks = _blocks(seqlen_q, block_m), _blocks(seqlen_k, block_n)
    out, lse = _Tiled.apply(*by_head, scale, causal, *blocks)
    return out.transpose(1, 2), lse
