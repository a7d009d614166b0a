"""flash_ext.integrations.transformers: models compute what they compute with eager attention."""

import inspect
import subprocess
import sys

import pytest
import torch
import util

import flash_ext

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("flash_ext.integrations.transformers")
import hf_models  # noqa: E402  (needs transformers)
from hf_models import (  # noqa: E402
    DECODERS,
    ENCODER_DECODERS,
    MODELS,
    make_ids,
    make_inputs,
    make_pair,
)

# The name of a model's argument for its cache, which changed in 5.x.
CACHE = (
    "cache"
    if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters
    else "past_key_values"
)


def assert_close(got, expected, what="", scale=None):
    """Equal up to fp32 rounding through a model of two layers, against scale or the largest."""
    scale = expected.abs().max().item() if scale is None else scale
    torch.testing.assert_close(
        got, expected, rtol=0, atol=2e-5 * scale, msg=lambda m: f"{what}: {m}"
    )


def assert_same_gradients(got, expected):
    """Against the largest of all: the bias of a key projection has gradient 0 but for rounding."""
    assert got.keys() == expected.keys()
    scale = max(x.abs().max().item() for x in expected.values())
    for name, x in expected.items():
        assert_close(got[name], x, name, scale)


def check_model(name, inputs, counts, **changes):
    """Outputs and parameter gradients equal eager's."""
    eager, ours = make_pair(name, **changes)
    expected, expected_grads = hf_models.outputs_and_gradients(eager, inputs, counts)
    got, grads = hf_models.outputs_and_gradients(ours, inputs, counts)
    assert_close(got, expected, "outputs")
    assert_same_gradients(grads, expected_grads)


# ---- whole models --------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name, padding):
    if name == "vit" and padding != "none":
        padding = "none"
    check_model(name, *make_inputs(name, padding))


@pytest.mark.parametrize("name", MODELS)
def test_bf16(name):
    """In bf16 our error against fp32 is at most that of eager attention, and some rounding."""
    inputs, counts = make_inputs(name, "left" if name != "vit" else "none", dtype=torch.float32)
    exact = hf_models.outputs(hf_models.make_model(name, "eager"), inputs, counts)
    inputs, _ = make_inputs(name, "left" if name != "vit" else "none", dtype=torch.bfloat16)
    eager, ours = make_pair(name, dtype=torch.bfloat16)
    errors = [
        (hf_models.outputs(m, inputs, counts).float() - exact).square().mean().sqrt()
        for m in (eager, ours)
    ]
    assert errors[1] <= 1.5 * errors[0]


PACKED = (5, 1, 9, 2)  # lengths of the sequences in a row


def packed_position_ids(start=0):
    return torch.cat([torch.arange(start, start + n) for n in PACKED])[None]


@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences(name):
    """Position ids that begin again separate sequences: each computes what it does alone."""
    ids = make_ids(1, sum(PACKED))
    eager, ours = make_pair(name)
    expected = torch.cat([eager(x).logits for x in ids.split(PACKED, dim=1)], dim=1)
    got = ours(ids, position_ids=packed_position_ids(), use_cache=False).logits
    assert_close(got, expected)
    for logits in (got, expected):
        logits.sin().sum().backward()
    assert_same_gradients(*({n: p.grad for n, p in m.named_parameters()} for m in (ours, eager)))


def test_R095_packed_sequences_that_begin_at_5():
    """In two rows."""
    ids = make_ids(2, sum(PACKED))
    positions = packed_position_ids(5).repeat(2, 1)
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    check_model("mistral", inputs, torch.ones_like(ids).bool())


@pytest.mark.parametrize("name", DECODERS)
def test_padding_free_training(name):
    """The lengths that DataCollatorWithFlattening makes, instead of a mask."""
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    ids = make_ids(1, sum(PACKED))
    batch = collator([{"input_ids": x[0].tolist()} for x in ids.split(PACKED, dim=1)])
    lengths = {n: batch[n] for n in batch if n.startswith(("cu_seq", "max_length"))}
    assert len(lengths) == 4
    eager, ours = make_pair(name)
    expected = torch.cat([eager(x).logits for x in ids.split(PACKED, dim=1)], dim=1)
    inputs = {"input_ids": ids, "position_ids": batch["position_ids"], "use_cache": False}
    assert_close(ours(**inputs, **lengths).logits, expected)


@pytest.mark.parametrize("name", ["llama", "bart", "bert", "vit"])
def test_attention_probabilities(name):
    inputs, _ = make_inputs(name)
    eager, ours = make_pair(name)
    expected, got = (m(**inputs, output_attentions=True) for m in (eager, ours))
    fields = [n for n in expected if n.endswith("attentions") and expected[n]]
    assert fields
    for field in fields:
        for a, b in zip(got[field], expected[field], strict=True):
            assert_close(a, b, field)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "bart", "t5"])
def test_gradient_checkpointing(name):
    inputs, counts = make_inputs(name, "left")
    inputs["use_cache"] = False
    ours = hf_models.make_model(name, "flash_ext")
    expected = hf_models.outputs_and_gradients(ours, inputs, counts)
    ours.gradient_checkpointing_enable()
    ours.train()
    got = hf_models.outputs_and_gradients(ours, inputs, counts)
    assert_close(got[0], expected[0])
    assert_same_gradients(got[1], expected[1])


# ---- generate ------------------------------------------------------------------------------------


def generate(model, inputs, cache, **options):
    torch.manual_seed(0)
    return model.generate(
        **inputs, max_new_tokens=8, do_sample=False, cache_implementation=cache, **options
    )


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, padding, cache):
    """8 tokens past a window of 4, so that sliding caches wrap around."""
    inputs, _ = make_inputs(name, padding)
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    eager, ours = make_pair(name)
    tokens = generate(ours, inputs, cache)
    assert tokens.shape[1] == 11 + 8
    assert torch.equal(tokens, generate(eager, inputs, cache))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_generate_with_cross_attention(name, cache):
    inputs, _ = make_inputs(name, "right")
    del inputs["decoder_input_ids"]
    eager, ours = make_pair(name)
    tokens = generate(ours, inputs, cache)
    assert tokens.shape[1] == 9
    assert torch.equal(tokens, generate(eager, inputs, cache))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"use_cache": False}], ids=str)
def test_generate_modes(options):
    inputs, _ = make_inputs("gemma2", "left")
    eager, ours = make_pair("gemma2")
    assert torch.equal(
        generate(ours, inputs, None, **options), generate(eager, inputs, None, **options)
    )


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_inference_mode(name):
    ids = make_ids(1)
    eager, ours = make_pair(name)
    with torch.inference_mode():
        assert_close(ours(ids).logits, eager(ids).logits)
        assert_close(ours(ids, use_cache=False).logits, eager(ids, use_cache=False).logits)


def test_prefill_in_two_parts():
    """A second prompt on a filled cache: rows and keys differ in number."""
    ids = make_ids(2, 12)
    eager, ours = make_pair("mistral")
    for model in (eager, ours):
        cache = transformers.DynamicCache(config=model.config)
        model(ids[:, :7], **{CACHE: cache})
        model.second = model(ids[:, 7:], **{CACHE: cache}).logits
    assert_close(ours.second, eager.second)


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,padding", [("gpt_oss", "none"), ("gemma2", "right"), ("bert", "right")]
)
def test_compile(name, padding):
    inputs, counts = make_inputs(name, padding)
    eager, ours = make_pair(name)
    expected, expected_grads = hf_models.outputs_and_gradients(eager, inputs, counts)
    torch._dynamo.reset()
    ours.forward = torch.compile(ours.forward, backend="aot_eager", fullgraph=True)
    got, grads = hf_models.outputs_and_gradients(ours, inputs, counts)
    assert_close(got, expected)
    assert_same_gradients(grads, expected_grads)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_compiled_packed_sequences(name):
    ids = make_ids(1, sum(PACKED))
    eager, ours = make_pair(name)
    expected = torch.cat([eager(x).logits for x in ids.split(PACKED, dim=1)], dim=1)
    torch._dynamo.reset()
    ours.forward = torch.compile(ours.forward, backend="aot_eager", fullgraph=True)
    got = ours(ids, position_ids=packed_position_ids(), use_cache=False).logits
    assert_close(got, expected)


def test_compiled_decoding_with_a_static_cache():
    """Prefill and four steps, every one a whole graph."""
    ids = make_ids(2, 11)
    attention_mask = hf_models.padding_mask("left", (11, 7), 11)
    logits = []
    for model in make_pair("mistral"):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        mask = attention_mask
        if model.config._attn_implementation == "flash_ext":
            torch._dynamo.reset()
            step = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        else:
            step = model.forward
        x = [step(ids, attention_mask=mask, **{CACHE: cache}).logits[:, -1]]
        for i in range(4):
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            token = torch.full((2, 1), 3 + i)
            x.append(step(token, attention_mask=mask, **{CACHE: cache}).logits[:, -1])
        logits.append(torch.stack(x))
    assert_close(logits[1], logits[0])


# ---- models that ask for flash implementations by other means ------------------------------------


def test_vision_tower_with_cu_seqlens():
    """Qwen2-VL gives flash implementations lengths, and others a mask of blocks."""
    config = transformers.Qwen2VLConfig().vision_config
    sizes = {"depth": 2, "embed_dim": 32, "hidden_size": 16, "num_heads": 4, "mlp_ratio": 1}
    for key, x in sizes.items():
        setattr(config, key, x)
    grid = torch.tensor([[1, 4, 4], [1, 2, 6], [2, 2, 2]])
    tower = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel
    torch.manual_seed(0)
    pixels = torch.randn(int(grid.prod(-1).sum()), 3 * 2 * 14 * 14)
    results = []
    for implementation in ("eager", "flash_ext"):
        torch.manual_seed(1)
        config._attn_implementation = implementation
        results.append(tower(config).eval()(pixels, grid_thw=grid)[0])
    assert_close(results[1], results[0])


pixtral = transformers.models.pixtral.modeling_pixtral


@pytest.mark.skipif(
    "cu_seq_lens_q" not in inspect.getsource(pixtral),
    reason="this version's Pixtral tells flash implementations of no boundary between images",
)
def test_vision_tower_that_leaves_its_mask_out():
    config = transformers.PixtralVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    config.image_size, config.patch_size = 16, 4
    images, sizes = torch.randn(2, 3, 16, 16), torch.tensor([[16, 16], [8, 12]])
    results = []
    for implementation in ("eager", "flash_ext"):
        torch.manual_seed(1)
        config._attn_implementation = implementation
        model = transformers.PixtralVisionModel(config).eval()
        results.append(model(images, image_sizes=sizes)[0])
    assert_close(results[1], results[0])


# ---- the interface itself ------------------------------------------------------------------------


class Layer(torch.nn.Module):
    is_causal = True


def make_qkv(batch=2, q_length=5, kv_length=5, heads=4, heads_k=2, dim=8):
    generator = torch.Generator().manual_seed(0)

    def draw(n, length):
        return torch.randn(batch, n, length, dim, generator=generator)

    return draw(heads, q_length), draw(heads_k, kv_length), draw(heads_k, kv_length)


def attend(*args, **kwargs):
    return integration.attention_forward(Layer(), *args, **kwargs)[0]


def naive(q, k, v, mask):
    """mask bool (batch|1, 1, q, k)."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return (s.softmax(-1).nan_to_num() @ v).transpose(1, 2)


CUSTOM = torch.tensor(
    [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 1, 0, 0], [1, 0, 1, 1, 1], [0, 1, 0, 0, 1]]
).bool()[None, None]


@pytest.mark.parametrize("kind", ["bool", "number", "lowest"])
def test_custom_masks(kind):
    """A 4-D mask is all of the mask: the module's causal flag adds nothing."""
    q, k, v = make_qkv()
    lowest = -torch.inf if kind == "number" else torch.finfo(torch.float32).min
    mask = CUSTOM if kind == "bool" else torch.zeros(1, 1, 5, 5).masked_fill(~CUSTOM, lowest)
    assert_close(attend(q, k, v, mask), naive(q, k, v, CUSTOM))


def test_two_dimensional_mask():
    q, k, v = make_qkv()
    mask = hf_models.padding_mask("left", (5, 3), 5)
    seen = mask.bool()[:, None, None, :] & torch.ones(5, 5).tril().bool()
    assert_close(attend(q, k, v, mask), naive(q, k, v, seen))
    assert_close(
        attend(q, k, v, mask, is_causal=False), naive(q, k, v, mask.bool()[:, None, None, :])
    )


def test_arguments_are_used():
    q, k, v = make_qkv()
    plain = attend(q, k, v, None)
    for changed in (
        *({"scaling": 0.1}, {"softcap": 0.5}, {"is_causal": False}, {"sliding_window": 2}),
        *({"s_aux": torch.ones(4)}, {"position_bias": torch.randn(1, 4, 5, 5)}),
    ):
        assert not torch.allclose(attend(q, k, v, None, **changed), plain), changed
    assert attend(q, k, v, None, dropout=1.0).eq(0).all()


def test_position_bias_and_probabilities_of_packed_sequences():
    q, k, v = make_qkv(batch=1, q_length=6, kv_length=6)
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1]])
    bias = torch.randn(1, 4, 6, 6)
    out, probs = integration.attention_forward(
        *(Layer(), q, k, v, None),
        position_bias=bias,
        position_ids=position_ids,
        output_attentions=True,
    )
    first, second = slice(0, 4), slice(4, 6)
    alone = [
        attend(*(x[:, :, s] for x in (q, k, v)), None, position_bias=bias[..., s, s])
        for s in (first, second)
    ]
    assert_close(out, torch.cat(alone, dim=1))
    assert probs[..., second, first].eq(0).all()
    assert_close(probs.sum(-1), torch.ones(1, 4, 6))


def test_position_ids_changed_in_place():
    q, k, v = make_qkv(batch=1, q_length=6, kv_length=6)
    position_ids = torch.arange(6)[None]
    whole = attend(q, k, v, None, position_ids=position_ids)
    position_ids[:, 3:] -= 3
    parts = attend(q, k, v, None, position_ids=position_ids)
    assert_close(parts[:, :3], whole[:, :3])
    assert not torch.allclose(parts[:, 3:], whole[:, 3:])


def test_refusals():
    q, k, v = make_qkv()
    with pytest.raises(NotImplementedError, match=r"block_table .* block tables"):
        attend(q, k, v, None, block_table=torch.zeros(2, 1))
    from torch.nn.attention.flex_attention import create_block_mask

    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 5, device="cpu")
    with pytest.raises(TypeError, match="BlockMask"):
        attend(q, k, v, block_mask)
    cross = torch.tensor([0, 5, 10]), torch.tensor([0, 4, 9]), 5, 5
    names = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q"):
        attend(
            q,
            k,
            v,
            None,
            position_bias=q.new_zeros(1, 4, 5, 5),
            **dict(zip(names, cross, strict=True)),
        )


def test_models_that_bypass_the_interface_are_refused():
    config = transformers.GPTNeoConfig(
        hidden_size=8, num_layers=1, num_heads=1, attention_types=[[["global"], 1]]
    )
    config._attn_implementation = "flash_ext"
    with pytest.raises(ValueError, match=r'GPTNeo.* AttentionInterface.*"sdpa"'):
        transformers.GPTNeoForCausalLM(config)


def test_mask_tells_a_model_that_works_on_it():
    mask = integration.make_mask(2, 5, 5, local_size=2, mask_function=window_function(2))
    with pytest.raises(AttributeError, match=r"no 'expand'.*\"sdpa\""):
        mask.expand(1)


def test_mask_moves_to_another_device():
    mask = integration.make_mask(2, 5, 5, attention_mask=torch.tensor([[False] + [True] * 4] * 2))
    moved = mask.to("meta", non_blocking=True)
    assert moved.key_mask.is_meta and (moved.causal, moved.shape) == (True, mask.shape)
    with pytest.raises(AttributeError, match="no 'dtype'"):
        mask.to(torch.float32)


def test_from_pretrained(tmp_path):
    hf_models.make_model("gpt_oss", "eager").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="flash_ext"
    )
    assert model.config._attn_implementation == "flash_ext"
    ids = make_ids()
    assert_close(model(ids).logits, hf_models.make_model("gpt_oss", "flash_ext")(ids).logits)


def test_implementation_can_be_set_later():
    model = hf_models.make_model("gpt_oss", "eager")
    model.set_attn_implementation("flash_ext")
    assert model.config._attn_implementation == "flash_ext"


# ---- masks ---------------------------------------------------------------------------------------

masking = transformers.masking_utils


def window_function(n):
    return masking.sliding_window_causal_mask_function(n)


def dense(mask, shape, causal):
    """What a result of make_mask lets see: bool (batch, 1, q, k). None: causal or everything."""
    batch, _, q_length, kv_length = shape
    if isinstance(mask, torch.Tensor):
        return mask
    if mask is None:
        lengths, window, mask = [kv_length] * batch, (-1, -1), None
    else:
        assert mask.shape == shape
        causal, window = mask.causal, mask.window
        used = mask.seqused_k
        lengths = [kv_length] * batch if used is None else used.tolist()
    rows, keys = torch.arange(q_length)[:, None], torch.arange(kv_length)
    seen = []
    for n in lengths:
        distance = keys - (rows + n - q_length)
        x = (keys < n) & (distance <= 0 if causal else distance > -99)
        x = x & (distance >= -window[0] if window[0] >= 0 else True)
        seen.append(x & (distance <= window[1] if window[1] >= 0 else True))
    seen = torch.stack(seen)[:, None]
    if mask is not None and mask.key_mask is not None:
        seen = seen & mask.key_mask[:, None, None, :]
    return seen


OR = masking.or_masks(masking.causal_mask_function, lambda b, h, q, k: (q < 2) & (k < 2))
CHUNKS = masking.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long))
# name: (mask function, causal, local_size, dense because of what it is)
FUNCTIONS = {
    "causal": (masking.causal_mask_function, True, None, False),
    "window": (window_function(3), True, 3, False),
    "full": (masking.bidirectional_mask_function, False, None, False),
    "both_sides": (masking.sliding_window_bidirectional_mask_function(2), False, 2, False),
    "or": (OR, True, None, True),
    "chunks": (CHUNKS, True, 3, True),
}
# name: (q_length, kv_length, q_offset, kv_offset)
PLACES = {
    "whole": (7, 7, 0, 0),
    "one_row": (1, 9, 8, 0),
    "second_part": (4, 9, 5, 0),
    "empty_static_cache": (5, 9, 0, 0),
    "static_cache": (3, 9, torch.tensor(2), 0),
    "sliding_cache": (2, 4, 7, 5),
    "static_sliding_cache": (1, 3, torch.tensor(8), 6),
}
PADDINGS = {"none": None, "full": (9, 9), "left": (9, 6), "right": (4, 7)}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_mask_means_what_transformers_means(function, place, padding):
    mask_function, causal, local_size, is_dense = FUNCTIONS[function]
    q_length, kv_length, q_offset, kv_offset = PLACES[place]
    lengths = PADDINGS[padding]
    total = int(q_offset) + q_length
    attention_mask = None
    if lengths is not None:
        lengths = [min(n, total) for n in lengths]
        side = "right" if padding == "right" else "left"
        attention_mask = hf_models.padding_mask(side, lengths, total).bool()
    arguments = (2, q_length, kv_length, q_offset, kv_offset, mask_function)
    mask = integration.make_mask(
        *arguments,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=causal and not is_dense,
        allow_is_bidirectional_skip=not causal,
    )
    assert not is_dense or isinstance(mask, torch.Tensor)
    expected = masking.sdpa_mask(
        *arguments, attention_mask=attention_mask, allow_is_causal_skip=False
    )
    got = dense(mask, (2, 1, q_length, kv_length), causal)
    assert torch.equal(got.expand_as(expected), expected)


@pytest.mark.parametrize("function", ["causal", "window", "full", "both_sides"])
def test_masks_of_a_prompt_stay_small(function):
    """No tensor of rows × keys, padded or not, traced or not."""
    mask_function, causal, local_size, _ = FUNCTIONS[function]
    config = transformers.MistralConfig(sliding_window=local_size)
    attention_mask = hf_models.padding_mask("left", (7, 3), 7).bool()

    def make(traced):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: traced)
            return integration.make_mask(
                *(2, 7, 7, 0, 0, mask_function, attention_mask, local_size),
                *(causal, not causal),
                config=config,
            )

    eager, traced = make(False), make(True)
    assert (eager.causal, eager.window) == (traced.causal, traced.window)
    assert torch.equal(eager.key_mask, traced.key_mask)


@pytest.mark.parametrize("causal", [True, False])
def test_a_tensor_is_made_where_the_caller_needs_one(causal):
    function = FUNCTIONS["causal" if causal else "full"][0]
    mask = integration.make_mask(2, 5, 5, mask_function=function, allow_is_causal_skip=False)
    assert mask.dtype == torch.bool and mask.shape == (2, 1, 5, 5)


# ---- what importing costs ------------------------------------------------------------------------


def test_flash_ext_does_not_import_transformers():
    code = "import sys, flash_ext; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=util.environment())


def test_importing_twice_registers_once():
    import importlib

    before = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    importlib.reload(integration)
    after = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    assert before is after
    assert flash_ext.integrations.transformers is integration
