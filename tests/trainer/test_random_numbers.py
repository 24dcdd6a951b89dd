"""A model that draws random numbers: a resumed run is the uninterrupted one, and an evaluation is of no random numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgauge.runs.record import read_run
from narrowgauge.trainer import loop
from trainer.tiny_runs import assert_same_run, settings

pytestmark = pytest.mark.usefixtures("one_thread")

JITTERING = {
    "model_type": "phimoe", "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 4,
    "router_jitter_noise": 0.5, "input_jitter_noise": 0.5,
}  # fmt: skip


@pytest.fixture
def jittering(place: Path, tmp_path: Path) -> Path:
    """A model whose router and expert inputs are jittered in training mode."""
    folder = tmp_path / "jittering"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(JITTERING))
    return folder


def test_a_resumed_run_of_a_model_with_jitter_is_the_uninterrupted_one(
    jittering: Path, place: Path, tmp_path: Path
) -> None:
    changes = {"model": str(jittering), "gradient_accumulation_steps": 2}
    whole = read_run(loop.train(settings(place, tmp_path / "whole", **changes)))
    torch.rand(3), random.random(), np.random.rand()
    folder = loop.train(settings(place, tmp_path / "stopped", **changes, stop_after=5))
    torch.rand(7)
    loop.resume(folder)
    assert_same_run(read_run(folder), whole)
