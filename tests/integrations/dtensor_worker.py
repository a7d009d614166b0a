"""Attention of DTensors against attention of whole tensors, forward and backward; run by a test.

Four ranks are threads of this process, with torch's own stand-in for a process group: a failure of
one is raised here.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

import flash_ext
import flash_ext.integrations.dtensor

ROWS, HEADS, WHOLE = Shard(0), Shard(2), Replicate()
# name: (mesh, placements of q, k, v, those of out, num_heads_k)
CASES = {
    "replicated": ((4,), [WHOLE], [WHOLE], 4),
    "batch": ((4,), [ROWS], [ROWS], 4),
    "heads": ((4,), [HEADS], [HEADS], 4),
    "both": ((2, 2), [ROWS, HEADS], [ROWS, HEADS], 2),
    "heads of two ways": ((2, 2), [HEADS, HEADS], [HEADS, HEADS], 4),
    "a sequence is gathered": ((2, 2), [ROWS, Shard(1)], [ROWS, WHOLE], 2),
    "split groups are gathered": ((2, 2), [WHOLE, HEADS], [WHOLE, WHOLE], 3),
}


def randn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def head_placements(placements, dim):
    """Those of a tensor whose heads are at dim and that has no batch."""
    return [Shard(dim) if p == HEADS else WHOLE for p in placements]


def check(name, mesh_shape, placements, expected_placements, num_heads_k):
    mesh = init_device_mesh("cpu", mesh_shape)
    num_heads, batch = 2 * num_heads_k, 5 if name == "batch" else 4  # 5 over 4: uneven
    rows = 1 if name == "heads" else 6
    shapes = [(batch, rows, num_heads, 8), (batch, 7, num_heads_k, 8), (batch, 7, num_heads_k, 4)]
    whole = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
    whole += [
        randn(1, num_heads, rows, 7, seed=3),
        randn(num_heads, seed=4).exp(),
        randn(num_heads, seed=5),
    ]
    laid = [placements] * 3 + [head_placements(placements, dim) for dim in (1, 0, 0)]
    parts = [distribute_tensor(x, mesh, p) for x, p in zip(whole, laid, strict=True)]
    weights = randn(batch, rows, num_heads, 4, seed=6)
    results = []
    for tensors in (whole, parts):
        tensors = [x.requires_grad_() for x in tensors]
        out, lse = flash_ext.attention(*tensors, causal=True, window=(4, 0), return_lse=True)
        w = weights
        if tensors[0] is parts[0]:
            assert list(out.placements) == expected_placements, (name, out.placements)
            w = distribute_tensor(weights, mesh, out.placements)
        grads = torch.autograd.grad((out * w).sum() + lse.sum(), tensors)
        results.append((out, lse, *grads))
    assert not any(isinstance(p, Partial) for p in results[1][2].placements)
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        torch.testing.assert_close(b.full_tensor(), a, msg=lambda m, i=i: f"{name}, {i}: {m}")


@spawn_threads_and_init_comms(world_size=4)
def check_all(_):
    for name, case in CASES.items():
        check(name, *case)


if __name__ == "__main__":
    torch.set_num_threads(1)
    check_all(None)
    print(len(CASES), "cases agree")
