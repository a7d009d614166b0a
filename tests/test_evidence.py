"""tools/evidence.py: merging, fingerprints, tables between markers, the check. No GPU, no run."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "sm90_fwd_bf16_d128"


@pytest.fixture(scope="module")
def evidence():
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "tools" / "evidence.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def row(evidence):
    return {
        **{"mode": "fwd", "head_dim": 128, "mask": "causal", "seqlen": 4096, "batch": 4},
        **{"heads_q": 16, "heads_k": 16, "unit": "TFLOP/s", "dtype": "bf16", "head_dim_v": 128},
        **{"features": "", "ours": 400.0, "fa2": 300.0, "cudnn": 500.0, "ceiling": 800.0},
        **{"kernel": KERNEL, "sources": evidence.results.fingerprint(KERNEL)},
        "date": "2026-01-02",
    }


@pytest.fixture
def folder(row, tmp_path):
    """A folder of result files: one of a GPU."""
    content = {
        "meta": {"device": "NVIDIA H200", "torch": "2.11", "cuda": "13.0", "driver": "580.1"},
        "tests": {"passed": 3, "failed": 0, "skipped": {"gpu: one": 2}, "date": "2026-01-02"},
        "rows": [row],
    }
    (tmp_path / "h200.json").write_text(json.dumps(content))
    return tmp_path


@pytest.fixture
def pages(evidence, monkeypatch, tmp_path):
    """Stand-ins for README.md and docs/performance.md."""
    for name in ("README", "PAGE"):
        path = tmp_path / f"{name}.md"
        path.write_text(f"before\n{evidence.BEGIN}\nold\n{evidence.END}\nafter\n")
        monkeypatch.setattr(evidence, name, path)
    return evidence.README, evidence.PAGE


def test_rows_are_merged_by_key(evidence, row, tmp_path):
    path = tmp_path / "results" / "x.json"
    other = row | {"seqlen": 1024}
    evidence.results.merge_into(path, {"meta": {"device": "a"}, "rows": [row, other]})
    whole = evidence.results.merge_into(path, {"meta": {"torch": "b"}, "rows": [row | {"ours": 1}]})
    assert [r["ours"] for r in whole["rows"]] == [1, 400.0]
    assert whole == evidence.results.load(path)
    assert whole["meta"] == {"device": "a", "torch": "b"}
    assert evidence.results.peers_of(row) == {"fa2": 300.0, "cudnn": 500.0}


def test_tests_outlive_a_run_of_the_bench_alone(evidence, row, tmp_path):
    path = tmp_path / "x.json"
    evidence.results.merge_into(path, {"tests": {"passed": 1}, "rows": []})
    assert evidence.results.merge_into(path, {"rows": [row]})["tests"] == {"passed": 1}


@pytest.mark.parametrize(
    "name, slug",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA", "unknown"),
    ],
)
def test_names_of_result_files(evidence, name, slug):
    assert evidence.results.device_slug(name) == slug


# ---- fingerprints --------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    """A unit that includes a chain of files by quotes and by angle brackets."""
    files = {
        "cuda/tile/fwd.cuh": '#include "../../common/mask.h"\n#include <config.h>\n#include <map>',
        "cuda/tile/config.h": "rows 64\n",
        "common/mask.h": '#pragma once\n#  include "number.h"\n',
        "common/number.h": "number\n",
        "common/unrelated.h": "unrelated\n",
    }
    for name, text in files.items():
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "csrc"


UNIT = '#include "cuda/tile/fwd.cuh"\nlaunch\n'


def test_includes_are_followed(evidence, tree):
    names = [path.relative_to(tree).as_posix() for path in evidence.results.closure(UNIT, tree)]
    expected = ["common/mask.h", "common/number.h", "cuda/tile/config.h", "cuda/tile/fwd.cuh"]
    assert names == expected


def test_a_fingerprint_changes_with_what_the_kernel_is_made_of(evidence, tree):
    before = evidence.results.hash_of(UNIT, tree)
    (tree / "common" / "unrelated.h").write_text("other\n")
    assert evidence.results.hash_of(UNIT, tree) == before
    seen = {before, evidence.results.hash_of(UNIT + "other entry", tree)}
    for name in ("common/number.h", "cuda/tile/config.h", "cuda/tile/fwd.cuh"):
        (tree / name).write_text((tree / name).read_text() + "// changed\n")
        seen.add(evidence.results.hash_of(UNIT, tree))
    assert len(seen) == 5


def test_kernels_of_the_manifest_have_fingerprints(evidence):
    fingerprint = evidence.results.fingerprint
    names = (KERNEL, "sm90_fwd_bf16_d64", "sm80_fwd_bf16_d128", "cpu_fwd_fp32_avx2")
    found = [fingerprint(name) for name in names]
    assert all(len(x) == 16 for x in found) and len(set(found)) == len(found)
    assert fingerprint("no_such_kernel") == ""
    files = evidence.results.closure('#include "cuda/tile/fwd.cuh"\n', ROOT / "csrc")
    names = {path.relative_to(ROOT / "csrc").as_posix() for path in files}
    assert {"cuda/tile/config.h", "cuda/tile/fragment.h", "common/score.h", "params.h"} <= names
    assert not any(name.startswith(("cpu/", "hip/")) for name in names)


# ---- tables --------------------------------------------------------------------------------------


def test_tables_between_markers(evidence, folder, pages):
    fresh = evidence.fresh_pages(folder)
    assert set(fresh) == set(pages)
    for text in fresh.values():
        assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
        assert "NVIDIA H200, torch 2.11, CUDA 13.0, driver 580.1" in text
        assert "3 passed, 0 failed, 2 skipped" in text
        assert "| 128 | causal | 4096 | 4 | 16 | bf16 | 400 | 300 | 500 | 0.80 | 50 |" in text
    for path, text in fresh.items():
        path.write_text(text)
    assert evidence.fresh_pages(folder) == fresh
    assert evidence.warnings(folder) == []


def test_a_page_without_markers_is_refused(evidence):
    for text in ("", evidence.BEGIN, f"{evidence.END}{evidence.BEGIN}"):
        with pytest.raises(ValueError, match=r"page\.md must hold one"):
            evidence.with_tables(text, "", "page.md")


def test_no_results_are_said_to_be_none(evidence, tmp_path, pages):
    assert all("has been measured" in text for text in evidence.fresh_pages(tmp_path).values())


def test_the_check_warns_and_passes(evidence, folder, pages, row, capsys):
    assert any("tables differ" in line for line in evidence.warnings(folder))
    evidence.results.merge_into(folder / "h200.json", {"rows": [row | {"sources": "of old"}]})
    assert evidence.check(folder) == 0
    assert f"h200: 1 rows (fwd) of {KERNEL} are older" in capsys.readouterr().out


def test_the_check_imports_no_torch():
    script = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['evidence.py', '--check'];"
        f"runpy.run_path({str(ROOT / 'tools' / 'evidence.py')!r}, run_name='__main__')"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert process.returncode == 0, process.stderr


def test_the_pages_have_markers(evidence):
    for path in (evidence.README, evidence.PAGE):
        evidence.with_tables(path.read_text(encoding="utf-8"), "", path.name)


def test_summary_of_pytest_s_report(evidence, tmp_path):
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.gpu.test_a" name="one"/>'
        '<testcase classname="tests.gpu.test_a" name="two"><failure message="x">y</failure>'
        '</testcase><testcase classname="a" name="three"><skipped message="gpu: no"/></testcase>'
        "</testsuite></testsuites>"
    )
    found = evidence.summary(report)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, {"gpu: no": 1})
    assert found["failures"] == ["test_a::two"]


@pytest.mark.parametrize(
    "code, case, good",
    [(0, "", True), (1, "", False), (0, "<skipped/>", False), (0, None, False)],
    ids=["passed", "return_code", "none_passed", "no_report"],
)
def test_a_run_fails_with_its_tests(evidence, monkeypatch, tmp_path, code, case, good):
    def pytest_run(command, **_):
        (option,) = [x for x in command if x.startswith("--junitxml=")]
        if case is not None:
            report = f'<testsuite><testcase name="a">{case}</testcase></testsuite>'
            Path(option.split("=", 1)[1]).write_text(report)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(evidence.subprocess, "run", pytest_run)
    monkeypatch.setattr(evidence, "device_of", lambda kind: ("h200.json", {"device": "H200"}))
    status = evidence.main(["run", "--only", "tests", "--out", str(tmp_path)])
    assert (status == 0) == good


def test_a_cpu_runs_the_bench_alone(evidence, monkeypatch, tmp_path, capsys):
    commands = []

    def bench_run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(evidence.subprocess, "run", bench_run)
    monkeypatch.setattr(evidence, "device_of", lambda kind: ("cpu.json", {}))
    assert evidence.main(["run", "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert ["flash_ext.bench" in command for command in commands] == [True]
    with pytest.raises(SystemExit):
        evidence.main(["run", "--device", "cpu", "--only", "tests"])
    assert "leave out --only tests" in capsys.readouterr().err
