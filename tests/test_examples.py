"""The examples run as they stand, and what they say in the end is true of what was asked."""

from __future__ import annotations

import ast
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from narrowgauge.runs.record import read_run
from trainer.fixtures import place as place  # a fixture
from trainer.tiny_runs import ENVIRONMENT

EXAMPLES = Path(__file__).parents[1] / "examples"
FIRST_MINUTE = (
    "--steps 3 --sequence-length 16 --batch-size 2 --eval-sequences 2 --seeds 2 --out here"
)


def lines_of(name: str, capfd: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Run an example as a script, and return what it prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *words])
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        except SystemExit as end:
            assert not end.code
    return capfd.readouterr().out.splitlines()


def test_recorded_loop_goes_on_where_it_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, again = (lines_of("recorded_loop", capfd, str(tmp_path / "mine")) for _ in range(2))
    run = read_run(tmp_path / "mine")
    assert first == again
    assert [row["step"] for row in run.steps] == list(range(1, 201)) and len(run.evals) == 4
    assert run.summary is not None and run.summary["val_loss"] < run.evals[0]["val_loss"]
    kinds = [event["what"] for event in run.events if event["what"] not in ("note", "unseen")]
    assert kinds == ["start", "finish", "resume", "finish"]


def test_fine_tune_prints_both_losses(
    place: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over a lazy dog and sleeps. " * 400)
    config = AutoConfig.from_pretrained(place / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(place / "tokens" / "tokenizer.json"))
    tokenizer.save_pretrained(tmp_path / "model")
    lines = lines_of("fine_tune", capfd, str(tmp_path / "model"), str(text), "3")
    assert [line.split(":")[0] for line in lines] == ["torch", "narrowgauge"]
    starts = {line.split()[1] for line in lines}
    assert len(starts) == 1 and all(float(line.split()[3]) < 20 for line in lines)


def test_own_rule_fits_its_promise_and_learns_alike_in_every_storage(
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = (EXAMPLES / "own_rule.py").read_text()
    rule = ast.parse(text[text.index("def scalars") : text.index("OPTIONS")])
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(rule)) <= 15
    lines = [line.split() for line in lines_of("own_rule", capfd)]
    losses = [float(line[-1]) for line in lines]
    sizes = [float(line[1]) for line in lines]
    assert max(losses) < 1.1 * losses[0] < 0.06 and sizes[0] == 20.0
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 8


def test_first_minute_compares_three_recipes_and_goes_on_with_what_was_stopped(
    place: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = f"{FIRST_MINUTE} --model {place / 'model'} --data {place / 'tokens'}".split()
    results = tmp_path / "here" / "compare.json"
    printed = lines_of("first_minute", capfd, *words)
    before = results.read_text()
    rows = json.loads(before)
    assert [row["recipe"] for row in rows] == ["bfloat16/master", "bfloat16/word", "bfloat16/naive"]
    assert all(row["num_seeds"] == 2 for row in rows)
    page = tmp_path / "here" / "report.html"
    assert Path(printed[-1]).resolve() == page
    assert all(row["recipe"] in page.read_text() for row in rows)
    lines_of("first_minute", capfd, *words)
    assert results.read_text() == before


def test_jamba_learns_with_float8_layers_and_experts(capfd: pytest.CaptureFixture[str]) -> None:
    layers, *steps = lines_of("jamba", capfd)
    losses = [float(line.split()[3]) for line in steps]
    assert layers.startswith("26 layers are narrow; wide: lm_head")
    assert len(losses) == 4 and losses[-1] < 0.5 * losses[0]


@pytest.mark.frameworks  # each night only: tests/equivalence has their law
def test_many_ranks_have_the_bits_of_one() -> None:
    printed = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
        words = [sys.executable, *launcher, str(EXAMPLES / "many_ranks.py")]
        environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.split()[2:])
    assert printed[0] == printed[1]


@pytest.mark.frameworks
def test_trl_learns_with_adapters(capfd: pytest.CaptureFixture[str]) -> None:
    losses, sizes = lines_of("trl_sft", capfd)[-2:]
    first, last = (float(losses.split()[k]) for k in (1, 3))
    assert last < first and sizes.startswith("28 adapters have states, 8.0 bytes")
