"""flash_ext inside torch.compile, torch.export and torch.func, and what importing it costs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import util
from torch.export import Dim, export
from torch.func import grad, vmap

import flash_ext

PACKAGE = Path(flash_ext.__file__).parent
HEADS, HEADS_K, DIM = 6, 3, 8

# No two dimensions of these inputs are equal: torch.compile gives equal sizes one symbol, and a
# later call where they differ would count as a recompilation.
DENSE_SHAPES = [(2, 5, 7), (3, 11, 13), (4, 17, 19), (5, 23, 29)]  # batch, seqlen_q, seqlen_k
PACKED_LENGTHS = [(17, 2, 12), (11, 9, 4, 20), (13, 21, 1, 5, 10)]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def make_dense(batch=2, seqlen_q=5, seqlen_k=7, requires_grad=True):
    qkv = util.make_qkv([seqlen_q] * batch, [seqlen_k] * batch, HEADS, HEADS_K, DIM)
    return [x.requires_grad_(requires_grad) for x in qkv]


def results_and_grads(function, inputs):
    """What function returns, and the gradients of the inputs that require one."""
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    loss = sum(x.float().square().sum() for x in results if x.requires_grad)
    return [*results, *(torch.autograd.grad(loss, leaves) if leaves else ())]


def check_compiled(function, calls, backend="aot_eager", dynamic=None, compilations=None):
    """The compiled function does what function does on every call, compiling so many times."""
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    for i, inputs in enumerate(calls):
        done = compilations is not None and i >= compilations
        with torch.compiler.set_stance("fail_on_recompile" if done else "default"):
            got = results_and_grads(compiled, inputs)
        expected = results_and_grads(function, inputs)
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# ---- torch.compile -------------------------------------------------------------------------------


def windowed(q, k, v):
    return flash_ext.attention(q, k, v, causal=True, window=(3, 0), return_lse=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_static(backend):
    def function(q, k, v):
        out, lse = windowed(2 * q, k, v)
        return out.relu(), lse

    check_compiled(function, [make_dense()] * 2, backend, dynamic=False, compilations=1)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_dynamic_never_again(backend):
    calls = [make_dense(*shape) for shape in DENSE_SHAPES]
    check_compiled(windowed, calls, backend, dynamic=True, compilations=1)


def test_compile_becomes_dynamic_by_itself():
    calls = [make_dense(*shape) for shape in DENSE_SHAPES]
    check_compiled(windowed, calls, compilations=2)


def packed_calls(kind):
    for lengths in PACKED_LENGTHS:
        qkv = util.make_qkv(lengths, lengths, HEADS, HEADS_K, DIM, layout="varlen")
        cu_seqlens = util.cumulative(lengths)
        yield *(x.requires_grad_() for x in qkv), cu_seqlens, kind(max(lengths))


@pytest.mark.parametrize("kind", [int, torch.tensor], ids=["int", "tensor"])
def test_compile_varlen_dynamic(kind):
    def function(q, k, v, cu_seqlens, max_seqlen):
        lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
        return flash_ext.flash_attn_varlen_func(q, k, v, *lengths, causal=True)

    check_compiled(function, packed_calls(kind), dynamic=True, compilations=1)


@pytest.mark.parametrize("with_seqused", [False, True])
def test_compiled_max_seqlen_tensor_cuts_sequences(with_seqused):
    q, k, v, cu_seqlens, _ = next(packed_calls(int))
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    if with_seqused:
        lengths |= {"seqused_q": util.lengths([9, 1, 9]), "seqused_k": util.lengths([9, 1, 9])}

    def function(q, k, v, bias, max_seqlen):
        limits = {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
        return flash_ext.attention(q, k, v, bias, **lengths, **limits, return_lse=True)

    for bias in (None, torch.randn(1, HEADS, 8, 8), torch.randn(1, 1, 1, 8)):
        check_compiled(function, [(q, k, v, bias, torch.tensor(8))])


def test_compile_window_is_a_symbol():
    def function(q, k, v, window):
        return flash_ext.attention(q, k, v, window=(window, 0))

    calls = [(*make_dense(), window) for window in (3, 4, 6)]
    check_compiled(function, calls, dynamic=True, compilations=1)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_dropout(backend):
    def drawn(q, k, v):
        return flash_ext.attention(q, k, v, dropout_p=0.5)

    def given(q, k, v, rng_state):
        return flash_ext.attention(q, k, v, dropout_p=0.5, rng_state=rng_state)

    check_compiled(given, [(*make_dense(), torch.tensor([3, 4]))], backend)
    compiled = torch.compile(drawn, backend=backend, fullgraph=True)
    first, second = (compiled(*make_dense()) for _ in range(2))
    assert not torch.equal(first, second)


def test_compile_autocast():
    def function(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return flash_ext.attention(q, k, v)

    check_compiled(function, [make_dense()])


def test_compile_scores_and_packed_layout():
    def function(qkv, bias, slopes, sinks):
        options = {"alibi_slopes": slopes, "bias": bias, "sinks": sinks}
        return flash_ext.flash_attn_qkvpacked_func(qkv, softcap=5.0, **options)

    shapes = (2, 5, 3, HEADS, DIM), (1, HEADS, 1, 5), (HEADS,), (HEADS,)
    check_compiled(function, [[torch.rand(shape).requires_grad_() for shape in shapes]])


def test_compile_merge():
    def function(q, k, v):
        parts = [flash_ext.attention(q, x, y, return_lse=True) for x, y in ((k, v), (2 * k, v))]
        return flash_ext.merge(*parts[0], *parts[1])

    check_compiled(function, [make_dense()])


def test_compile_probs():
    def function(q, k, v):
        return flash_ext.flash_attn_func(q, k, v, return_attn_probs=True)

    check_compiled(function, [make_dense(requires_grad=False)])


def test_compile_transforms():
    def loss(q, k, v):
        return flash_ext.attention(q, k, v).square().sum()

    inputs = [torch.stack([x, 2 * x, 3 * x]) for x in make_dense(requires_grad=False)]
    check_compiled(vmap(flash_ext.attention), [inputs])
    check_compiled(vmap(grad(loss)), [inputs])


# ---- torch.func on the Python functions ----------------------------------------------------------


def test_transforms_of_the_python_functions():
    def attention(q, k, v):
        return flash_ext.flash_attn_func(q, k, v, causal=True)

    def loss(q, k, v):
        return attention(q, k, v).square().sum()

    inputs = [torch.stack([x, 2 * x, 3 * x]) for x in make_dense(requires_grad=False)]
    slices = list(zip(*inputs, strict=True))
    for function in (attention, grad(loss)):
        expected = torch.stack([function(*x) for x in slices])
        torch.testing.assert_close(vmap(function)(*inputs), expected, rtol=1e-4, atol=1e-5)


def test_vmap_obeys_randomness():
    q, k, v = (x[None].expand(3, *x.shape) for x in make_dense(requires_grad=False))

    def drop(randomness):
        dropped = vmap(lambda *x: flash_ext.attention(*x, dropout_p=0.5), randomness=randomness)
        return dropped(q, k, v)

    with pytest.raises(RuntimeError, match="randomness"):
        drop("error")
    same, different = drop("same"), drop("different")
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    assert not torch.equal(different[0], different[1])


# ---- torch.export --------------------------------------------------------------------------------


class Dense(torch.nn.Module):
    def forward(self, q, k, v):
        return flash_ext.attention(q, k, v, causal=True)


class Packed(torch.nn.Module):
    def forward(self, q, k, v, cu_seqlens, max_seqlen):
        return flash_ext.flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
        )


@pytest.mark.parametrize("strict", [False, True])
def test_export_dense(strict):
    batch, seqlen_q, seqlen_k = (Dim(name, min=2, max=4096) for name in ("b", "m", "n"))
    keys = {0: batch, 1: seqlen_k}
    shapes = {"q": {0: batch, 1: seqlen_q}, "k": keys, "v": keys}
    inputs = make_dense(requires_grad=False)
    program = export(Dense(), tuple(inputs), dynamic_shapes=shapes, strict=strict)
    assert torch.ops.flash.attn.default in [node.target for node in program.graph.nodes]
    inputs = make_dense(3, 17, 19, requires_grad=False)
    torch.testing.assert_close(program.module()(*inputs), Dense()(*inputs))


def test_export_packed():
    total, ends = Dim("total", min=2, max=4096), Dim("ends", min=3, max=64)
    shapes = {"q": {0: total}, "k": {0: total}, "v": {0: total}, "cu_seqlens": {0: ends}}
    shapes["max_seqlen"] = None
    calls = [tuple(x.detach() for x in inputs) for inputs in packed_calls(torch.tensor)]
    program = export(Packed(), calls[0], dynamic_shapes=shapes, strict=False)
    torch.testing.assert_close(program.module()(*calls[1]), Packed()(*calls[1]))


# ---- import --------------------------------------------------------------------------------------


def run_python(code, path=PACKAGE.parent):
    """stdout and stderr of a new interpreter that finds flash_ext under path."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(path)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=path,
    )
    return done.stdout, done.stderr


def test_import_brings_nothing_heavy():
    code = "import torch; before = set(sys.modules); import flash_ext\n"
    out, err = run_python(code + "print(*sorted(set(sys.modules) - before))")
    assert not err
    assert [name for name in out.split() if name.split(".")[0] != "flash_ext"] == []


@pytest.mark.parametrize("first", ["flash_ext", "torch.utils.flop_counter"])
def test_flop_formulas_are_there_in_either_order(first):
    code = (
        f"import {first}, flash_ext, torch.utils.flop_counter as counter, torch\n"
        "print([op in counter.flop_registry for op in (torch.ops.flash.attn, "
        "torch.ops.flash.attn_backward)], len([f for f in sys.meta_path if 'flash' in "
        "type(f).__module__]))"
    )
    out, err = run_python(code)
    assert out.strip() == "[True, True] 0", err


@pytest.fixture
def copied_package(tmp_path):
    """A copy of the Python files, without the libraries."""
    copy = tmp_path / "flash_ext"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy


def test_missing_library_says_how_to_build(copied_package):
    _, err = run_python("import flash_ext", copied_package.parent)
    last = err.strip().splitlines()[-1]
    assert last.startswith("ImportError: _C.abi3.so, flash_ext's compiled library, is missing")
    assert "pip install --no-build-isolation" in last


def test_broken_library_says_why(copied_package):
    (copied_package / "_C.abi3.so").write_bytes(b"no library")
    _, err = run_python("import flash_ext", copied_package.parent)
    last = err.strip().splitlines()[-1]
    assert last.startswith("ImportError: flash_ext's compiled library does not load with torch")
    assert "The loader says:" in last


@pytest.mark.parametrize("runtime, name", [("cuda", "_C_cuda"), ("hip", "_C_hip")])
def test_broken_gpu_library_warns_and_leaves_the_cpu(copied_package, runtime, name):
    (copied_package / "_C.abi3.so").symlink_to(PACKAGE / "_C.abi3.so")
    (copied_package / f"{name}.abi3.so").write_bytes(b"no library")
    use = "import flash_ext; print(len(flash_ext.kernels()) > 0)"
    pretend = f"import torch; torch.version.cuda = torch.version.hip = None\n{use}"
    assert run_python(pretend, copied_package.parent) == ("True\n", "")
    pretend = pretend.replace("\n", f"; torch.version.{runtime} = '13.0'\n")
    out, err = run_python(pretend, copied_package.parent)
    assert out == "True\n"
    assert f"RuntimeWarning: flash_ext: {name}.abi3.so does not load" in err
    assert "The loader says:" in err


def test_missing_gpu_library_says_how_to_build(copied_package):
    """What a GPU tensor meets in a CPU build, reached here by the key that it would bring."""
    (copied_package / "_C.abi3.so").symlink_to(PACKAGE / "_C.abi3.so")
    code = (
        "import torch; torch.version.cuda = '13.0'\n"
        "import flash_ext\n"
        "x = torch.zeros(1, 2, 1, 8)\n"
        "cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)\n"
        "torch.ops.flash.attn.default.redispatch(cuda, x, x, x)\n"
    )
    _, err = run_python(code, copied_package.parent)
    last = err.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: flash: no kernel for GPU tensors: flash_ext was built")
    assert "FLASH_EXT_ARCHS=sm90" in last
