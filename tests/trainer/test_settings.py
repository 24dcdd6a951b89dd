"""The settings of a run: defaults, laws, the schedule, and the way through TOML and back."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import parse
from narrowgauge.spec.toml import load_toml
from narrowgauge.trainer.settings import Settings, read_settings
from narrowgauge.trainer.tokens import load_tokenizer, write_tokens


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs and relative paths live in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(write_tokens(["text " * 5000], *load_tokenizer(None), tmp_path / "tokens"))


def test_defaults_are_a_run_that_can_start_with_the_first_free_number(
    data: str, elsewhere: Path
) -> None:
    settings = Settings(data=data).checked()
    assert settings.filled(MODELS["llama-1m"].num_parameters).lr == 3e-3
    assert settings.out == str(Path("runs") / "llama-1m-bfloat16-word-1")
    assert not any(elsewhere.iterdir()), "checking writes nothing"
    for number in (1, 3):
        (elsewhere / "runs" / f"llama-1m-bfloat16-word-{number}").mkdir(parents=True)
    assert Settings(data=data).checked().out == str(Path("runs") / "llama-1m-bfloat16-word-2")


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (9, 0), (10, 1), (400, 40), (1000, 100), (100_000, 100)]
)
def test_the_warm_up_follows_the_length(steps: int, warmup: int) -> None:
    settings = Settings(steps=steps, lr=1.0)
    rates = [settings.learning_rate(step) for step in range(1, steps + 1)]
    assert rates.index(max(rates)) == max(0, warmup - 1)


def test_the_schedule_at_known_steps() -> None:
    """Warm-up over 10 of 110 steps, then from 1 down to a tenth over 100."""
    settings = Settings(steps=110, lr=1.0, warmup_steps=10)
    rates = {1: 0.1, 5: 0.5, 10: 1.0, 35: 0.1 + 0.9 * (2 + math.sqrt(2)) / 4, 60: 0.55, 110: 0.1}
    assert {step: settings.learning_rate(step) for step in rates} == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize(
    ("named", "word"),
    [
        ({"steps": 0}, "steps = 0: it must be at least 1"),
        ({"steps": True}, "must be an integer"),
        ({"seed": 1 << 32}, "seed = 4294967296: it must be at least 0 and below"),
        ({"lr": math.nan}, "above 0"),
        ({"lr": math.inf}, "finite"),
        ({"lr": "0.1"}, "must be a number"),
        ({"max_grad_norm": 0.0}, "max_grad_norm = 0.0: it must be above 0"),
        ({"report_to": "mlflow"}, "must be one of none, tensorboard, wandb"),
        ({"batch_size": 8, "gradient_accumulation_steps": 3}, "8 sequences cannot be split into 3"),
        ({"warmup_steps": 11, "steps": 10}, "a warm-up of 11 steps is longer than the run of 10"),
        ({"out": ""}, "out is empty"),
        ({"recipe": "bfloat16/word"}, "must be a recipe"),
        ({"model": "./nowhere"}, "the model folder ./nowhere does not exist"),
        ({"model": "no-one/nothing"}, "hf download no-one/nothing"),
        ({"model": "."}, "holds no config.json"),
        ({}, "no data was named"),
        ({"data": "nowhere"}, "No tokens in nowhere: no tokens.npy is there"),
    ],
)
def test_impossible_settings_are_refused(named: dict[str, Any], word: str) -> None:
    with pytest.raises(NarrowgaugeError) as caught:
        Settings(**named).checked()
    assert word in str(caught.value) and "\n" not in str(caught.value)


def test_ranks_share_the_batch_unless_the_settings_say_how(data: str) -> None:
    settings = Settings(batch_size=6, data=data)
    assert [settings.checked(ranks).gradient_accumulation_steps for ranks in (1, 3)] == [1, 3]
    with pytest.raises(NarrowgaugeError, match="6 sequences cannot be split into 4"):
        settings.checked(4)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(model="llama-35m", lr=0.1 + 0.2, max_grad_norm=math.inf, stop_after=3),
        Settings(recipe=parse("float8-row/split"), out="some where/é"),
    ],
)
def test_the_way_through_toml_changes_nothing(settings: Settings, data: str) -> None:
    for each in (settings, dataclasses.replace(settings, data=data).checked()):
        assert Settings.from_dict(load_toml(tomli_w.dumps(each.to_dict()))) == each


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("batch-size = 8", "unknown key 'batch-size'. Did you mean 'batch_size'?"),
        ("steps = 0", "steps = 0: it must be at least 1"),
        ("steps = [", "Cannot read the settings file mine.toml"),
        ("recipe = 3", "mine.toml has recipe = 3"),
        ("steps = 5\n[config]\nsteps = 6", "unknown key 'config'"),
    ],
)
def test_wrong_settings_files_are_refused_in_one_line(
    text: str, word: str, elsewhere: Path
) -> None:
    (elsewhere / "mine.toml").write_text(text)
    with pytest.raises(NarrowgaugeError) as caught:
        read_settings("mine.toml")
    assert word in str(caught.value) and "\n" not in str(caught.value)
