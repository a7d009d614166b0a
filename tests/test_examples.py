"""The training examples: the model with each attention, what a run is made of, both commands."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import demo  # noqa: E402
import gpt  # noqa: E402
import train_gpt  # noqa: E402
import training  # noqa: E402

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
CPU = torch.device("cpu")
TINY = gpt.Config(vocab_size=256, context=48, num_layers=2, num_heads=2, head_dim=16)
TEXT = b"".join(b"line %d of a text\n" % i for i in range(2000))


def tokens_of(config, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, config.context)
    return [torch.randint(config.vocab_size, shape, generator=generator) for _ in range(2)]


def loss_and_gradients(name):
    torch.manual_seed(0)
    model = gpt.GPT(TINY, gpt.ATTENTIONS[name])
    loss = model.loss(*tokens_of(TINY))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


# sdpa_cudnn and the backward of flex do not exist on CPUs.
@pytest.mark.parametrize("name", ["sdpa", "sdpa_flash", "flash_ext"])
def test_every_attention_is_the_same_function(name):
    expected_loss, expected = loss_and_gradients("naive")
    loss, gradients = loss_and_gradients(name)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    for parameter, grad in gradients.items():
        torch.testing.assert_close(grad, expected[parameter], rtol=1e-4, atol=1e-6)


def test_a_row_does_not_see_what_follows_it():
    model = gpt.GPT(TINY, gpt.ATTENTIONS["flash_ext"])
    tokens, _ = tokens_of(TINY)
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 256
    with torch.no_grad():
        first, second = model(tokens), model(changed)
    assert torch.equal(first[:, :20], second[:, :20])
    assert not torch.equal(first[:, 20:], second[:, 20:])


def test_flops_are_those_that_torch_counts():
    """torch counts naive attention's whole square, of which a causal mask needs half."""
    model, batch = gpt.GPT(TINY, gpt.ATTENTIONS["naive"]), 3
    with FlopCounterMode(display=False) as counter:
        model.loss(*tokens_of(TINY, batch)).backward()
    weights = 6 * TINY.matmul_parameters
    whole = weights + 2 * (TINY.flops_per_token - weights)
    assert counter.get_total_flops() == batch * TINY.context * whole


def test_the_default_model_has_gpt2s_size():
    config = gpt.Config()
    with torch.device("meta"):
        model = gpt.GPT(config, gpt.ATTENTIONS["naive"])
    count = sum(p.numel() for p in model.parameters())
    assert 123e6 < count < 125e6
    assert 0 < count - config.matmul_parameters < 1e5  # the norms


def test_batches_repeat_and_never_touch_what_is_held_out():
    batches = training.Batches(TEXT, 32, CPU)
    first = list(itertools.islice(batches.train(4, seed=7), 3))
    second = list(itertools.islice(batches.train(4, seed=7), 3))
    other = next(batches.train(4, seed=8))
    assert torch.equal(torch.stack(sum(first, ())), torch.stack(sum(second, ())))
    assert not torch.equal(first[0][0], other[0])
    tokens, targets = first[0]
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert len(batches.training) + len(batches.held_out) == len(TEXT)
    assert bytes(batches.held_out.tolist()) == TEXT[len(batches.training) :]


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(
        ValueError, match="the text has 100 bytes; a context of 32 needs at least 6"
    ):
        training.Batches(TEXT[:100], 32, CPU)


def test_the_learning_rate_rises_and_falls():
    how = training.Schedule(steps=100, batch=1, learning_rate=1.0)
    rates = [how.rate(step) for step in range(100)]
    assert rates[4] == max(rates) == 1.0
    assert rates[:5] == sorted(rates[:5]) and rates[5:] == sorted(rates[5:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11


def test_training_learns_and_micro_batches_are_one_batch():
    """Two passes of two sequences are one pass of four: the same loss at every step."""
    losses = {}
    for batch, micro_batches in ((4, 1), (2, 2)):
        torch.manual_seed(0)
        model = gpt.GPT(TINY, gpt.ATTENTIONS["flash_ext"])
        how = training.Schedule(30, batch, micro_batches)
        batches = training.Batches(TEXT, TINY.context, CPU)
        whole = torch.Generator().manual_seed(0)
        pieces = [batches._pieces(batches.training, 4, whole) for _ in range(30)]

        def cut(_batch, _seed, size=batch, pieces=pieces):
            for tokens, targets in pieces:
                yield from zip(tokens.split(size), targets.split(size), strict=True)

        batches.train = cut
        memory = training.PeakMemory(CPU)
        losses[micro_batches] = training.train(model, batches, how, "test", memory).losses
    torch.testing.assert_close(losses[1], losses[2], rtol=1e-3, atol=0)
    assert losses[1][-1] < 0.7 * losses[1][0]


def test_want_of_memory_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as wanting:
        torch.empty(1 << 56, dtype=torch.uint8)
    assert training.out_of_memory(wanting.value)
    with pytest.raises(RuntimeError) as other:
        torch.ones(2) @ torch.ones(3)
    assert not training.out_of_memory(other.value)


# ---- the commands --------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.mark.slow
def test_the_demo_compares_and_draws(text, tmp_path, capsys):
    picture = tmp_path / "loss.png"
    options = ["--device", "cpu", "--text", text, "--picture", picture, "--context", 64]
    options += ["--steps", 6, "--layers", 1, "--heads", 1, "--batch", 2, "--length", 8]
    assert demo.main([str(option) for option in options]) == 0
    printed = capsys.readouterr().out
    assert "--- a sample\ndef " in printed
    for title in ("held-out loss", "tokens/s", "peak memory, MiB"):
        assert title in printed
    assert picture.exists() == HAS_MATPLOTLIB


def test_the_demo_fails_when_the_losses_differ(text, monkeypatch, capsys):
    def run_apart(function, which, *_):
        found = {"losses": [2.0, 1.0], "seconds": 1.0, "tokens_per_second": 1.0, "peak_bytes": 1}
        return found | {"loss": 1.02 if which == "flash_ext" else 1.0, "samples": []}

    monkeypatch.setattr(demo, "in_fresh_process", run_apart)
    monkeypatch.setattr(demo, "draw", lambda *_: None)
    assert demo.main(["--text", str(text), "--device", "cpu"]) == 1
    assert "differ by 2.00 %" in capsys.readouterr().out


@pytest.fixture
def in_this_process(monkeypatch):
    """The jobs run here, and without a limit on this process's memory."""
    called = []

    def run_here(function, *arguments):
        called.append(function.__name__)
        return ("a product", 1.0) if function is train_gpt.measure_ceiling else function(*arguments)

    monkeypatch.setattr(train_gpt, "in_fresh_process", run_here)
    monkeypatch.setattr(train_gpt, "limit_memory", lambda device: None)
    return called


def train_tiny(text, out, *more):
    options = ["--device", "cpu", "--text", text, "--out", out, "--contexts", "64", "--steps", 2]
    options += ["--layers", 1, "--heads", 1, "--batch", 1, *more]
    return train_gpt.main([str(option) for option in options])


def test_the_comparison_writes_a_row_a_variant_and_goes_on(text, tmp_path, in_this_process, capsys):
    out = tmp_path / "results" / "cpu.json"
    assert train_tiny(text, out, "--variants", "naive") == 0
    assert train_tiny(text, out, "--variants", "naive,flash_ext") == 0
    assert in_this_process.count("run") == 2, "the first variant was there already"
    rows = {row["variant"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["naive", "flash_ext"]
    assert rows["flash_ext"]["kernels"]["backward"]["kernel"].startswith("cpu_bwd_fp32_")
    for row in rows.values():
        assert len(row["losses"]) == 2 and row["tokens_per_second"] > 0
        assert row["final_loss"] == pytest.approx(rows["naive"]["final_loss"], rel=1e-4)
    assert out.with_suffix(".png").exists() == HAS_MATPLOTLIB
    assert train_tiny(text, out, "--variants", "naive", "--again") == 0
    assert in_this_process.count("run") == 3
    assert len(json.loads(out.read_text())["rows"]) == 2
    printed, page = capsys.readouterr().out, out.with_suffix(".md").read_text()
    for text in (printed, page):
        header = "| attention | final loss | tokens/s | TFLOP/s | MFU | peak MiB |"
        assert header in " ".join(text.split())
    assert "| naive " in page and "| flash_ext " in page
    assert ("(cpu.png)" in page) == HAS_MATPLOTLIB


def test_a_row_of_other_kernels_is_measured_anew(text, tmp_path, in_this_process):
    out = tmp_path / "cpu.json"
    for times in (1, 1, 2):
        assert train_tiny(text, out, "--variants", "flash_ext") == 0
        assert in_this_process.count("run") == times
        if times == 1 and in_this_process.count("measure_ceiling") == 2:
            content = json.loads(out.read_text())
            content["rows"][0]["kernels"]["forward"]["sources"] = "another fingerprint"
            out.write_text(json.dumps(content))


def test_a_variant_that_fails_is_a_row_and_is_tried_again(
    text, tmp_path, in_this_process, monkeypatch, capsys
):
    out = tmp_path / "cpu.json"
    failures = [RuntimeError("no such kernel"), torch.OutOfMemoryError("too much")]

    def failing(*_):
        raise failures.pop(0)

    monkeypatch.setitem(gpt.ATTENTIONS, "sdpa", failing)
    for reason in ("RuntimeError: no such kernel", "out of memory"):
        assert train_tiny(text, out, "--variants", "sdpa") == 1
        assert reason in capsys.readouterr().out
        (row,) = json.loads(out.read_text())["rows"]
        assert row["failed"] == reason
    assert train_tiny(text, out, "--variants", "sdpa") == 1  # memory does not grow by asking
    assert failures == []


def test_the_long_mode_has_a_sequence_a_step(text, tmp_path, in_this_process):
    out = tmp_path / "cpu.json"
    more = ("--long", "--variants", "flash_ext", "--micro-batches", 1)
    assert train_tiny(text, out, *more) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["batch"], row["micro_batches"], row["context"]) == (1, 1, 64)
    assert out.with_suffix(".long.png").exists() == HAS_MATPLOTLIB


def test_unknown_variants_are_refused(capsys):
    with pytest.raises(SystemExit):
        train_gpt.main(["--variants", "naive,fast"])
    assert "'fast' is not one of naive, sdpa, " in capsys.readouterr().err
