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
def test_lightning_training_learns(capfd: pytest.CaptureFixture[str]) -> None:
    losses, sizes = lines_of("lightning_training", capfd)[-2:]
    first, last = (float(losses.split()[k]) for k in (1, 4))
    assert last < 0.8 * first and float(sizes.split()[0]) < 8.5


@pytest.mark.frameworks
def test_accelerate_loop_learns_and_resumes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    first, last, resumed = lines_of("accelerate_loop", capfd)
    assert float(last.split()[1]) < 0.5 * float(first.split()[1])
    assert resumed == "resumed with the same bits: True"


@pytest.mark.frameworks
def test_peft_adapters_learn_over_every_base_and_merge(capfd: pytest.CaptureFixture[str]) -> None:
    *bases, merged = lines_of("peft_adapters", capfd)
    rows = [line.split() for line in bases]
    assert [row[0] for row in rows] == ["bfloat16", "int8-outlier-codes", "nvfp4"]
    assert all(float(row[4]) < float(row[2]) for row in rows)
    assert len({row[-2] for row in rows}) == 1
    sizes = [int(row[5].replace(",", "")) for row in rows]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 0.6 * sizes[0]
    assert merged == "merged: LlamaForCausalLM, 0 adapters left"


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("name", "last"),
    [("huggingface_trainer", "a run folder of 20 steps"), ("trl_sft", "28 adapters")],
)
def test_hugging_faces_trainers_run(
    name: str, last: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(name, capfd)
    assert lines[-1].startswith(last)
    assert name == "trl_sft" or "resumed at step 10: the same bits True" in lines
