"""Tiny randomly initialised models of Transformers, one a kind of attention.

Weights are drawn wider than models draw theirs, so that attention is far from uniform and a wrong
mask, scale or sink shows.
"""

import copy
import functools

import torch
import transformers as hf

VOCABULARY = 40
PAD = 0

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.25,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_BERT = {k: x for k, x in _SIZES.items() if k not in ("head_dim", "num_key_value_heads")}
_BART = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 64, "init_std": 0.25},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": PAD},
    **{"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": None},
    **{"forced_eos_token_id": None, "dropout": 0.0},
}
_T5 = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2},
    **{"num_heads": 4, "pad_token_id": PAD, "decoder_start_token_id": 1, "eos_token_id": None},
    **{"initializer_factor": 0.7, "dropout_rate": 0.0, "relative_attention_num_buckets": 8},
}
_MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}

# name: (model class, configuration). What each is there for stands beside it.
MODELS = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**_SIZES)),  # grouped heads
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig(**_SIZES, sliding_window=4)),
    "gemma2": (  # softcap; every second layer a window; its own scale
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config(
            **_SIZES, sliding_window=4, attn_logit_softcapping=3.0, query_pre_attn_scalar=16
        ),
    ),
    "gpt_oss": (  # sinks; every second layer a window
        hf.GptOssForCausalLM,
        hf.GptOssConfig(
            **_SIZES,
            **_MOE,
            sliding_window=4,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    ),
    "bert": (hf.BertForMaskedLM, hf.BertConfig(**_BERT)),  # encoder
    "vit": (  # no mask at all
        hf.ViTModel,
        hf.ViTConfig(
            **{k: x for k, x in _BERT.items() if "token" not in k and k != "vocab_size"},
            image_size=12,
            patch_size=4,
        ),
    ),
    "bart": (hf.BartForConditionalGeneration, hf.BartConfig(**_BART)),  # cross-attention
    "t5": (hf.T5ForConditionalGeneration, hf.T5Config(**_T5)),  # relative position bias
}
DECODERS = ("llama", "mistral", "gemma2", "gpt_oss")
ENCODER_DECODERS = ("bart", "t5")


@functools.cache
def _weights(name):
    torch.manual_seed(0)
    cls, config = MODELS[name]
    model = cls(copy.deepcopy(config))
    with torch.no_grad():
        for key, x in model.named_parameters():
            if key.endswith("sinks"):
                x.normal_()
    return model.state_dict()


def make_model(name, implementation, device="cpu", dtype=torch.float32, **changes):
    """The same weights for every implementation, in eval mode."""
    cls, config = MODELS[name]
    config = copy.deepcopy(config)
    for key, x in changes.items():
        setattr(config, key, x)
    config._attn_implementation = implementation
    if name == "gpt_oss":  # grouped products do not trace on every version's CPU path
        config._experts_implementation = "batched_mm"
    model = cls(config)
    model.load_state_dict(_weights(name))
    return model.to(device, dtype).eval()


def make_pair(name, device="cpu", dtype=torch.float32, **changes):
    """(eager, flash_ext) with the same weights."""
    return [make_model(name, i, device, dtype, **changes) for i in ("eager", "flash_ext")]


def make_ids(batch=2, seqlen=11, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, seqlen), generator=generator).to(device)


def padding_mask(side, lengths, seqlen, device="cpu"):
    """(batch, seqlen), 1 = a token; None for no padding."""
    if side == "none":
        return None
    places = torch.arange(seqlen)
    places = places.flip(0) if side == "left" else places
    return (places < torch.tensor(lengths)[:, None]).long().to(device)


def make_inputs(name, padding="none", device="cpu", dtype=torch.float32):
    """(keywords for the model, which outputs count: bool (batch, seqlen))."""
    if name == "vit":
        pixels = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
        return {"pixel_values": pixels.to(device, dtype)}, torch.ones(2, 10, dtype=torch.bool)
    ids = make_ids(device=device)
    mask = padding_mask(padding, (11, 7), 11, device)
    inputs = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
    counts = torch.ones_like(ids).bool() if mask is None else mask.bool()
    if name in ENCODER_DECODERS:
        inputs["decoder_input_ids"] = make_ids(seqlen=6, seed=1, device=device)
        counts = torch.ones(2, 6, dtype=torch.bool)
    return inputs, counts


def outputs(model, inputs, counts):
    """The outputs that count, as rows."""
    result = model(**inputs)
    x = result.logits if "logits" in result else result.last_hidden_state
    return x[counts.to(x.device)]


def outputs_and_gradients(model, inputs, counts):
    """The outputs, then the gradients of the parameters by name."""
    x = outputs(model, inputs, counts)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    grads = torch.autograd.grad((x * weights).sum(), [p for _, p in named], allow_unused=True)
    return x.detach(), {n: g for (n, _), g in zip(named, grads, strict=True) if g is not None}
