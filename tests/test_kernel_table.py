"""The kernel table against the kernels: what is declared is right, what is not raises by name.

For the kernels that serve here, each (pass, dtype, feature) that a call can ask for is a test: a
case against the reference where it is declared, a RuntimeError with its name where it is not.
A feature without a case here fails, so that a new one cannot go untested.
"""

import json
from dataclasses import replace

import pytest
import torch
from cache_util import paged
from util import (
    GRADIENT_NAMES,
    Case,
    assert_close,
    assert_close_to_reference,
    assert_lse_close,
    lengths,
    make_inputs,
    reference_options,
    run_inputs,
    run_reference_inputs,
)

import flash_ext
from flash_ext import reference

TABLE = json.loads(torch.ops.flash.kernels())
PASSES = ("forward", "backward", "probs")
OF_CACHES = ("append", "rotary")  # test_cache.py holds them against the reference
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}

# Nothing beyond the plain product.
PLAIN = {"num_heads_k": 4, "lse_grad": False, "seqlens_q": (70, 70), "seqlens_k": (130, 130)}

# feature -> what of a case asks for it alone
ASKING = {
    "varlen": {"layout": "varlen"},
    "gqa": {"num_heads_k": 2},
    "window": {"causal": True},
    "softcap": {"softcap": 5.0},
    "bias": {"bias": "bhqk"},
    "bool_mask": {"bias": "1hqk", "bias_dtype": torch.bool},
    "alibi": {"alibi": "bh"},
    "sinks": {"sinks": "finite"},
    "dropout": {"dropout_p": 0.2},
    "seqused": {"seqused_k": (99, 5)},
    "page_table": {},
    "num_splits": {"num_splits": 3},
    "head_dim_v": {"head_dim_v": 40},
    "deterministic": {"deterministic": True},
    "dlse": {"lse_grad": True},
    "dbias": {"bias": "1h1k"},
    "dalibi_slopes": {"alibi": "h"},
    "dsinks": {"sinks": "some"},
    "leftpad_k": {},
}
OF_GRADIENTS = {"dlse": "q", "dbias": "bias", "dalibi_slopes": "alibi_slopes", "dsinks": "sinks"}
# Which features a pass cannot be asked for: it has no such argument.
UNASKED = {
    "forward": set(OF_GRADIENTS),
    "backward": {"num_splits", "leftpad_k"},
    "probs": {
        *("sinks", "page_table", "num_splits", "deterministic", "leftpad_k", *OF_GRADIENTS),
    },
}


def inputs_for(entry, feature, device):
    """Inputs of an entry's dtype that ask for one feature and for nothing else."""
    case = Case(**{**PLAIN, **ASKING[feature], "dtype": DTYPES[entry["dtype"]]})
    inputs = make_inputs(case, device)
    if feature == "page_table":
        return paged(inputs, None, 13)
    if feature == "leftpad_k":
        return inputs.replace(leftpad_k=lengths((3, 70), device))
    return inputs


def explain(inputs, backward=False, **changes):
    """explain's lines: (required, serves, {other kernel: why not})."""
    arguments = [getattr(inputs, name) for name in GRADIENT_NAMES]
    text = flash_ext.explain(*arguments, **{**inputs.options, **changes}, backward=backward)
    required, serves, *others = text.splitlines()
    assert required.startswith("required: ") and serves.startswith("serves: ")
    reasons = dict(line.removeprefix("not ").split(": ", 1) for line in others)
    return required.removeprefix("required: "), serves.removeprefix("serves: "), reasons


def entry_for(pass_, dtype, device):
    """The table's row of the kernel that serves the plain problem, None if none does."""
    inputs = make_inputs(Case(**PLAIN, dtype=dtype), device)
    if pass_ != "probs":
        name = explain(inputs, backward=pass_ == "backward")[1]
    else:  # explain does not speak of it: the first that declares the dtype
        arch = "cpu" if torch.device(device).type == "cpu" else None
        fitting = [
            e["name"]
            for e in TABLE
            if e["pass"] == "probs" and DTYPES[e["dtype"]] == dtype and arch in (None, e["arch"])
        ]
        name = fitting[0] if fitting else None
    return next((entry for entry in TABLE if entry["name"] == name), None)


def someone_declares(entry, feature):
    """Whether a kernel beside this one would serve its calls with the feature."""
    kin = ("arch", "pass", "dtype")
    return any(feature in e["features"] for e in TABLE if all(e[n] == entry[n] for n in kin))


def pytest_generate_tests(metafunc):
    if "entry" not in metafunc.fixturenames:
        return
    device = metafunc.config.getoption("--device")
    entries = [
        entry
        for pass_ in PASSES
        for dtype in DTYPES.values()
        if (entry := entry_for(pass_, dtype, device))
    ]
    if "feature" not in metafunc.fixturenames:
        metafunc.parametrize("entry", entries, ids=lambda entry: entry["name"])
        return
    wanted = "declared" in metafunc.function.__name__.split("_")
    pairs = [
        pytest.param(entry, feature, id=f"{entry['name']}-{feature}")
        for entry in entries
        for feature in ASKING
        if feature not in UNASKED[entry["pass"]]
        and (feature in entry["features"] if wanted else not someone_declares(entry, feature))
    ]
    metafunc.parametrize("entry, feature", pairs)


# ---- the table itself ----------------------------------------------------------------------------


def test_rows_are_whole_and_names_unique():
    assert flash_ext.kernels() == TABLE
    names = [entry["name"] for entry in TABLE]
    assert len(set(names)) == len(names) > 0
    keys = {"name", "arch", "pass", "dtype", "head_dim", "head_dim_v", "features"}
    for entry in TABLE:
        assert set(entry) >= keys, entry
        assert entry["pass"] in PASSES + OF_CACHES and entry["dtype"] in DTYPES, entry
        assert 1 <= entry["head_dim"] <= 256 and 1 <= entry["head_dim_v"] <= 256, entry
        assert entry["name"].startswith(f"{entry['arch']}_"), entry
        assert len(set(entry["features"])) == len(entry["features"]), entry


def test_every_feature_has_a_case():
    assert {feature for entry in TABLE for feature in entry["features"]} <= set(ASKING)


def test_the_cpu_serves_every_pass_and_dtype():
    for pass_ in PASSES:
        for name in DTYPES:
            rows = [e for e in TABLE if (e["arch"], e["pass"], e["dtype"]) == ("cpu", pass_, name)]
            assert rows, f"no cpu kernel: {pass_}, {name}"
            assert max(entry["head_dim"] for entry in rows) == 256


# ---- what is declared, and what is not -----------------------------------------------------------


def check_forward(inputs, label):
    ref, pt = run_reference_inputs(inputs)
    result = run_inputs(inputs, needed=(), fill=False)
    assert_close_to_reference(result, ref, pt, inputs, label)


def check_backward(inputs, needed, label):
    ref, pt = run_reference_inputs(inputs)
    result = run_inputs(inputs, needed=needed, fill=False)
    assert set(result.grads) == set(needed)
    assert_close_to_reference(result, ref, pt, inputs, label)


def check_probs(inputs, label):
    options = {n: x for n, x in inputs.options.items() if n not in ("deterministic", "num_splits")}
    ref, _ = run_reference_inputs(inputs)
    lse = run_inputs(inputs, needed=(), fill=False).lse
    assert_lse_close(lse, ref.lse, inputs, label)
    arguments = (inputs.bias, inputs.alibi_slopes)
    p = flash_ext.attn_probs(inputs.q, inputs.k, lse, *arguments, inputs.sinks, **options)
    options["window_left"], options["window_right"] = options.pop("window")
    options.pop("page_table", None)
    exact, rounded = (
        reference.attn_probs(
            inputs.q, inputs.k, ref.lse, *arguments, **options, compute_dtype=compute_dtype
        )
        for compute_dtype in (torch.float64, inputs.q.dtype)
    )
    assert_close(p, exact, rounded, label)


def test_plain(entry, device):
    """No feature at all."""
    inputs = make_inputs(Case(**PLAIN, dtype=DTYPES[entry["dtype"]]), device)
    if entry["pass"] == "forward":
        check_forward(inputs, entry["name"])
    elif entry["pass"] == "backward":
        check_backward(inputs, ("q", "k", "v"), entry["name"])
    else:
        check_probs(inputs, entry["name"])


def test_a_declared_feature_is_right(entry, feature, device):
    inputs, label = inputs_for(entry, feature, device), f"{entry['name']}, {feature}"
    if entry["pass"] == "probs":
        check_probs(inputs, label)
        return
    backward = entry["pass"] == "backward"
    required, serves, _ = explain(inputs, backward)
    asked = required.split(", ")[4:]  # after pass, dtype, head_dim, head_dim_v
    assert asked == ([] if feature == "dlse" else [OF_THE_FORWARD.get(feature, feature)])
    assert serves == entry["name"]
    if not backward:
        check_forward(inputs, label)
    else:
        check_backward(inputs, (OF_GRADIENTS.get(feature, "k"),), label)


# What the input of a gradient is called as a feature.
OF_THE_FORWARD = {"dbias": "bias", "dalibi_slopes": "alibi", "dsinks": "sinks"}


def test_a_feature_left_out_raises_by_name(entry, feature, device):
    inputs = inputs_for(entry, feature, device)
    with pytest.raises(RuntimeError, match=f"no kernel.*{feature}"):
        if entry["pass"] == "probs":
            check_probs(inputs, feature)
        elif entry["pass"] == "forward":
            run_inputs(inputs, needed=(), fill=False)
        else:
            backward_operator(inputs, OF_GRADIENTS.get(feature, "k"))


def backward_operator(inputs, needed):
    """flash::attn_backward itself, since the forward may refuse first."""
    first = [getattr(inputs, name) for name in GRADIENT_NAMES]
    rows = inputs.q.shape[:-1]
    lse = inputs.q.new_zeros((*rows[:-2], rows[-1], rows[-2]), dtype=torch.float32)
    return torch.ops.flash.attn_backward(
        *(inputs.dout, inputs.dlse, *first[:3], torch.zeros_like(inputs.dout)),
        lse.double() if inputs.q.dtype == torch.float64 else lse,
        **dict(zip(GRADIENT_NAMES[3:], first[3:], strict=True)),
        **{"page_table": None, **reference_options(inputs)},
        needed=[name == needed for name in GRADIENT_NAMES],
    )


# ---- explain -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
def test_explain_has_a_line_for_every_kernel_of_the_pass(backward, dtype, device):
    inputs = make_inputs(Case(softcap=3.0, causal=True, head_dim=48, dtype=dtype), device)
    required, serves, reasons = explain(inputs, backward)
    name = "backward" if backward else "forward"
    dtype_name = str(dtype).removeprefix("torch.")
    assert required == f"{name}, {dtype_name}, head_dim 48, head_dim_v 48, gqa, window, softcap"
    rows = {entry["name"]: entry for entry in TABLE if entry["pass"] == name}
    assert rows[serves]["dtype"] == dtype_name
    assert set(reasons) <= set(rows) - {serves}
    mine = {n for n, entry in rows.items() if entry["arch"] == rows[serves]["arch"]}
    assert set(reasons) >= mine - {serves}
    for other, reason in reasons.items():
        entry = rows[other]
        if entry["dtype"] != dtype_name:
            assert reason == f"is for {entry['dtype']}"
        else:
            assert reason.startswith(
                (
                    "would serve, but an earlier",
                    "needs ",
                    "lacks ",
                    "serves ",
                    "is not for this processor",
                )
            )


def test_explain_lists_every_feature_that_is_asked_for(dtype, device):
    everything = {
        **{"layout": "varlen", "num_heads_k": 2, "causal": True, "softcap": 2.0, "bias": "bhqk"},
        **{"alibi": "h", "sinks": "finite", "dropout_p": 0.5, "seqused_q": (1, 2)},
        **{"num_splits": 2, "head_dim_v": 8, "deterministic": True},
    }
    inputs = make_inputs(Case(**everything, dtype=dtype), device)
    required, _, _ = explain(inputs)
    asked = "varlen, gqa, window, softcap, bias, alibi, sinks, dropout, seqused, num_splits"
    assert required.endswith(f"{asked}, head_dim_v, deterministic")
    assert "num_splits" not in explain(inputs, backward=True)[0]  # only the forward is split


@pytest.mark.parametrize(
    "changes",
    [
        *({"window": (300, 300)}, {"causal": False}, {"dropout_p": 0.001}, {"num_splits": 1}),
        *({"softcap": 0.0}, {"softmax_scale": 3.0}),
    ],
    ids=str,
)
def test_what_changes_nothing_asks_for_nothing(changes, dtype, device):
    inputs = make_inputs(Case(**PLAIN, dtype=dtype), device)
    assert explain(inputs, **changes) == explain(inputs)


def test_explain_computes_nothing_and_draws_nothing(dtype, device):
    inputs = make_inputs(Case(**PLAIN, dtype=dtype), device)
    inputs = inputs.replace(q=inputs.q.expand(2, 70, 4, 32).requires_grad_())
    state = torch.get_rng_state()
    _, serves, _ = explain(inputs, dropout_p=0.5)
    assert serves != "no kernel" and torch.equal(torch.get_rng_state(), state)


def test_a_case_asks_for_what_it_says(dtype, device):
    """The plain case asks for nothing, so that each test above is of one feature."""
    inputs = make_inputs(replace(Case(**PLAIN), dtype=dtype), device)
    assert explain(inputs)[0].count(",") == 3
