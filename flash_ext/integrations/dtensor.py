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

Packed sequences, page tables and dropout are replicated: where a sequence lies, and which mask of
dropout it gets, depends on all of the batch.
"""

import itertools
import math

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_BATCH, _HEADS = "batch", "heads"
_NUM_TENSORS = 12


def _splits_whole_groups(num_heads_k: int, mesh) -> bool:
    """Whether num_heads_k is a multiple of each number of devices it might be sharded over."""
    sizes = [mesh.size(i) for i in range(mesh.ndim)]
    products = (
        math.prod(chosen)
        for count in range(1, len(sizes) + 1)
        for chosen in itertools.combinations(sizes, count)
    )
    return all(num_heads_k % n == 0 for n in products if n <= num_heads_k)


def _rows(kind):
    """The placement of a tensor (batch, seqlen, heads, dim): q, k, v, out."""
    return Shard(0 if kind == _BATCH else 2)


def _lse(kind):
    """(batch, heads, seqlen)."""
    return Shard(0 if kind == _BATCH else 1)


def _broadcast(x, dims, kind):
    """A tensor whose dimension for the kind is dims[kind], or that has none or a single one."""
    dim = dims.get(kind)
    return Replicate() if dim is None or x.shape[dim] == 1 else Shard(dim)


def _inputs(tensors, kind):
    """The placements of flash::attn's tensors."""
    bias, slopes, *rest = tensors[3:]
    slopes_dims = {_HEADS: 0} if slopes is not None and slopes.ndim == 1 else {_BATCH: 0, _HEADS: 1}
    dims = [
        *({_BATCH: 0, _HEADS: 1}, slopes_dims, {_HEADS: 0}),
        *({}, {}, {_BATCH: 0}, {_BATCH: 0}, {}, {}),
    ]
    rest = (bias, slopes, *rest)
    placed = (
        None if x is None else _broadcast(x, d, kind) for x, d in zip(rest, dims, strict=True)
    )
    return [_rows(kind)] * 3 + list(placed)


def _kinds(tensors):
    """By what this call may be sharded, besides being replicated."""
    q, k, *_ = tensors
    packed = (*tensors[6:8], *tensors[10:])
    if q.ndim != 4 or any(x is not None for x in packed):
        return []
    heads = [_HEADS] if _splits_whole_groups(k.shape[2], q.mesh) else []
    return [_BATCH, *heads]


def _replicated(tensors):
    return [None if x is None else Replicate() for x in tensors]


@register_sharding(torch.ops.flash.attn.default)
def _attn(*args, **kwargs):
    tensors, scalars = args[:_NUM_TENSORS], args[_NUM_TENSORS:]
    tensors = (*tensors, *[None] * (_NUM_TENSORS - len(tensors)))
    given = min(len(args), _NUM_TENSORS)
    rest = [None] * len(scalars)
    rules = [([Replicate()] * 2, _replicated(tensors)[:given] + rest)]
    for kind in _kinds(tensors):
        rules.append(([_rows(kind), _lse(kind)], _inputs(tensors, kind)[:given] + rest))
    return rules


def _attn_backward(op, args, kwargs):
    """flash::attn_backward on each device's part, sharded as the forward's out is.

    A handler and not a rule: DTensor's rules have no results that may be None.
    """
    dout, dlse, q, k, v, out, lse, *rest = args
    tensors, scalars = (q, k, v, *rest[: _NUM_TENSORS - 3]), rest[_NUM_TENSORS - 3 :]
    mesh = out.device_mesh
    kinds = [{0: _BATCH, 2: _HEADS}.get(getattr(p, "dim", None)) for p in out.placements]

    def along_mesh(place):
        """One placement for each dimension of the mesh."""
        return [Replicate() if kind is None else place(kind) for kind in kinds]

    placements = [
        None if x is None else along_mesh(lambda kind, i=i: _inputs(tensors, kind)[i])
        for i, x in enumerate(tensors)
    ]
    row, of_lse = along_mesh(_rows), along_mesh(_lse)
    wanted = [row, of_lse, *placements[:3], row, of_lse, *placements[3:]]
    given = (dout, dlse, *tensors[:3], out, lse, *tensors[3:])
    local = [
        x.redistribute(mesh, p).to_local() if isinstance(x, DTensor) else x
        for x, p in zip(given, wanted, strict=True)
    ]
    grads = op(*local, *scalars, **kwargs)

    def distributed(grad, x, places):
        # What was replicated along a sharded dimension is a sum over the devices.
        shared = [
            Partial() if kind is not None and p.is_replicate() else p
            for kind, p in zip(kinds, places, strict=True)
        ]
        stride = torch.empty(x.shape, device="meta").stride()
        return DTensor.from_local(grad, mesh, shared, run_check=False, shape=x.shape, stride=stride)

    return tuple(
        None if grad is None else distributed(grad, x, places)
        for grad, x, places in zip(grads, tensors, placements, strict=False)
    )


DTensor._op_dispatcher._custom_op_handlers[torch.ops.flash.attn_backward.default] = _attn_backward
