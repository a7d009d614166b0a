"""Hugging Face Transformers on flash_ext: `attn_implementation="flash_ext"`.

    import flash_ext.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_ext")

Importing this module registers the implementation with Transformers' AttentionInterface and
AttentionMaskInterface. Every model that computes its attention through them is served, with
padding, packed sequences, sliding windows, softcap, sinks, grouped heads, relative position biases,
cross-attention and every cache of `generate`. Needs transformers >= 5.4.

What Transformers can ask for and flash_ext does not do is refused by name: block tables of
continuous batching, flex_attention's BlockMask, models that bypass the interfaces.
"""

import inspect

import torch
from torch import Tensor

try:
    from transformers import masking_utils as hf_masking
    from transformers.modeling_utils import AttentionInterface, PreTrainedModel
except ImportError as error:
    raise ImportError(
        "flash_ext.integrations.transformers needs transformers >= 5.4: pip install transformers"
    ) from error

if "q_length" not in inspect.signature(hf_masking.sdpa_mask).parameters:
    import transformers

    raise ImportError(
        f"transformers is {transformers.__version__}; flash_ext.integrations.transformers needs "
        "5.4 or later, whose mask interface speaks of q_length: pip install -U transformers"
    )

import flash_ext

from ._transformers_masks import Mask, make_mask, packed_lengths

__all__ = ["NAME", "attention_forward", "make_mask"]

NAME = "flash_ext"

# Arguments of continuous batching's block tables, which would otherwise be left unread.
_PAGED = ("block_table", "k_cache", "v_cache")


def _default_mask(module, query, key, is_causal, sliding_window) -> Mask:
    """The mask of a call that came without one: the module's own causal flag and window."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    window = (-1, -1)
    if sliding_window is not None and key.shape[2] > sliding_window:
        # Both sides, as Transformers passes it to flash-attn: encoders count it so that it fits.
        window = (sliding_window - 1, -1 if is_causal else sliding_window - 1)
    return Mask((query.shape[0], 1, query.shape[2], key.shape[2]), bool(is_causal), window)


def _packed_by_position_ids(position_ids, query, key):
    """What separates the sequences of a batch of one row, when there are several.

    Models that leave that out of their mask (gpt-oss), or have none, say it by position_ids
    (1, seqlen): a sequence begins wherever the smallest position comes again. The answer is kept
    on the tensor, so that one layer of a model waits for the device and the others do not.

    Returns:
        (hidden, lengths), one of them or both None: (1, 1, seqlen, seqlen) bool where a compiler
        traces, which can't read lengths, or else (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen).
    """
    seqlen = query.shape[2]
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[0] != 1:
        return None, None
    if query.shape[0] != 1 or position_ids.shape[1] != seqlen or key.shape[2] != seqlen:
        return None, None
    starts = (position_ids == position_ids.min()).flatten()
    starts[0] = True  # rows before the first minimum are a sequence too
    if torch.compiler.is_compiling():
        ids = starts.cumsum(0)
        return (ids[:, None] == ids)[None, None], None
    # A tensor of inference mode has no version; it is the model's own and stays as it is.
    version = None if position_ids.is_inference() else position_ids._version
    known = getattr(position_ids, "_flash_ext_packed", None)
    if known is None or known[0] != version:
        lengths = None
        if int(starts.sum()) > 1:
            cu_seqlens, max_seqlen = packed_lengths(starts)
            lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        known = position_ids._flash_ext_packed = (version, lengths)
    return None, known[1]


def _with_bias(position_bias, hidden):
    """One bias out of a position bias and what hides keys, either of them None.

    hidden: bool (True = take part) or numbers to add; both broadcast to (batch, heads, q, k).
    """
    if position_bias is None or hidden is None:
        return hidden if position_bias is None else position_bias
    if hidden.dtype == torch.bool:
        return torch.where(hidden, position_bias, -torch.inf)
    return position_bias + hidden


def _same_sequence(cu_seqlens, shape):
    """(batch, 1, seqlen, seqlen) bool: whether two places are of one packed sequence."""
    batch, _, seqlen, _ = shape
    places = torch.arange(batch * seqlen, dtype=torch.int32, device=cu_seqlens.device)
    ids = torch.searchsorted(cu_seqlens, places, right=True).view(batch, seqlen)
    return ids[:, None, :, None] == ids[:, None, None, :]


def attention_forward(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    is_causal=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    position_bias=None,
    position_ids=None,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    max_length_q=None,
    max_length_k=None,
    output_attentions=False,
    **kwargs,
):
    """Transformers' attention interface over `flash_ext.attention`.

    Args:
        module: the attention layer; its is_causal holds where is_causal is None.
        query: (batch, num_heads, q_length, head_dim).
        key, value: (batch, num_heads_k, kv_length, head_dim or head_dim_v), as the cache holds
            them: heads are not repeated.
        attention_mask: what `make_mask` returned; or bool (True = take part) or numbers to add,
            (batch|1, num_heads|1, q_length, kv_length); or (batch, kv_length), nonzero = a token.
        dropout, scaling, softcap: as `flash_ext.attention`'s dropout_p, softmax_scale, softcap.
        is_causal, sliding_window: hold where attention_mask is None or (batch, kv_length).
        s_aux: (num_heads,) sinks.
        position_bias: (batch|1, num_heads, q_length, kv_length), added to the scores.
        position_ids: (1, q_length), packed sequences: one begins at every smallest position.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences, all four, in
            the flattened (batch * q_length); they and position_ids count where the mask hides
            no more than causal and a window do.
        output_attentions: whether to return the probabilities too.
        kwargs: what other implementations take. Those of block tables are refused.

    Returns:
        (out (batch, q_length, num_heads, head_dim_v), probabilities (batch, num_heads, q_length,
        kv_length) without dropout and gradient, or None).

    Raises:
        NotImplementedError: block tables; position_bias or output_attentions with cu_seq_lens_*.
        TypeError: attention_mask is a BlockMask.
        The others: as `flash_ext.attention`.
    """
    paged = [name for name in _PAGED if kwargs.get(name) is not None]
    if paged:
        raise NotImplementedError(
            f"{paged[0]} is given, but flash_ext does not serve the block tables of continuous "
            'batching; use generate, or attn_implementation="paged|eager"'
        )
    hidden, lengths = None, None
    if attention_mask is None:
        mask = _default_mask(module, query, key, is_causal, sliding_window)
    elif isinstance(attention_mask, Mask):
        mask = attention_mask
        if mask.key_mask is not None:
            hidden = mask.key_mask[:, None, None, :]
    elif not isinstance(attention_mask, Tensor):
        raise TypeError(
            f"attention_mask is a {type(attention_mask).__name__}; it must be a tensor or None: "
            "flex_attention's BlockMask is for that implementation alone"
        )
    elif attention_mask.ndim == 2:
        mask = _default_mask(module, query, key, is_causal, sliding_window)
        hidden = attention_mask[:, None, None, -key.shape[2] :] != 0
    else:
        mask = _default_mask(module, query, key, False, None)
        hidden = attention_mask[..., : key.shape[2]]

    if mask.cu_seqlens is not None:
        lengths = (mask.cu_seqlens, mask.cu_seqlens, mask.max_seqlen, mask.max_seqlen)
    elif hidden is None and mask.seqused_k is None:
        lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        if any(x is None for x in lengths):
            hidden, lengths = _packed_by_position_ids(position_ids, query, key)
    if lengths is not None and (position_bias is not None or output_attentions):
        if lengths[0] is not lengths[1] or int(lengths[0][-1]) != query.shape[0] * query.shape[2]:
            raise NotImplementedError(
                "position_bias and output_attentions are for rows of one length; leave out "
                "cu_seq_lens_q and cu_seq_lens_k, or position_bias and output_attentions"
            )
        hidden, lengths = _same_sequence(lengths[0], mask.shape), None
    bias = _with_bias(position_bias, hidden)
    if bias is not None and bias.dtype not in (torch.bool, torch.float32, query.dtype):
        bias = bias.to(query.dtype)
    options = {
        "softmax_scale": scaling,
        "causal": mask.causal,
        "window": mask.window,
        "softcap": softcap or 0.0,
        "dropout_p": dropout,
    }
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if lengths is not None:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options |= dict(zip(names, lengths, strict=True))
        options["cu_seqlens_q"] = options["cu_seqlens_q"].to(torch.int32)
        options["cu_seqlens_k"] = options["cu_seqlens_k"].to(torch.int32)
        packed_qkv = (x.flatten(0, 1) for x in (q, k, v))
        out = flash_ext.attention(*packed_qkv, None, None, s_aux, **options)
        return out.unflatten(0, q.shape[:2]), None
    options["seqused_k"] = mask.seqused_k
    if not output_attentions:
        return flash_ext.attention(q, k, v, bias, None, s_aux, **options), None
    out, lse = flash_ext.attention(q, k, v, bias, None, s_aux, **options, return_lse=True)
    options["dropout_p"] = 0.0
    with torch.no_grad():
        probs = flash_ext.attn_probs(q, k, lse, bias, None, s_aux, **options)
    return out, probs


def _accept(check):
    """Transformers' check of an attention implementation, with flash_ext's name left to us.

    Transformers takes every name that contains "flash" for a package with flash-attn's functions
    and would look for it on the hub, or put another one in its place where a model lists those
    that it was tested with (gpt-oss).
    """

    def check_and_adjust(self, attn_implementation, *args, **kwargs):
        if attn_implementation != NAME:
            return check(self, attn_implementation, *args, **kwargs)
        if not type(self)._can_set_attn_implementation():
            raise ValueError(
                f'attn_implementation is "{NAME}", but {type(self).__name__} does not compute its '
                'attention through AttentionInterface; load it with attn_implementation="sdpa" or '
                '"eager"'
            )
        return NAME

    return check_and_adjust


def _register() -> None:
    AttentionInterface.register(NAME, attention_forward)
    hf_masking.AttentionMaskInterface.register(NAME, make_mask)
    check = PreTrainedModel._check_and_adjust_attn_implementation
    if check.__name__ != _accept(check).__name__:  # importlib.reload comes here again
        PreTrainedModel._check_and_adjust_attn_implementation = _accept(check)


_register()
