"""A program that knows flash_attn alone, and looks for it in every way that programs do.

test_flash_attn.py runs it with the line of flash_ext before it.
"""

import importlib.metadata
import importlib.util

import torch

for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.flash_attn_interface"):
    assert importlib.util.find_spec(name) is not None, name
assert importlib.util.find_spec("flash_attn.losses") is None
assert importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn")
assert "flash-attn" in importlib.metadata.packages_distributions()["flash_attn"]
assert importlib.metadata.metadata("flash-attn")["Name"] == "flash-attn"

import flash_attn  # noqa: E402
from flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from flash_attn.bert_padding import (  # noqa: E402
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func  # noqa: E402
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb  # noqa: E402

assert flash_attn.__version__ == importlib.metadata.version("flash_attn")
assert flash_attn.__version__.startswith("2.8.")
try:
    import flash_attn.ops.rms_norm
except ModuleNotFoundError as error:
    assert "flash_attn.ops" in str(error)
else:
    raise AssertionError("flash_attn.ops.rms_norm was found")

torch.manual_seed(0)
qkv = torch.randn(2, 7, 3, 4, 8, requires_grad=True)
q, k, v = qkv.unbind(2)
out = flash_attn_func(q, k, v, causal=True)
assert torch.equal(out, flash_attn_qkvpacked_func(qkv, causal=True))
assert torch.equal(out, flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True))
out.sum().backward()

cached = flash_attn_with_kvcache(q, k.detach().clone(), v.detach().clone(), causal=True)
torch.testing.assert_close(cached, out)
rotary = RotaryEmbedding(8)
turned = rotary(qkv.detach().clone())
cos, sin, *_ = rotary._tables
assert torch.equal(turned[:, :, 0], apply_rotary_emb(q.detach(), cos, sin))

mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
unpadded, indices, cu_seqlens, max_seqlen, seqused = unpad_input(qkv, mask)
packed = flash_attn_varlen_qkvpacked_func(unpadded, cu_seqlens, max_seqlen, causal=True)
lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
assert torch.equal(packed, flash_attn_varlen_func(*unpadded.unbind(1), *lengths, causal=True))
padded = pad_input(packed, indices, 2, 7)
torch.testing.assert_close(padded[mask.bool()], out[mask.bool()])
assert padded[0, 4:].eq(0).all() and seqused.tolist() == [4, 7]

x = torch.randn(5, 3, 2, dtype=torch.float64, requires_grad=True)
rows = torch.tensor([3, 0])
assert torch.equal(index_first_axis(x, rows), x[rows])
assert torch.equal(index_put_first_axis(x[rows], rows, 5)[rows], x[rows])
for function in (
    lambda x: index_first_axis(x, rows),
    lambda x: index_put_first_axis(x, torch.tensor([6, 0, 1, 2, 5]), 8),
    lambda x: index_first_axis_residual(x, rows),
):
    assert torch.autograd.gradcheck(function, x)

lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
tokens = torch.arange(18.0).reshape(3, 6)
output, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(tokens, lengths)
assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and max_seqlen == 6
assert torch.equal(output, tokens.flatten()[indices]) and len(output) == 16
print("served by", flash_attn.__spec__.origin)
