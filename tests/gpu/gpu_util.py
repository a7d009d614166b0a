"""What the GPU tests share: which kernel is declared for a call, and checking what is.

A call that the kernel table declares is compared with the reference, its backward too as soon as
a kernel declares that. A call that it does not declare must be refused by name.
"""

import functools

import pytest
import torch
import util
from util import GRADIENT_NAMES, Inputs, Result

import flash_ext
from flash_ext import reference

REFUSAL = "no kernel of this build serves"


@functools.cache
def arch():
    """The architecture whose kernels serve this GPU; None: none does."""
    if not torch.cuda.is_available():
        return None
    x = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device="cuda")
    try:
        text = flash_ext.explain(x, x, x)
    except (NotImplementedError, RuntimeError):  # no library has registered CUDA kernels
        return None
    name = text.split("serves: ", 1)[1].split("\n", 1)[0]
    return next((row["arch"] for row in flash_ext.kernels() if row["name"] == name), None)


def rows(pass_):
    """The kernel table's rows of one pass ("forward", "backward", "probs") for this GPU."""
    return [row for row in flash_ext.kernels() if row["arch"] == arch() and row["pass"] == pass_]


def declares(feature, pass_="forward"):
    """Whether some kernel of the pass has the feature."""
    return any(feature in row["features"] for row in rows(pass_))


def declared(inputs, pass_="forward"):
    """Whether a kernel's row covers the call, by its dtype, head dims and features."""
    tensors = [getattr(inputs, name) for name in GRADIENT_NAMES]
    text = flash_ext.explain(*tensors, **inputs.options, backward=pass_ == "backward")
    required = text.splitlines()[0].removeprefix("required: ").split(", ")
    dims = {name: int(x.split()[1]) for name, x in zip(("qk", "v"), required[2:4], strict=True)}
    features = set(required[4:])
    if pass_ == "backward":
        features |= {"dlse"} if inputs.dlse is not None else set()
        features |= {f"d{n}" for n in inputs.differentiable() if n not in ("q", "k", "v")}
    return any(
        row["dtype"] == required[1]
        and row["head_dim"] >= dims["qk"]
        and row["head_dim_v"] >= dims["v"]
        and features <= set(row["features"])
        for row in rows(pass_)
    )


def forward_references(inputs):
    """(ref, pt) without gradients: fp64, and step by step in the inputs' dtype."""
    options = util.reference_options(inputs)
    tensors = [getattr(inputs, name) for name in GRADIENT_NAMES]
    wide = [x if x is None or x.dtype == torch.bool else x.double() for x in tensors]
    with torch.no_grad():
        ref = reference.attention(*wide, **options, compute_dtype=torch.float64)
        pt = reference.attention(*tensors, **options, compute_dtype=inputs.q.dtype)
    return Result(*ref, {}), Result(*pt, {})


def assert_refused(function):
    with pytest.raises(RuntimeError, match=REFUSAL):
        function()


def check_inputs(inputs, label):
    """Inputs against the reference as far as kernels are declared; returns the Result or None."""
    if not declared(inputs):
        assert_refused(lambda: util.run_inputs(inputs, needed=()))
        return None
    if declared(inputs, "backward"):
        ref, pt = util.run_reference_inputs(inputs)
        result = util.run_inputs(inputs)
    else:
        ref, pt = forward_references(inputs)
        result = util.run_inputs(inputs, needed=())
        if inputs.q.numel() and inputs.k.numel():
            assert_refused(lambda: util.run_inputs(inputs))
    util.assert_close_to_reference(result, ref, pt, inputs, label)
    return result


def assert_close_results(got, expected):
    """(out, lse) of the same attention by two kernels, or in tiles of two shapes: P is rounded at
    other places, so bits may differ, by less than the reference's tolerance allows either."""
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3}[expected[0].dtype]
    torch.testing.assert_close(got[0], expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=1e-3)


def check(case):
    return check_inputs(util.make_inputs(case, "cuda"), f"{case}, seed {case.seed}")


_ARGUMENTS = torch.ops.flash.attn.default._schema.arguments[len(GRADIENT_NAMES) :]
DEFAULTS = {argument.name: argument.default_value for argument in _ARGUMENTS}
DEFAULTS["window"] = (DEFAULTS.pop("window_left"), DEFAULTS.pop("window_right"))


def inputs_of(q, k, v, bias=None, alibi_slopes=None, sinks=None, lse_grad=True, **options):
    """Inputs on the GPU of tensors from anywhere, with random incoming gradients."""
    generator = torch.Generator().manual_seed(4)
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator).to(q.dtype)
    dlse = torch.randn(*lse_shape, generator=generator) if lse_grad else None
    moved = [x if x is None else x.cuda() for x in (q, k, v, bias, alibi_slopes, sinks)]
    options = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    dlse = dlse if dlse is None else dlse.cuda()
    return Inputs(*moved, options=DEFAULTS | options, dout=dout.cuda(), dlse=dlse)


def randn(*shape, dtype=torch.bfloat16, seed=0, scale=1.0):
    """The same numbers on every machine, on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to("cuda", dtype)


def qkv(shape_q, shape_k=None, dtype=torch.bfloat16, scale_q=1.0, scale_k=1.0):
    shape_k = shape_q if shape_k is None else shape_k
    q = randn(*shape_q, dtype=dtype, seed=1, scale=scale_q)
    return q, *(randn(*shape_k, dtype=dtype, seed=s, scale=scale_k) for s in (2, 3))


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def need_memory(gib):
    """Skips where less is free."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"gpu: {gib} GiB of free memory needed, {free:.0f} there")
