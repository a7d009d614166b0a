"""Other libraries on a GPU: Transformers' models, SDPA's callers, xformers' masks, jagged tensors.

A gradient is compared as soon as a kernel declares the backward.
"""

import os
import subprocess
import sys
from pathlib import Path

import gpu_util
import pytest
import torch
import util
from torch.nn import functional as F

import flash_ext
from flash_ext.integrations import xformers as xops

pytestmark = pytest.mark.gpu

transformers = pytest.importorskip("transformers")
pytest.importorskip("flash_ext.integrations.transformers")
import hf_models  # noqa: E402  (needs transformers)


def rms(x):
    return x.float().square().mean().sqrt().item()


def has_backward():
    return bool(gpu_util.rows("backward"))


def assert_no_worse(ours, peer, exact):
    """Our RMS error is at most 1.5 times the peer's in the same dtype, and a rounding."""
    assert rms(ours.float() - exact) <= 1.5 * rms(peer.float() - exact) + 1e-3 * rms(exact)


def gradient_error(grads, exact):
    """Relative RMS error over all parameters; one alone may be lucky.

    The bias of a key projection has gradient 0 but for rounding, and is left out.
    """
    largest = max(map(rms, exact.values()))
    errors = [
        rms(grads[n].float() - x) / rms(x) for n, x in exact.items() if rms(x) > 1e-4 * largest
    ]
    return rms(torch.tensor(errors))


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", hf_models.MODELS)
def test_models(name, padding):
    padding = "none" if name == "vit" else padding
    results = []
    for implementation, dtype in (
        *(("eager", torch.float32), ("eager", torch.bfloat16)),
        ("flash_ext", torch.bfloat16),
    ):
        inputs, counts = hf_models.make_inputs(name, padding, "cuda", dtype)
        model = hf_models.make_model(name, implementation, "cuda", dtype)
        if has_backward():
            results.append(hf_models.outputs_and_gradients(model, inputs, counts))
        else:
            with torch.no_grad():
                results.append((hf_models.outputs(model, inputs, counts), {}))
    (exact, exact_grads), (eager, eager_grads), (ours, grads) = results
    assert_no_worse(ours, eager, exact)
    assert grads.keys() == eager_grads.keys()
    if grads:
        ours, peer = (gradient_error(x, exact_grads) for x in (grads, eager_grads))
        assert ours <= 2 * peer


@pytest.mark.parametrize("name", hf_models.DECODERS)
def test_generated_tokens_are_the_likeliest(name):
    """Scored by eager attention in fp32: what bf16 chose is within its rounding of the best."""
    inputs, _ = hf_models.make_inputs(name, "left", "cuda")
    model = hf_models.make_model(name, "flash_ext", "cuda", torch.bfloat16)
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    mask = F.pad(inputs["attention_mask"], (0, 8), value=1)
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        eager = hf_models.make_model(name, "eager", "cuda", dtype)
        with torch.no_grad():
            logits.append(eager(tokens, attention_mask=mask).logits[:, 10:-1].float())
    chosen = logits[0].gather(-1, tokens[:, 11:, None]).squeeze(-1)
    rounding = (logits[0] - logits[1]).abs().amax()
    assert (logits[0].amax(-1) - chosen).max() <= 4 * rounding


def test_packed_sequences():
    ids = hf_models.make_ids(1, 17, "cuda")
    positions = torch.cat([torch.arange(n) for n in (5, 1, 9, 2)])[None].cuda()
    model = hf_models.make_model("gpt_oss", "flash_ext", "cuda", torch.bfloat16)
    with torch.no_grad():
        together = model(ids, position_ids=positions, use_cache=False).logits[0]
        alone = torch.cat([model(x).logits[0] for x in ids.split((5, 1, 9, 2), dim=1)])
    assert rms(together - alone) <= 0.02 * rms(alone)


@pytest.mark.parametrize("rows,keys", [(100, 100), (50, 130), (130, 50)])
def test_sdpa_is_top_left(rows, keys):
    q = gpu_util.randn(2, 4, rows, 64)
    k, v = (gpu_util.randn(2, 4, keys, 64, seed=s) for s in (1, 2))
    exact = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), is_causal=True)
    torchs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    ours = flash_ext.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_no_worse(ours, torchs, exact.float())


@pytest.mark.parametrize(
    "dtype,dim,served", [(torch.bfloat16, 64, 1), (torch.float32, 64, 0), (torch.bfloat16, 320, 0)]
)
def test_routing_serves_what_kernels_declare(dtype, dim, served):
    q = gpu_util.randn(1, 2, 70, dim, dtype=dtype)
    with flash_ext.route_sdpa() as routing, torch.no_grad():
        F.scaled_dot_product_attention(q, q, q)
    assert routing.served == served
    q.requires_grad_()
    with flash_ext.route_sdpa() as routing:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert routing.served == (served and has_backward())
    assert q.grad.isfinite().all()


def test_routed_under_autocast():
    q = gpu_util.randn(1, 2, 70, 64, dtype=torch.float32)
    with flash_ext.route_sdpa() as routing, torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        assert F.scaled_dot_product_attention(q, q, q).dtype == torch.bfloat16
    assert routing.served == 1


@pytest.mark.parametrize("make", ["make_causal", "make_local_attention_from_bottomright"])
def test_xformers_blocks(make):
    lengths = (70, 1, 33)
    mask = xops.BlockDiagonalMask.from_seqlens(lengths)
    mask = mask.make_causal() if make == "make_causal" else getattr(mask, make)(9)
    q, k, v = (gpu_util.randn(1, sum(lengths), 4, 64, seed=s) for s in range(3))
    dense = mask.materialize((sum(lengths),) * 2, torch.float64).cuda()
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*(x.double() for x in heads_first), dense)
    torchs = F.scaled_dot_product_attention(*heads_first, dense.to(q.dtype))
    with torch.no_grad():
        ours = xops.memory_efficient_attention(q, k, v, mask).transpose(1, 2)
    assert_no_worse(ours, torchs, exact.float())


def test_jagged():
    parts = [gpu_util.randn(n, 4, 64, seed=n) for n in (70, 1, 33)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    out = flash_ext.attention(x, x, x, causal=True)
    for got, part in zip(out.unbind(), parts, strict=True):
        y = part[None]
        expected = flash_ext.attention(y, y, y, causal=True)[0]
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)  # perhaps another kernel's


FLASH_ATTENTION_2 = """
import flash_ext.integrations.flash_attn
import flash_ext.integrations.transformers
import hf_models, torch

inputs, counts = hf_models.make_inputs("mistral", "left", "cuda")
results = []
for implementation in ("flash_attention_2", "flash_ext"):
    model = hf_models.make_model("mistral", implementation, "cuda", torch.bfloat16)
    assert model.config._attn_implementation == implementation
    with torch.no_grad():
        results.append(hf_models.outputs(model, inputs, counts).float())
error = (results[0] - results[1]).square().mean().sqrt() / results[1].square().mean().sqrt()
assert error < 0.02, error
"""


def test_transformers_finds_the_flash_attn_that_is_flash_exts():
    tests = str(Path(__file__).parents[1])
    env = util.environment()
    env["PYTHONPATH"] = os.pathsep.join([tests, env["PYTHONPATH"]])
    command = [sys.executable, "-c", FLASH_ATTENTION_2]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
