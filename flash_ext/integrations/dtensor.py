"""How attention is sharded over a device mesh: by batch and by heads, without communication.

    import flash_ext.integrations.dtensor

Importing this module tells torch.distributed.tensor the rule of flash::attn and its backward. q, k
and v may then be DTensors that are sharded over the batch (data parallel), over heads (tensor
parallel), over both on a mesh of two dimensions, or replicated; out and the gradients are sharded
alike. Anything else (a sharded sequence) is first redistributed to one of these by DTensor. Heads
can be sharded only where each device gets whole groups: num_heads_k must be a multiple of what it
is divided by, or else the heads are gathered.

A gradient that all devices have a part of (sinks under a sharded batch, a bias that broadcasts
over it) comes out as a partial sum, as DTensor has it for every broadcast.

Packed sequences and page tables are replicated: where a sequence lies depends on all of the batch.
Dropout is not served: its rng_state would have to be the same replicated DTensor everywhere.
"""

import itertools
import math

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_BATCH, _HEADS = "batch", "heads"
_ROWS, _LSE = {_BATCH: 0, _HEADS: 2}, {_BATCH: 0, _HEADS: 1}

# Where each tensor has its batch and its heads. A dimension of length 1 broadcasts.
_DIMS = {
    **dict.fromkeys(("q", "k", "v", "out", "dout"), _ROWS),
    **dict.fromkeys(("lse", "dlse"), _LSE),
    "bias": {_BATCH: 0, _HEADS: 1},
    "alibi_slopes": {_BATCH: 0, _HEADS: 1},  # (heads,) too
    "sinks": {_HEADS: 0},
    **{name: {_BATCH: 0} for name in ("seqused_q", "seqused_k", "leftpad_k")},
}
# With one of these a place in the batch means more than itself: nothing is sharded.
_WHOLE_BATCH = ("cu_seqlens_q", "cu_seqlens_k", "page_table", "rng_state")

_attn_op = torch.ops.flash.attn.default
_backward_op = torch.ops.flash.attn_backward.default
_GRADIENTS = ("q", "k", "v", "bias", "alibi_slopes", "sinks")


def _by_name(op, args, kwargs) -> dict:
    """The arguments that are given, by name and in the schema's order."""
    names = [a.name for a in op._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_tensor(x):
    return hasattr(x, "placements")


def _splits_whole_groups(num_heads_k: int, mesh) -> bool:
    """Whether num_heads_k is a multiple of each number of devices it might be sharded over."""
    sizes = [mesh.size(i) for i in range(mesh.ndim)]
    products = (
        math.prod(chosen)
        for count in range(1, len(sizes) + 1)
        for chosen in itertools.combinations(sizes, count)
    )
    return all(num_heads_k % n == 0 for n in products if n <= num_heads_k)


def _placement(name: str, shape, kind):
    """Where a tensor lies when the call is sharded by kind; None: replicated."""
    if kind is None:
        return Replicate()
    dims = {_HEADS: 0} if name == "alibi_slopes" and len(shape) == 1 else _DIMS.get(name, {})
    dim = dims.get(kind)
    return Replicate() if dim is None or shape[dim] == 1 else Shard(dim)


def _kinds(given):
    """By what this call may be sharded, besides being replicated."""
    q, k = given["q"], given["k"]
    if q.ndim != 4 or any(given.get(name) is not None for name in _WHOLE_BATCH):
        return []
    return [_BATCH, *([_HEADS] if _splits_whole_groups(k.shape[2], q.mesh) else [])]


@register_sharding(_attn_op)
def _attn(*args, **kwargs):
    given = _by_name(_attn_op, args, kwargs)
    batch, seqlen, heads, *_ = (*given["q"].shape, 1)  # packed: only replicated
    return [
        (
            [
                _placement("out", (batch, seqlen, heads), kind),
                _placement("lse", (batch, heads), kind),
            ],
            [_placement(n, x.shape, kind) if _is_tensor(x) else None for n, x in given.items()],
        )
        for kind in (None, *_kinds(given))
    ]


def _attn_backward(op, args, kwargs):
    """flash::attn_backward on each device's part, sharded as the forward's out is.

    A handler and not a rule: DTensor's rules have no results that may be None.
    """
    given = _by_name(op, args, kwargs)
    out = given["out"]
    mesh = out.device_mesh
    kinds = [{0: _BATCH, 2: _HEADS}.get(getattr(p, "dim", None)) for p in out.placements]
    placements, local = {}, {}
    for name, x in given.items():
        if _is_tensor(x):
            placements[name] = [_placement(name, x.shape, kind) for kind in kinds]
            x = x.redistribute(mesh, placements[name]).to_local()
        local[name] = x

    def distributed(name, grad):
        # What was replicated along a sharded dimension is a sum over the devices.
        shared = [
            Partial() if kind is not None and p.is_replicate() else p
            for kind, p in zip(kinds, placements[name], strict=True)
        ]
        shape = given[name].shape
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(grad, mesh, shared, run_check=False, shape=shape, stride=stride)

    grads = zip(_GRADIENTS, op(**local), strict=True)
    return tuple(None if grad is None else distributed(name, grad) for name, grad in grads)


DTensor._op_dispatcher._custom_op_handlers[_backward_op] = _attn_backward
