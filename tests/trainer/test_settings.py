"""The settings of a run: its default folder and its schedule."""

import math

import pytest

from narrowgauge.trainer.settings import Settings


def test_the_schedule_at_known_steps():
    """Warm-up over a tenth of the steps, at most 100; then from 1 down to a tenth."""
    settings = Settings(steps=110, lr=1.0, warmup_steps=10, recipe="bf16/word")
    assert str(settings.folder) == "runs/llama-1m-bfloat16-word"
    rates = {1: 0.1, 5: 0.5, 10: 1.0, 35: 0.1 + 0.9 * (2 + math.sqrt(2)) / 4, 60: 0.55, 110: 0.1}
    assert {step: settings.learning_rate(step) for step in rates} == pytest.approx(rates, rel=1e-12)
    for steps, peak in ((1, 1), (9, 1), (10, 1), (400, 40), (100_000, 100)):
        settings = Settings(steps=steps, lr=1.0)
        assert max(range(1, steps + 1), key=settings.learning_rate) == peak
