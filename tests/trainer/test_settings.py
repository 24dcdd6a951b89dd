"""The settings of a run: defaults, laws, the schedule, and the way through TOML and back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import tomli_w

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.spec.toml import load_toml
from narrowgauge.trainer.settings import Settings
from narrowgauge.trainer.tokens import load_tokenizer, write_tokens


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs and relative paths live in an empty folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(write_tokens(["text " * 5000], load_tokenizer(None), tmp_path / "tokens"))


def test_defaults_are_a_run_that_can_start_and_checking_writes_nothing(
    data: str, elsewhere: Path
) -> None:
    settings = Settings(data=data, recipe="bf16/word").checked()
    assert settings.out == "runs/llama-1m-bfloat16-word"
    assert not any(elsewhere.iterdir())
    assert Settings(**load_toml(tomli_w.dumps(vars(settings)))) == settings
    with pytest.raises(NarrowgaugeError, match="8 sequences into 1 micro-batches for 2 ranks"):
        settings.checked(2)


def test_the_schedule_at_known_steps() -> None:
    """Warm-up over a tenth of the steps, at most 100; then from 1 down to a tenth."""
    settings = Settings(steps=110, lr=1.0, warmup_steps=10)
    rates = {1: 0.1, 5: 0.5, 10: 1.0, 35: 0.1 + 0.9 * (2 + math.sqrt(2)) / 4, 60: 0.55, 110: 0.1}
    assert {step: settings.learning_rate(step) for step in rates} == pytest.approx(rates, rel=1e-12)
    for steps, peak in ((1, 1), (9, 1), (10, 1), (400, 40), (100_000, 100)):
        settings = Settings(steps=steps, lr=1.0)
        assert max(range(1, steps + 1), key=settings.learning_rate) == peak
