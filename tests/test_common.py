"""csrc/common against brute force: masks, ranges, lengths, dropout, conversions, scores, row ends.

The headers are reached through tests/native/testing.cpp. What they must do stands in
flash_ext/reference.py; here each function is also held to its own comment.
"""

import importlib.machinery
import importlib.util
import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_ext import reference

NATIVE = Path(__file__).resolve().parent / "native"
INT32 = np.iinfo(np.int32)


def load_testing_module():
    """flash_ext_testing, or a failure that says how to build it."""
    finder = importlib.machinery.PathFinder.find_spec("flash_ext_testing", [str(NATIVE)])
    if finder is None:
        pytest.fail(
            "tests/native/flash_ext_testing is not built for this Python: run `make testing`, or "
            "`python setup.py build_testing`",
            pytrace=False,
        )
    module = importlib.util.module_from_spec(finder)
    finder.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def native():
    return load_testing_module()


# ---- mask ----------------------------------------------------------------------------------------


def row_window(i, seqlen_q, seqlen_k, left, right):
    """The keys that row i sees, from the definition: a Python range."""
    diagonal = i + seqlen_k - seqlen_q
    first = 0 if left < 0 else max(0, diagonal - left)
    last = seqlen_k - 1 if right < 0 else min(seqlen_k - 1, diagonal + right)
    return range(first, last + 1)


def sub_ranges(length):
    return [(b, e) for b in range(length) for e in range(b + 1, length + 1)]


SMALL_MASKS = list(itertools.product(range(5), range(5), range(-1, 6), range(-1, 6)))


def test_mask_sees_is_the_definition(native):
    for shape in SMALL_MASKS:
        mask = native.Mask(*shape)
        seqlen_q, seqlen_k, _, _ = shape
        for i, j in itertools.product(range(seqlen_q), range(-1, seqlen_k + 2)):
            assert mask.sees(i, j) == (j in row_window(i, *shape)), (shape, i, j)


def test_mask_ranges_are_the_union_and_its_inverse(native):
    """keys_of and rows_of hold exactly what is seen, blocks that reach past the end included."""
    for shape in SMALL_MASKS:
        mask = native.Mask(*shape)
        seqlen_q, seqlen_k, _, _ = shape
        windows = [set(row_window(i, *shape)) for i in range(seqlen_q)]
        for rows in sub_ranges(seqlen_q + 2):
            seen = set().union(*windows[slice(*rows)])
            assert set(range(*mask.keys_of(rows))) == seen, (shape, "rows", rows)
        for keys in sub_ranges(seqlen_k + 2):
            rows = {i for i, window in enumerate(windows) if window & set(range(*keys))}
            assert set(range(*mask.rows_of(keys))) == rows, (shape, "keys", keys)


def test_mask_edge_tiles_are_those_with_something_masked(native):
    """Both ways: a missed edge reads masked keys, a false one costs the predicate for nothing."""
    for shape in SMALL_MASKS:
        mask = native.Mask(*shape)
        seqlen_q, seqlen_k, _, _ = shape
        kept = np.zeros((seqlen_q + 2, seqlen_k + 2), dtype=np.int64)
        for i in range(seqlen_q):
            kept[i, row_window(i, *shape)] = 1
        sums = np.pad(kept.cumsum(0).cumsum(1), ((1, 0), (1, 0))).tolist()
        key_ranges = sub_ranges(seqlen_k + 2)
        for r0, r1 in sub_ranges(seqlen_q + 2):
            for k0, k1 in key_ranges:
                count = sums[r1][k1] - sums[r0][k1] - sums[r1][k0] + sums[r0][k0]
                edge = count < (r1 - r0) * (k1 - k0)
                assert mask.is_edge((r0, r1), (k0, k1)) == edge, (shape, (r0, r1), (k0, k1))


LENGTH = st.integers(0, 2**30 - 1)
SIDE = st.one_of(st.just(-1), st.integers(0, 200), LENGTH)


@settings(max_examples=300, deadline=None)
@given(LENGTH, LENGTH, SIDE, SIDE, st.integers(0, 2**30), st.integers(0, 2**30))
def test_mask_ranges_of_long_sequences(seqlen_q, seqlen_k, left, right, row, key):
    """No sum leaves 32 bits: against integers without bounds, up to the largest length allowed."""
    native = load_testing_module()
    shape = (seqlen_q, seqlen_k, left, right)
    mask = native.Mask(*shape)
    diagonal = seqlen_k - seqlen_q
    row_end, key_end = min(row + 64, seqlen_q), min(key + 64, seqlen_k)

    first = row if right < 0 else max(row, -right - diagonal)
    last = row_end - 1 if left < 0 else min(row_end - 1, seqlen_k - 1 + left - diagonal)
    begin, end = mask.keys_of((row, row + 64))
    if first > last or seqlen_k == 0:
        assert end <= begin
    else:
        assert begin == row_window(first, *shape).start
        assert end == row_window(last, *shape).stop

    first = 0 if right < 0 else max(0, key - right - diagonal)
    last = seqlen_q - 1 if left < 0 else min(seqlen_q - 1, key_end - 1 + left - diagonal)
    begin, end = mask.rows_of((key, key + 64))
    if first > last or key >= key_end:
        assert end <= begin
    else:
        assert (begin, end) == (first, last + 1)


# ---- blocks and splits ---------------------------------------------------------------------------


def test_blocks_cover_their_range(native):
    for (begin, end), block in itertools.product(sub_ranges(12), (1, 3, 4, 64)):
        blocks = range(*native.blocks_of((begin, end), block))
        assert set(blocks) == {x // block for x in range(begin, end)}
        covered = [x for n in blocks for x in range(*native.block_range(n, block))]
        assert covered == list(range(blocks.start * block, blocks.stop * block))
    assert native.blocks_of((5, 5), 4) == (0, 0) and native.blocks_of((5, 2), 4) == (0, 0)


def test_splits_partition_the_blocks(native):
    """Contiguous, in order, of equal length but the last ones; a count of 0 is no split."""
    for begin, size, count in itertools.product((0, 3), range(13), range(1, 16)):
        blocks = (begin, begin + size)
        splits = [range(*native.split_blocks(blocks, i, count)) for i in range(count)]
        assert [n for split in splits for n in split] == list(range(*blocks))
        lengths = [len(split) for split in splits]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] == math.ceil(size / count)
    assert native.split_blocks((2, 9), 0, 0) == (2, 9)


# ---- lengths -------------------------------------------------------------------------------------


def test_lengths_of_good_values(native):
    dense = native.SeqSide(None, None, 9, 9)
    assert [(dense.offset(b), dense.length(b)) for b in range(3)] == [(0, 9)] * 3
    packed = native.SeqSide([0, 4, 4, 11], None, 11, 6)
    assert [packed.offset(b) for b in range(3)] == [0, 4, 4]
    assert [packed.length(b) for b in range(3)] == [4, 0, 6], "max_seqlen bounds the last one"
    used = native.SeqSide([0, 4, 4, 11], [2, 3, 5], 11, 11)
    assert [used.length(b) for b in range(3)] == [2, 0, 5]
    assert native.seq_info(packed, used, 2) == (4, 4, 6, 5)


@pytest.mark.parametrize("total", [0, 7, 2**31 + 5])
@pytest.mark.parametrize("max_seqlen", [0, 3, 2**30 - 1])
def test_lengths_of_hostile_values_stay_inside(native, total, max_seqlen):
    """Lengths come from the device and are never trusted: nothing outside [0, total) is touched."""
    values = [INT32.min, INT32.min + 1, -5, -1, 0, 1, 2, 6, 7, 8, INT32.max - 1, INT32.max]
    for first, second, used in itertools.product(values, values, [None, *values]):
        side = native.SeqSide([first, second], None if used is None else [used], total, max_seqlen)
        offset, length = side.offset(0), side.length(0)
        assert offset == min(max(first, 0), total)
        limits = [min(max(second, offset), total) - offset, max_seqlen]
        limits += [] if used is None else [max(used, 0)]
        assert length == min(limits)
        assert 0 <= offset <= offset + length <= total


# ---- dropout -------------------------------------------------------------------------------------

PHILOX_7_ROUNDS = [  # Random123's kat_vectors: counter, key -> words
    ("00000000 " * 4, "00000000 " * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff " * 4, "ffffffff " * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "4dfccaba 190a87f0 c47362ba b6b5242a",
    ),
]
RNG_STATES = [(0, 0), (-0x123456789ABCDEF, 0x7766554433221100), (2**63 - 1, -(2**63))]


@pytest.mark.parametrize("counter, key, words", PHILOX_7_ROUNDS, ids=["zeros", "ones", "pi"])
def test_philox_known_answers(native, counter, key, words):
    counter, key, words = ([int(x, 16) for x in text.split()] for text in (counter, key, words))
    assert list(native.philox4x32_7(counter, key)) == words


def test_splitmix64_known_answers(native):
    """The generator's first outputs for the seed 1234567: its state grows by the golden gamma."""
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + n * 0x9E3779B97F4A7C15) % 2**64 for n in range(3)]
    assert [native.splitmix64(state) for state in states] == outputs


@pytest.mark.parametrize("rng_state", RNG_STATES, ids=["zeros", "both words", "limits"])
def test_dropout_keep_is_the_reference(native, rng_state):
    shape = (2, 3, 3, 131)
    dropout = native.Dropout(rng_state, native.Dropout.threshold_of(0.3))
    expected = reference.dropout_keep(torch.tensor(rng_state), 0.3, *shape)
    got = [dropout.keep(*index) for index in itertools.product(*map(range, shape))]
    assert torch.equal(torch.tensor(got).view(shape), expected)


def test_dropout_bytes_are_the_keep_rule(native):
    """Byte 2 n + c of call t of group a decides key 64 a + 8 n + 2 t + c: each key once."""
    dropout = native.Dropout(RNG_STATES[1], 100)
    keys = set()
    for a, t in itertools.product(range(3), range(4)):
        words = dropout.bytes(5, 2, 77, a, t)
        for n, c in itertools.product(range(8), range(2)):
            j = 64 * a + 8 * n + 2 * t + c
            assert dropout.keep_byte(words, n, c) == dropout.keep(5, 2, 77, j)
            keys.add(j)
    assert keys == set(range(3 * 64))


@pytest.mark.parametrize("p, threshold", [(0, 0), (0.001, 0), (0.002, 1), (0.5, 128), (1, 256)])
def test_dropout_rate_and_scale(native, p, threshold):
    assert native.Dropout.threshold_of(p) == threshold
    dropout = native.Dropout(RNG_STATES[1], threshold)
    assert dropout.enabled() == (threshold > 0)
    scale = 0 if threshold == 256 else 256 / (256 - threshold)
    assert dropout.keep_scale() == pytest.approx(scale, rel=1e-7)
    count = 64 * 1024
    kept = sum(dropout.keep(1, 2, i, j) for i in range(256) for j in range(256)) / count
    rate = 1 - threshold / 256
    assert abs(kept - rate) <= 5 * math.sqrt(rate * (1 - rate) / count)


# ---- 16-bit floats -------------------------------------------------------------------------------

SIXTEEN_BIT = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def tensor_bits(x):
    """A 16-bit float tensor's bits as uint16."""
    return x.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_every_16_bit_float_widens_as_torch_does(native, name):
    bits = np.arange(2**16, dtype=np.uint16)
    got = getattr(native, f"{name}_to_float")(bits)
    expected = torch.from_numpy(bits.view(np.int16)).view(SIXTEEN_BIT[name]).float().numpy()
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    number = ~np.isnan(expected)
    assert np.array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))
    assert np.array_equal(getattr(native, f"float_to_{name}")(got)[number], bits[number])


def floats_to_round(dtype):
    """Random bit patterns; every value of dtype, every tie between two, and their neighbours."""
    patterns = np.random.default_rng(0).integers(0, 2**32, 500_000, dtype=np.uint32)
    bits = np.arange(2**16, dtype=np.uint16)
    exact = torch.from_numpy(bits.view(np.int16)).view(dtype).float().numpy()
    exact = np.sort(exact[np.isfinite(exact)])
    middle = ((exact[1:].astype(np.float64) + exact[:-1]) / 2).astype(np.float32)
    largest = exact[-1:].astype(np.float64)
    beyond = (largest * (1 + 2.0 ** -np.arange(6, 14))).clip(max=3.4e38).astype(np.float32)
    special = np.array([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0], dtype=np.float32)
    edges = np.concatenate([exact, middle, beyond, -beyond])
    below, above = (np.nextafter(edges, np.float32(to)) for to in (-np.inf, np.inf))
    return np.concatenate([patterns.view(np.float32), edges, below, above, special])


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_floats_round_as_torch_does(native, name):
    """To nearest even, subnormals and overflow to Inf included; NaN stays NaN."""
    x = floats_to_round(SIXTEEN_BIT[name])
    got = getattr(native, f"float_to_{name}")(x)
    rounded = torch.from_numpy(x).to(SIXTEEN_BIT[name])
    expected, number = tensor_bits(rounded), ~np.isnan(x)
    wrong = np.flatnonzero((got != expected) & number)
    assert wrong.size == 0, f"{x[wrong[0]]!r}: {got[wrong[0]]:#06x} != {expected[wrong[0]]:#06x}"
    back = torch.from_numpy(got[~number].view(np.int16)).view(SIXTEEN_BIT[name])
    assert back.isnan().all()


# ---- scores --------------------------------------------------------------------------------------

ROWS, KEYS = 5, 7


def bias_matrix(kind):
    """(what the score is given, the number that it must add) of one kind; None: no bias."""
    values = np.random.default_rng(3).normal(size=(ROWS, KEYS))
    if kind == "none":
        return None, np.zeros((ROWS, KEYS))
    if kind == "bool":
        return values > 0, np.where(values > 0, 0.0, -np.inf)
    if kind == "bfloat16":
        x = torch.from_numpy(values).bfloat16()
        return tensor_bits(x), x.double().numpy()
    if kind == "key broadcast":
        column = np.broadcast_to(values[:, :1], (ROWS, KEYS))
        return column, column
    if kind == "transposed":
        return np.ascontiguousarray(values.T).T, values
    given = values.astype(kind)
    return given, given.astype(np.float64)


FLOATS = ["float16", "float32", "float64"]
BIASES = ["none", "bool", "bfloat16", *FLOATS, "key broadcast", "transposed"]


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("softcap", [0.0, 2.5])
@pytest.mark.parametrize("slope", [0.0, 0.3])
def test_score_is_the_definition_and_its_derivative(native, bias, softcap, slope):
    given, added = bias_matrix(bias)
    options = {"scale": 0.4, "softcap": softcap, "bias": given, "slope": slope, "diagonal": 2}
    score, score32 = native.Score64(**options), native.Score32(**options)
    products = random.Random(1)
    for i, j in itertools.product(range(ROWS), range(KEYS)):
        x, step = products.uniform(-20, 20), 1e-5
        s = 0.4 * x
        s = softcap * math.tanh(s / softcap) if softcap else s
        s += added[i, j] - slope * abs(i + 2 - j)
        assert score.apply(x, i, j) == pytest.approx(s, rel=1e-14)
        if s > -math.inf:
            numeric = (score.apply(x + step, i, j) - score.apply(x - step, i, j)) / (2 * step)
            assert score.grad(x, i, j) == pytest.approx(numeric, rel=1e-6, abs=1e-9)
        if given is not None and given.dtype == np.float64:
            continue  # a float score has no float64 bias: such a call is refused
        assert score32.apply(x, i, j) == pytest.approx(s, rel=2e-5, abs=2e-5)
        assert score32.grad(x, i, j) == pytest.approx(score.grad(x, i, j), rel=1e-4, abs=1e-6)


def test_score_of_large_products_is_capped(native):
    score = native.Score64(scale=1.0, softcap=30.0)
    assert score.apply(1e30, 0, 0) == 30 and score.apply(-1e30, 0, 0) == -30
    assert score.grad(1e30, 0, 0) == 0


@pytest.mark.parametrize("kind, dtype", [("Score32", np.float32), ("Score64", np.float64)])
def test_score_of_extreme_biases(native, kind, dtype):
    """Finite numbers stop at -1e38, so that a score can be added; -inf masks a NaN product too."""
    lowest = np.array([[np.finfo(dtype).min, -2e38, -9e37, -np.inf]], dtype=dtype)
    score = getattr(native, kind)(bias=lowest)
    got = [score.apply(0.0, 0, j) for j in range(4)]
    assert got == pytest.approx([-1e38, -1e38, -9e37, -math.inf], rel=1e-7)
    assert score.apply(math.nan, 0, 3) == -math.inf
    masked = getattr(native, kind)(bias=np.array([[False, True]]))
    assert masked.apply(math.nan, 0, 0) == -math.inf
    assert math.isnan(masked.apply(math.nan, 0, 1))


# ---- row ends ------------------------------------------------------------------------------------


def exp(x):
    return math.exp(x) if x < 700 else math.inf


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("float64", 1e-14)])
def test_online_softmax_is_logsumexp(native, dtype, tolerance):
    """The recurrence that mainloops run, over chunks with masked ones first, last and between."""
    policy = getattr(native, dtype)
    generator = random.Random(7)
    for size, chunk, sink in itertools.product((1, 5, 9), (1, 2, 3), (-math.inf, 1.5, 40.0)):
        scores = [generator.choice([-math.inf, generator.gauss(0, 5)]) for _ in range(size)]
        row_max, row_sum, out = -math.inf, 0.0, 0.0
        for at in range(0, size, chunk):
            part = scores[at : at + chunk]
            new_max = max(row_max, *part)
            factor = policy.rescale_factor(row_max, new_max)
            weights = [exp(s - new_max) if new_max > -math.inf else 0.0 for s in part]
            row_sum = row_sum * factor + sum(weights)
            out = out * factor + sum(w * (at + n) for n, w in enumerate(weights))
            row_max = new_max
        lse, out_scale = policy.finish_row(row_max, row_sum, sink)
        logits = [s for s in (*scores, sink) if s > -math.inf]
        if not logits:
            assert (lse, out_scale) == (-math.inf, 0)
            continue
        top = max(logits)
        expected = top + math.log(sum(math.exp(s - top) for s in logits))
        assert lse == pytest.approx(expected, rel=tolerance, abs=tolerance)
        mean = sum(math.exp(s - expected) * n for n, s in enumerate(scores))
        assert out * out_scale == pytest.approx(mean, rel=20 * tolerance, abs=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_row_ends_of_extreme_rows(native, dtype):
    policy = getattr(native, dtype)
    inf, nan = math.inf, math.nan
    assert policy.finish_row(-inf, 0.0, -inf) == (-inf, 0.0)
    assert policy.finish_row(-inf, 0.0, 3.0) == (3.0, 0.0), "a row that sees its sink alone"
    assert policy.finish_row(-1e38, 4.0, -inf)[1] == 0.25
    assert policy.rescale_factor(-inf, -inf) == 1 and policy.rescale_factor(-inf, 0.0) == 0
    for row in ((nan, nan, -inf), (nan, nan, 2.0)):
        assert all(math.isnan(x) for x in policy.finish_row(*row)), "NaN is not hidden"
    for lse, renormalise in ((255.0, False), (-256.0, True), (1e38, True), (-inf, False)):
        assert policy.needs_renormalising(lse) == renormalise
