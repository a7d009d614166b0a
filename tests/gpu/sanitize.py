"""Tiny calls of every kind, for `compute-sanitizer --tool memcheck python tests/gpu/sanitize.py`.

Run it with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor is an allocation of its own, and
also with --tool racecheck, synccheck and initcheck. It compares nothing: the tests do.
"""

import itertools
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import torch  # noqa: E402  (the path first: this is a script)
from util import GRADIENT_NAMES, Case, make_inputs  # noqa: E402

import flash_ext  # noqa: E402

CASES = [
    Case(),
    Case(causal=True, seqlens_q=(130, 130), seqlens_k=(70, 70)),
    Case(window=(9, 2), softcap=5.0),
    Case(bias="bhqk", alibi="bh", sinks="some", strides="odd"),
    Case(bias="11q1", bias_dtype=torch.bool, strides="last"),
    Case(dropout_p=0.3, seqused_q=(64, 3), seqused_k=(65, 0)),
    Case(layout="varlen", seqlens_q=(65, 0, 7), seqlens_k=(100, 9, 0), gap=(2, 3), causal=True),
    Case(layout="varlen", bias="b1qk", max_seqlen="none", strides="transposed"),
    Case(seqlens_q=(1, 1), seqlens_k=(300, 300), num_heads=8, causal=True),
    Case(seqlens_q=(3, 3), num_heads=8, num_splits=3, sinks="some", seqused_k=(100, 0)),
]
HEAD_DIMS = [(1, 1), (40, 40), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]


def caches(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> int:
    """Rotary, append and attention over pages and over rows of a cache; the number of calls."""
    shape = {"device": "cuda", "dtype": dtype}
    used = torch.tensor([35, 3], dtype=torch.int32, device="cuda")
    cos = torch.rand(50, head_dim // 2, device="cuda")
    calls = 0
    for seqlen, table in itertools.product((1, 5, 40), (None, [[1, 5, 0], [4, -1, 2]])):
        pages = None if table is None else torch.tensor(table, dtype=torch.int32, device="cuda")
        caches = (2, 45) if table is None else (6, 15)
        k_cache = torch.rand(*caches, 2, head_dim, **shape)
        v_cache = torch.rand(*caches, 2, head_dim_v, **shape)
        q = torch.rand(2, seqlen, 8, head_dim, **shape)
        k, v = (torch.rand(2, seqlen, 2, d, **shape) for d in (head_dim, head_dim_v))
        for splits in (0, 2):
            flash_ext.flash_attn_with_kvcache(
                *(q, k_cache, v_cache, k, v, cos, cos, used, None, used // 2, pages),
                causal=True,
                num_splits=splits,
            )
            calls += 1
    return calls


def main() -> int:
    dtypes = (torch.bfloat16, torch.float16)
    served = refused = 0
    for index, case in enumerate(CASES):
        for position, (head_dim, head_dim_v) in enumerate(HEAD_DIMS):
            fields = {"head_dim": head_dim, "head_dim_v": head_dim_v}
            fields["dtype"] = dtypes[(index + position) % 2]
            inputs = make_inputs(Case(**{**case.__dict__, **fields}), "cuda")
            tensors = [getattr(inputs, name) for name in GRADIENT_NAMES]
            leaves = [x.requires_grad_() for x in inputs.differentiable().values()]
            out, lse = flash_ext.attention(*tensors, **inputs.options, return_lse=True)
            try:
                torch.autograd.grad([out, lse], leaves, [inputs.dout, inputs.dlse])
                served += 1
            except RuntimeError as error:
                if "no kernel of this build serves" not in str(error):
                    raise
                refused += 1
    cached = sum(caches(*dims, dtypes[position % 2]) for position, dims in enumerate(HEAD_DIMS))
    torch.cuda.synchronize()
    print(
        f"{served + refused} forward, {served} backward and {cached} cache calls on "
        f"{torch.cuda.get_device_name()}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
