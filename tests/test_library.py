"""What the built libraries ask of a machine: one wheel for every Python >= 3.10 and torch >= 2.10.

Reads flash_ext/*.so and the objects of the last build with readelf, nm and objdump. A symbol that
only a newer torch, a newer glibc or a Python has would break users whose machines differ from the
one that built the wheel, and nothing else in the tests would notice.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import flash_ext

LIBRARIES = sorted(Path(flash_ext.__file__).parent.glob("*.so"))
BUILD = Path(__file__).resolve().parent.parent / "build" / "native"

# torch's C shims that the libraries may call: all of them are in torch 2.10, the oldest that is
# supported. A name is added here only after a look into that version's headers.
PINNED = {
    "torch_": [
        *("call_dispatcher", "library_impl", "parallel_for", "new_string_handle"),
        *("get_const_data_ptr", "get_mutable_data_ptr"),
        *("delete_string", "string_c_str", "string_length"),
        *("new_list_reserve_size", "list_get_item", "list_push_back", "list_size", "delete_list"),
    ],
    "aoti_torch_": [
        *("abi_version", "aten_fill__Scalar", "aten_narrow", "dtype_element_size"),
        "is_contiguous",
        *("new_tensor_handle", "delete_tensor_object", "delete_library_object"),
        *("library_def", "library_init_def", "library_init_impl"),
    ],
    "aoti_torch_get_": [
        *("device_index", "device_type", "dim", "dtype", "numel", "size", "sizes", "stride"),
    ],
    # The stable headers ask torch for the number of every enumerator, whichever of them is used.
    "aoti_torch_device_type_": ["cpu", "cuda", "meta", "mps", "privateuse1", "xpu"],
    "aoti_torch_dtype_": [
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("bfloat16", "float16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    ],
    "aoti_torch_layout_": [
        *("strided", "jagged", "_mkldnn"),
        *("sparse_bsc", "sparse_bsr", "sparse_coo", "sparse_csc", "sparse_csr"),
    ],
    "aoti_torch_memory_format_": [
        *("contiguous_format", "preserve_format", "channels_last", "channels_last_3d"),
    ],
}
# In CUDA builds of torch only, and so in the GPU library only.
CUDA_SHIMS = {"aoti_torch_get_current_cuda_stream"}
SHIMS = {prefix + name for prefix, names in PINNED.items() for name in names}
OLDEST_TORCH = (2, 10)

# Weak symbols of every shared library's start-up code.
STARTUP = {"_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__"}

# manylinux_2_28, torch's own platform.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}

# Above those limits, from the compiler's own headers: a build with manylinux_2_28's compiler, which
# is how a wheel for others is made, has none of them.
FROM_COMPILER = {
    "__cxa_call_terminate",  # noexcept, g++ >= 14
    "_ZSt21ios_base_library_initv",  # <iostream>, g++ >= 13
    # Default constructors of stringstream and ostringstream, g++ >= 9.
    "_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev",
    "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev",
}

# The CUDA runtime inside the GPU library uses threads and dlopen, which glibc 2.34 moved into libc
# under a new version: a build on manylinux_2_28 binds the old one.
FROM_CUDA_RUNTIME = re.compile(r"pthread_\w+|dl\w+|sem_\w+|shm_\w+")

SYSTEM_LIBRARIES = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}
LOADER = re.compile(r"ld-linux-[\w-]+\.so\.\d")


def output_of(tool, *args):
    """What a program of binutils prints; a failure that says what to install when it is missing."""
    if shutil.which(tool) is None:
        pytest.fail(f"{tool} is missing: install binutils", pytrace=False)
    return subprocess.run(
        [tool, *map(str, args)], check=True, capture_output=True, text=True
    ).stdout


def undefined_symbols(library):
    """{name: version, or None where the symbol has none}."""
    names = [line.split()[-1] for line in output_of("nm", "-D", "-u", library).splitlines()]
    pairs = [name.partition("@") for name in names]
    return {name: version.lstrip("@") or None for name, _, version in pairs}


libraries = pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)


def test_there_is_a_library():
    assert "_C.abi3.so" in [library.name for library in LIBRARIES]


@libraries
def test_symbols_are_the_stable_shims_and_the_c_and_cpp_runtime(library):
    """No Python symbol, no C++ symbol of torch, no shim newer than torch 2.10."""
    unversioned = {name for name, version in undefined_symbols(library).items() if not version}
    pinned = SHIMS | (CUDA_SHIMS if "cuda" in library.name else set()) | STARTUP
    assert unversioned <= pinned, f"not pinned: {sorted(unversioned - pinned)}"


def shims_by_version():
    """{name: oldest torch, (0, 0) where the header does not say} from the installed headers."""
    csrc = Path(torch.__file__).parent / "include" / "torch" / "csrc"
    aoti = csrc / "inductor" / "aoti_torch"
    headers = ("stable/c/shim.h", aoti / "c" / "shim.h", aoti / "generated" / "c_shim_aten.h")
    found = {}
    for header in headers:
        guards = [(0, 0)]
        for line in (csrc / header).read_text().splitlines():
            if line.startswith("#if"):
                version = re.search(r">= TORCH_VERSION_(\d+)_(\d+)_0", line)
                guards.append(tuple(map(int, version.groups())) if version else guards[-1])
            elif line.startswith("#endif"):
                guards.pop()
            elif name := re.search(r"\b((?:aoti_)?torch_\w+)\(", line):
                found[name[1]] = guards[-1]
    return found


def test_pinned_shims_are_in_the_oldest_torch():
    found = shims_by_version()
    assert max(found.values()) > OLDEST_TORCH, "the headers' version guards were not recognised"
    assert sorted(SHIMS - found.keys()) == [], "not declared by the installed torch"
    assert [name for name in sorted(SHIMS) if found[name] > OLDEST_TORCH] == []


@libraries
def test_no_symbol_is_newer_than_manylinux_2_28(library):
    too_new = []
    for name, version in undefined_symbols(library).items():
        if version is None or name in FROM_COMPILER:
            continue
        family, _, number = version.partition("_")
        if tuple(map(int, number.split("."))) > NEWEST[family]:
            too_new.append(f"{name}@{version}")
    assert too_new == []


@libraries
def test_needed_libraries_and_search_paths(library):
    """libtorch by name, the system's own, no search path of the machine that built it."""
    dynamic = output_of("readelf", "-dW", library)
    needed = set(re.findall(r"\(NEEDED\)\s+Shared library: \[(.+)\]", dynamic))
    assert "libtorch.so" in needed
    others = needed - SYSTEM_LIBRARIES - {"libtorch.so"}
    assert [name for name in others if not LOADER.fullmatch(name)] == []
    paths = ":".join(re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic))
    assert [path for path in paths.split(":") if path and not path.startswith("$ORIGIN")] == []


@libraries
def test_code_is_never_writable(library):
    assert "TEXTREL" not in output_of("readelf", "-dW", library)
    segments = output_of("readelf", "-lW", library)
    flags = re.findall(r"^\s+(LOAD|GNU_STACK)\s.*\s([R ][W ][E ])\s+0x", segments, re.MULTILINE)
    assert {kind for kind, _ in flags} == {"LOAD", "GNU_STACK"}
    assert [flag for flag in flags if "W" in flag[1] and "E" in flag[1]] == []


@libraries
def test_nothing_of_ours_is_exported(library):
    """Registration runs at load; an exported function could be taken from another library."""
    exported = [
        line.split()[-1] for line in output_of("nm", "-D", "--defined-only", library).splitlines()
    ]
    assert [name for name in exported if "flash" in name] == []


# ---- one library, several instruction sets -------------------------------------------------------


def instruction_set_objects():
    """(object, kernel name, isa) of the last build's units that need more than the baseline."""
    manifest = BUILD / "generated" / "manifest.json"
    units = json.loads(manifest.read_text()) if manifest.exists() else []
    names = [(Path(unit["source"]).stem, unit["isa"]) for unit in units if unit["flags"]]
    objects = [(BUILD / "objects" / f"{name}.o", name, isa) for name, isa in names]
    objects = [entry for entry in objects if entry[0].exists()]
    if not objects:
        pytest.skip("no objects of units with an instruction set of their own in build/native")
    return objects


def entry_functions(kernel):
    """The mangled names of what a kernel's row of the table points to."""
    names = [f"{part}_{kernel}" for part in ("runs", "workspace", "launch")]
    return tuple(f"_ZN5flash{len(name)}{name}E" for name in names)


def test_no_shared_function_carries_an_instruction_set():
    """The linker keeps one copy of an inline function; it must never be one built for AVX-512."""
    shared = []
    for path, kernel, isa in instruction_set_objects():
        for line in output_of("nm", "--defined-only", "--extern-only", path).splitlines():
            kind, name = line.split()[-2:]
            is_code = kind in "TWi"
            if (
                is_code
                and f"isa_{isa}" not in name
                and not name.startswith(entry_functions(kernel))
            ):
                shared.append(f"{path.name}: {name}")
    assert shared == []


def test_nothing_runs_before_the_processor_is_asked():
    """No static initialiser, and runs_* itself is free of vector registers: both run anywhere."""
    for path, kernel, _ in instruction_set_objects():
        assert "init_array" not in output_of("readelf", "-SW", path), path.name
        runs = entry_functions(kernel)[0] + "v"
        code = output_of("objdump", "-d", "--no-show-raw-insn", f"--disassemble={runs}", path)
        assert f"<{runs}>:" in code, path.name
        assert not re.search(r"%[xyz]mm|%k[0-7]|vzero", code), f"{path.name}:\n{code}"
