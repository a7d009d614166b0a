"""flash_ext.integrations.flash_attn: one line before programs that import flash_attn."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from util import environment

import flash_ext
from flash_ext.integrations import _flash_attn_rotary as rotary

LINE = "import flash_ext.integrations.flash_attn"
PROGRAM = Path(__file__).with_name("flash_attn_program.py")


def run(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment(), capture_output=True, text=True)


def test_program_that_imports_flash_attn():
    result = run(f"{LINE}\nimport runpy\nrunpy.run_path({str(PROGRAM)!r}, run_name='__main__')")
    assert result.returncode == 0, result.stderr
    assert "served by flash_ext.integrations.flash_attn" in result.stdout


def test_importing_and_reloading():
    """Twice is once, and reload too; an import of the real one before is an error by name."""
    code = f"""
import importlib, importlib.metadata, sys, types
import flash_ext
assert "flash_attn" not in sys.modules
sys.modules["flash_attn"] = types.ModuleType("flash_attn")
sys.modules["flash_attn"].__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
try:
    {LINE}
except ImportError as error:
    assert "flash_attn is imported already" in str(error)
else:
    raise AssertionError
del sys.modules["flash_attn"]
{LINE}
importlib.reload(flash_ext.integrations.flash_attn)
import flash_attn
assert flash_attn.flash_attn_func is flash_ext.flash_attn_func
names = [d.metadata["Name"] for d in importlib.metadata.distributions()]
assert names.count("flash-attn") == 1
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_every_function_of_flash_attn_is_there():
    """What flash_ext has of flash-attn's functions is exported, and nothing else."""
    result = run(f"{LINE}\nimport flash_attn; print(*sorted(vars(flash_attn)))")
    exported = {n for n in result.stdout.split() if n.startswith("flash_attn_")}
    ours = {n for n in flash_ext.__all__ if n.startswith("flash_attn_")}
    assert exported - {"flash_attn_interface"} == ours


FLASH_ATTENTION_2 = f"""
{LINE}
import transformers.utils.import_utils as available
available.is_torch_cuda_available = lambda: True  # it looks for a GPU first
import flash_ext.integrations.transformers
import hf_models, torch

for padding in ("none", "left"):
    inputs, counts = hf_models.make_inputs("mistral", padding)
    results = []
    for implementation in ("flash_attention_2", "flash_ext"):
        model = hf_models.make_model("mistral", implementation, dtype=torch.bfloat16)
        assert model.config._attn_implementation == implementation
        results.append(hf_models.outputs(model, inputs, counts))
    torch.testing.assert_close(*results)
"""


def test_transformers_finds_it():
    """Its own flash_attention_2, which packs padded rows, computes what flash_ext does."""
    pytest.importorskip("transformers")
    tests = str(Path(__file__).parents[1])
    result = run(f"import sys; sys.path.insert(0, {tests!r})\n{FLASH_ATTENTION_2}")
    assert result.returncode == 0, result.stderr[-3000:]


# ---- layers.rotary -------------------------------------------------------------------------------

BATCH, SEQLEN, HEADS, HEADS_K, DIM = 2, 6, 4, 2, 16


def rotate(x, cos, sin, interleaved=False, offset=0):
    """By complex numbers; cos and sin (seqlen, rotary_dim / 2)."""
    n = cos.shape[1]
    turn = torch.complex(cos, sin)[offset : offset + x.shape[1], None]
    head, rest = x[..., : 2 * n], x[..., 2 * n :]
    pairs = head.unflatten(-1, (n, 2)) if interleaved else head.unflatten(-1, (2, n)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = turned if interleaved else turned.mT
    return torch.cat([turned.flatten(-2), rest], -1)


def tables(dim=DIM, seqlen=20, base=10000.0):
    angles = torch.outer(torch.arange(float(seqlen)), base ** (-torch.arange(0, dim, 2) / dim))
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["3", "grouped", "kv"])
@pytest.mark.parametrize("offset", [0, 5])
def test_rotary_embedding(layout, interleaved, offset):
    torch.manual_seed(0)
    module = rotary.RotaryEmbedding(8, interleaved=interleaved)
    cos, sin = tables(8)
    x = torch.randn(BATCH, SEQLEN, HEADS + 2 * HEADS_K, DIM, requires_grad=True)
    if layout == "3":
        x = torch.randn(BATCH, SEQLEN, 3, HEADS, DIM, requires_grad=True)
        q, k, v = x.unbind(2)
    else:
        q, k, v = x.split([HEADS, HEADS_K, HEADS_K], 2)
    expected = [rotate(y, cos, sin, interleaved, offset) for y in (q, k)] + [v]
    if layout == "kv":
        q_in, kv_in = q.clone(), torch.stack([k, v], 2)
        q_out, kv_out = module(q_in, kv_in, seqlen_offset=offset)
        got = [q_out, *kv_out.unbind(2)]
        assert kv_out is kv_in
    else:
        given = x.clone()
        options = {} if layout == "3" else {"num_heads_q": HEADS}
        out = module(given, seqlen_offset=offset, **options)
        assert out is given
        parts = out.unbind(2) if layout == "3" else out.split([HEADS, HEADS_K, HEADS_K], 2)
        got = list(parts)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    grads = [torch.autograd.grad(sum(y.sin().sum() for y in ys), x)[0] for ys in (got, expected)]
    torch.testing.assert_close(*grads)


def test_xpos_scores_depend_on_the_distance_alone():
    module = rotary.RotaryEmbedding(DIM, scale_base=8)
    q, k = torch.randn(2, DIM)
    qkv = torch.stack([q, k, k])[None, None, :, None].repeat(1, SEQLEN, 1, 1, 1)
    q, k, _ = module(qkv)[0, :, :, 0].unbind(1)
    scores = q @ k.T
    for i in range(SEQLEN):
        torch.testing.assert_close(scores.diagonal(-i), scores[i, 0].expand(SEQLEN - i))
    plain = rotary.RotaryEmbedding(DIM)(qkv.clone())
    assert not torch.allclose(plain, qkv)


def test_rotary_offsets_by_sequence():
    module = rotary.RotaryEmbedding(DIM)
    x = torch.randn(BATCH, SEQLEN, 3, HEADS, DIM)
    offsets = torch.tensor([3, 0], dtype=torch.int32)
    out = module(x.clone(), seqlen_offset=offsets, max_seqlen=20)
    for i, n in enumerate(offsets.tolist()):
        expected = rotate(x[i : i + 1, :, 0], *tables(), offset=n)
        torch.testing.assert_close(out[i : i + 1, :, 0], expected)
    with pytest.raises(ValueError, match="max_seqlen is None"):
        module(x, seqlen_offset=offsets)


def test_rotary_tables_follow_length_and_dtype():
    module = rotary.RotaryEmbedding(DIM).to(torch.bfloat16)
    for seqlen, dtype in ((4, torch.float32), (9, torch.float32), (9, torch.bfloat16)):
        x = torch.randn(1, seqlen, 3, 1, DIM, dtype=dtype)
        expected = rotate(x[:, :, 0].float(), *tables()).to(dtype)
        tolerance = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(module(x.clone())[:, :, 0], expected, **tolerance)


def test_rotary_heads_must_be_told():
    with pytest.raises(ValueError, match="num_heads_q is None"):
        rotary.apply_rotary_emb_qkv_(torch.randn(1, 4, 8, DIM), *tables())


def test_rotary_signature():
    names = [*inspect.signature(flash_ext.apply_rotary_emb).parameters]
    assert [*inspect.signature(rotary.apply_rotary_emb).parameters] == names
