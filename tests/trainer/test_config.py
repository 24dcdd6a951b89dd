"""The settings of a run: defaults, laws, rules, the schedule, and the way through TOML and back."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES
from narrowgauge.spec.toml import load_toml
from narrowgauge.trainer import config as config_module
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.tokens import Document, load_tokenizer, write_tokens


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs and relative paths live in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(write_tokens([Document("a", "text")], *load_tokenizer(None), tmp_path / "tokens"))


def test_defaults_are_a_run_that_can_start(data: str, elsewhere: Path) -> None:
    config = TrainConfig(data=data).validated()
    filled = config.filled()
    assert (filled.lr, filled.warmup_steps) == (3e-3, None)
    assert config.out == str(Path("runs") / "llama-1m-bfloat16-word-1")
    assert not any(elsewhere.iterdir()), "checking writes nothing"


def test_the_learning_rate_follows_the_size() -> None:
    for model, rate in (("llama-1m", 3e-3), ("llama-1b", 3e-4)):
        assert TrainConfig(model=model).filled().lr == rate
        assert TrainConfig(model="some/folder").filled(MODELS[model].num_parameters).lr == rate


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (9, 0), (10, 1), (400, 40), (1000, 100), (100_000, 100)]
)
def test_the_warm_up_follows_the_length(steps: int, warmup: int) -> None:
    """It is derived at each step, and not stored as if it had been typed."""
    config = TrainConfig(steps=steps).filled()
    rates = [config.learning_rate(step) for step in range(1, steps + 1)]
    assert rates.index(max(rates)) == max(0, warmup - 1) and config.warmup_steps is None


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        # Warm-up over 10 of 110 steps, then from 1 down to a tenth over 100.
        ("linear", {1: 0.1, 5: 0.5, 10: 1.0, 35: 0.775, 60: 0.55, 110: 0.1}),
        (
            "cosine",
            {1: 0.1, 5: 0.5, 10: 1.0, 35: 0.1 + 0.9 * (2 + math.sqrt(2)) / 4, 60: 0.55, 110: 0.1},
        ),
        ("constant", {1: 0.1, 5: 0.5, 10: 1.0, 11: 1.0, 60: 1.0, 110: 1.0}),
    ],
)
def test_the_schedule_at_known_steps(schedule: str, rates: dict[int, float]) -> None:
    config = TrainConfig(steps=110, lr=1.0, warmup_steps=10, schedule=schedule)
    assert {step: config.learning_rate(step) for step in rates} == pytest.approx(rates, rel=1e-12)


INVENTED = Recipe(dataclasses.replace(COMPUTES["float8-row"], keep=()), STORAGES["word"])


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"steps": 0}, "steps = 0: it must be at least 1"),
        ({"steps": True}, "must be an integer"),
        ({"seed": -1}, "seed = -1: it must be at least 0"),
        ({"seed": 1 << 64}, "seed = 18446744073709551616: it must be at least 0 and below"),
        ({"lr": math.nan}, "above 0"),
        ({"lr": math.inf}, "finite"),
        ({"lr": "0.1"}, "must be a number"),
        ({"beta1": 1.0}, "below 1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm = 0.0: it must be above 0"),
        ({"min_lr_ratio": 1.5}, "at least 0 and below 1"),
        ({"schedule": "cosin"}, "must be one of cosine, linear, constant"),
        (
            {"batch_size": 8, "gradient_accumulation_steps": 3},
            "a batch of 8 sequences cannot be split into 3",
        ),
        ({"warmup_steps": 11, "steps": 10}, "a warm-up of 11 steps is longer than the run of 10"),
        ({"out": ""}, "out is empty"),
        ({"recipe": "bfloat16/word"}, "must be a recipe"),
        ({"recipe": INVENTED}, "differs from the table's of that name"),
        ({"model": "./nowhere"}, "the model folder ./nowhere does not exist"),
        ({"model": "."}, "holds no config.json"),
        ({"batch_size": (1 << 63) - 1}, "batch_size = 9223372036854775807"),
        ({}, "no data was named"),
        ({"data": "nowhere"}, "Cannot use the token map nowhere: no tokens.json is there"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(NarrowgaugeError) as caught:
        TrainConfig(**settings).validated()
    assert word in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings", [{"max_grad_norm": math.inf}, {"eps": 0.0}, {"weight_decay": 0}, {"lr": 1}]
)
def test_settings_at_the_edge_are_taken(settings: dict[str, Any], data: str) -> None:
    taken = TrainConfig(**settings, data=data).validated()
    assert all(getattr(taken, name) == value for name, value in settings.items())


def test_a_new_run_takes_the_first_free_number(elsewhere: Path, data: str) -> None:
    (elsewhere / "runs" / "llama-1m-bfloat16-word-1").mkdir(parents=True)
    (elsewhere / "runs" / "llama-1m-bfloat16-word-3").mkdir()
    assert TrainConfig(data=data).validated().out == str(Path("runs") / "llama-1m-bfloat16-word-2")


OVERRIDDEN = {
    "recipe": "bfloat16/word",
    "name": "mine",
    "override": [{"pattern": "lm_head", "compute": "mxfp8"}],
}


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(
            model="llama-35m",
            lr=0.1 + 0.2,
            eps=1e-300,
            max_grad_norm=math.inf,
            stop_after=3,
        ),
        TrainConfig(recipe=parse(OVERRIDDEN), out="some where/é"),
    ],
)
def test_the_way_through_toml_changes_nothing(config: TrainConfig, data: str) -> None:
    for settings in (config, dataclasses.replace(config, data=data).validated()):
        assert TrainConfig.from_dict(load_toml(tomli_w.dumps(settings.to_dict()))) == settings


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("batch-size = 8", "unknown key 'batch-size'. Did you mean 'batch_size'?"),
        ("steps = 0", "steps = 0: it must be at least 1"),
        ("steps = [", "Cannot read the settings file mine.toml"),
        ('recipe = "none.toml"', "none.toml: No such file or directory"),
        ("recipe = 3", "mine.toml has recipe = 3"),
        ("steps = 5\n[config]\nsteps = 6", "unknown key 'config'"),
    ],
)
def test_wrong_settings_files_are_refused_in_one_line(
    text: str, word: str, elsewhere: Path
) -> None:
    (elsewhere / "mine.toml").write_text(text)
    with pytest.raises(NarrowgaugeError) as caught:
        config_module.read_settings("mine.toml")
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
