"""flash_ext.bench on a CPU: tiny runs, keys, and what happens when something cannot be run."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch

from flash_ext.bench import __main__ as command
from flash_ext.bench import grid, peers, report, results, timing
from flash_ext.bench.grid import Point
from flash_ext.bench.measure import Bench

CPU = torch.device("cpu")
TINY = Point("fwd", 16, "causal", 32, 2, 2, 2, "fp32")


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    """A few runs of little: what is tested is that they happen."""
    monkeypatch.setitem(timing.SECONDS, "cpu", 1e-4)
    monkeypatch.setitem(timing.FLUSH_BYTES, "cpu", 1 << 12)
    monkeypatch.setattr(timing, "HOST_BATCH", 2)
    monkeypatch.setattr(timing, "HOST_ROUNDS", 2)
    monkeypatch.setattr(
        grid,
        "SIZES",
        {
            "cpu": grid.Sizes(
                **{"tokens": 64, "hidden": 32, "seqlens": (16, 32), "head_dims": (16,)},
                **{"dtypes": ("fp32", "bf16"), "gqa": (4, 2), "varlen": (3, 2, 9)},
                **{"feature_seqlen": 16, "window_seqlen": 600, "host_seqlen": 1},
                **{"accuracy": (1, 2, 16), "accuracy_dtypes": ("fp32",), "decode": ((2, 64),)},
            )
        },
    )
    monkeypatch.setattr(command, "matmul_ceiling", lambda clock: ("a matrix product", 1.0))


@pytest.fixture
def bench():
    return Bench(CPU)


@pytest.mark.parametrize("mode", [mode for mode in grid.MODES if mode != "memory"])
def test_every_mode_runs(mode, tmp_path, capsys):
    path = tmp_path / "cpu.json"
    assert command.main(["--device", "cpu", "--mode", mode, "--out", str(path)]) == 0
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["meta"]["torch"] == torch.__version__
    rows = content["rows"]
    assert len(rows) == sum(map(len, grid.groups(mode, "cpu")))
    for row in rows:
        assert set(results.KEY) <= set(row)
        assert row["ours"] > 0 and math.isfinite(row["ours"])
        pass_ = "bwd" if row["mode"].endswith("bwd") else "fwd"
        assert row["kernel"].startswith(f"cpu_{pass_}_{row['dtype']}")
        assert row["sources"] == results.fingerprint(row["kernel"]) != ""
        assert all(value > 0 for value in results.peers_of(row).values())
    assert str(path) in capsys.readouterr().out


def test_a_second_run_replaces_its_rows_alone(tmp_path, capsys):
    path = tmp_path / "cpu.json"
    common = ["--device", "cpu", "--mode", "fwd", "--peers", "", "--out", str(path)]
    command.main([*common, "--seqlen", "16"])
    first = results.load(path)["rows"]
    command.main([*common, "--seqlen", "16,32", "--compare", str(path)])
    second = results.load(path)["rows"]
    assert len(second) == 2 * len(first)
    assert [results.row_key(row) for row in second[: len(first)]] == [
        results.row_key(row) for row in first
    ]
    assert capsys.readouterr().out.count(" -> ") == len(first)


def test_a_peer_that_fails_is_a_dash_with_its_reason(bench, monkeypatch, capsys):
    def fail(name, point, t):
        if name == "naive":
            raise RuntimeError("it broke\nin several lines")
        return lambda: t.q

    monkeypatch.setattr(peers, "peer", fail)
    (row,) = bench.measure([TINY])
    assert "sdpa_flash" in row and "naive" not in row
    header, line = report.table([row, row | {"naive": 1.0}])[:2]
    assert line[header.index("naive")] == report.ABSENT
    command.report_failures(bench.failures)
    assert (
        "naive at fwd d16 causal 32 b2 h2 fp32: RuntimeError: it broke" in capsys.readouterr().out
    )


def test_a_point_without_a_kernel_has_no_row(bench):
    assert bench.measure([Point("fwd", 300, "full", 8, 1, 1, 1, "fp32")]) == []
    (reason,) = bench.failures.values()
    assert "head_dim" in reason
    assert bench.measure([Point("memory_fwd", 16, "full", 8, 1, 1, 1, "fp32", "MiB")]) == []


def test_features_are_compared_with_the_call_without_them(bench):
    group = grid.groups("features", "cpu")[0]
    rows = bench.measure(group)
    assert [row["features"] for row in rows] == ["", "", *grid.FEATURES]
    assert "plain" not in rows[0]
    assert {row["plain"] for row in rows[1:]} == {rows[0]["ours"]}


def test_every_feature_reaches_the_call():
    """A mode of "softcap" that did not set it would measure nothing."""
    for name in (*grid.FEATURES, "window 8"):
        point = Point("fwd", 16, "full", 32, 1, 2, 2, "fp32", features=name)
        t = peers.make_tensors(point, CPU)
        plain = Point("fwd", 16, "full", 32, 1, 2, 2, "fp32")
        assert not torch.equal(peers.ours(point, t)(), peers.ours(plain, t)()), name


def test_peers_compute_the_same(bench):
    points = [g[0] for mode in ("fwd", "gqa") for g in grid.groups(mode, "cpu")]
    for point in (p for p in points if p.dtype == "fp32" and not p.backward):
        t = peers.make_tensors(point, CPU)
        for name in peers.peer_names(point, CPU):
            expected = peers.ours(point, t)()
            torch.testing.assert_close(peers.peer(name, point, t)(), expected, msg=name)


def test_operations_are_counted_as_the_anchors_count_them():
    shape = (128, "full", 1024, 2, 8, 8, "bf16")
    full = Point("fwd", *shape)
    assert full.flop() == 4 * 2 * 8 * 1024 * 1024 * 128
    assert Point("bwd", *shape).flop() == 2.5 * full.flop()
    causal = Point("fwd", 128, "causal", *shape[2:])
    assert causal.flop() == full.flop() / 2
    windowed = Point("fwd", 128, "causal", *shape[2:], features="window 1")
    assert windowed.flop() == 4 * 2 * 8 * 1024 * 128
    lengths = (3, 5)
    packed = Point("varlen_fwd", 64, "full", 5, 2, 1, 1, "bf16", lengths=lengths)
    assert packed.flop() == 4 * (9 + 25) * 64


def test_contestants_take_turns(bench):
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}
    assert set(bench.clock.medians(runs)) == {"a", "b"}
    turns = list(zip(calls[::2], calls[1::2], strict=True))[: timing.MIN_RUNS]
    assert set(turns) == {("a", "b"), ("b", "a")}  # nobody is always first


def test_ratio_and_comparison_know_which_way_is_better():
    row = {**TINY.row(), "ours": 2.0, "fa2": 1.0, "plain": 9.0, "naive": 5.0}
    assert report.ratio(row) == 2.0
    assert report.ratio(row | {"unit": "µs"}) == 0.5
    (faster,) = report.compare([row], [row | {"ours": 3.0}])
    assert "(1.50 x)" in faster
    host = row | {"unit": "µs"}
    (slower,) = report.compare([host], [host | {"ours": 4.0}])
    assert "(0.50 x)" in slower


def test_tables_of_the_terminal_need_no_rich(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    report.print_table([{**TINY.row(), "ours": 2.0, "fa2": 1.0}], "a title")
    text = capsys.readouterr().out
    assert "a title" in text and "2.00" in text


def test_figures_without_matplotlib_are_none(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.figures([{**TINY.row(), "ours": 2.0}], tmp_path, "cpu") == []
    assert "matplotlib" in capsys.readouterr().err


def test_figures(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{**TINY.row(), "seqlen": n, "ours": 2.0, "fa2": 1.0, "ceiling": 3.0} for n in (8, 16)]
    (path,) = report.figures(rows, tmp_path, "NVIDIA H200")
    assert path.name == "h200_fwd_fp32.png" and path.stat().st_size > 1000


def test_wrong_arguments_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--mode", "forward"])
    assert "'forward' is not one of fwd" in capsys.readouterr().err
    for arguments, message in (
        ("--peers fa3", "'fa3' is not one of fa2"),
        ("--mode fwd,host --head-dim 64", "--head-dim has no meaning for --mode host"),
        ("--mode varlen --seqlen 64", "--seqlen has no meaning for --mode varlen"),
        ("--mode varlen --figures x", "--figures draws --mode fwd and bwd alone"),
    ):
        with pytest.raises(SystemExit):
            command.main(arguments.split())
        assert message in capsys.readouterr().err
    path = tmp_path / "x.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="no result file"):
        results.load(path)


def test_results_go_beside_the_sources_or_else_under_the_working_directory(tmp_path):
    assert results.RESULTS == results.ROOT / "benchmarks" / "results"
    assert (results.ROOT / "csrc").is_dir()
    copy = tmp_path / "flash_ext" / "bench" / "results.py"
    copy.parent.mkdir(parents=True)
    copy.write_text(Path(results.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    assert runpy.run_path(str(copy))["RESULTS"] == Path("benchmarks", "results")
