"""Trainings whose matmuls are narrow: every row runs from the command line's own door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from narrowgauge.runs.record import read_run
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer import loop, session
from narrowgauge.trainer.export import export
from trainer.tiny_runs import settings

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice"),
]

OVERRIDDEN = {"recipe": "float8-row/word", "override": [{"pattern": "*.down_proj", "compute": "int8-row"}]}


def trained(place: Path, out: Path, **changes: Any) -> Any:
    return read_run(loop.train(settings(place, out, **changes)))


def made(place: Path, folder: Path, recipe: str | Recipe) -> session.Session:
    config = settings(place, folder, recipe=recipe, steps=4).validated()
    return session.build(config, folder, session.prepare_tokens(config))


def test_overrides_choose_the_row_of_each_layer(place: Path, tmp_path: Path) -> None:
    run = made(place, tmp_path / "run", parse(OVERRIDDEN))
    assert run.linears is not None
    rows = {name: layer.compute.name for name, layer in run.linears.layers.items()}
    assert {row for name, row in rows.items() if name.endswith("down_proj")} == {"int8-row"}
    assert {row for name, row in rows.items() if not name.endswith(("down_proj", "lm_head"))} == {"float8-row"}
    assert rows.get("lm_head", "bfloat16") == "bfloat16"  # the row's own `keep`


def test_what_a_delayed_scale_cuts_off_is_counted(place: Path, tmp_path: Path) -> None:
    run = trained(place, tmp_path / "run", recipe="float8-delayed/word")
    counts = [row["saturated"] for row in run.steps]
    assert counts[0] == 0 and sum(counts) > 0  # the first step's scales are its own
    assert "saturated" not in trained(place, tmp_path / "other", recipe="float8-tensor/word", steps=2).steps[0]


def test_a_unit_scaled_run_exports_a_plain_model_that_says_the_same(place: Path, tmp_path: Path) -> None:
    folder = loop.train(settings(place, tmp_path / "run", recipe="unit/word", steps=4))
    run = session.load(folder)
    plain = AutoModelForCausalLM.from_pretrained(export(folder, tmp_path / "out"))
    tokens = torch.arange(16)[None]  # as many as in training: attention's constant is that of this length
    for layer in run.linears.layers.values():  # type: ignore[union-attr]
        layer.set_compute(COMPUTES["float32"])
    with torch.no_grad():
        said, exported = run.model(input_ids=tokens).logits.float(), plain.float()(input_ids=tokens).logits
    assert said.std() > 0.05 and (said - exported).std() < 0.02 * said.std()
