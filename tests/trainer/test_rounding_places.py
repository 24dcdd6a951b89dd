"""A step computed again has the bits of the run, and the place of rounding that costs most is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.trainer import loop
from narrowgauge.trainer import rounding_places as module
from narrowgauge.trainer.rounding_places import rounding_places
from narrowgauge.trainer.session import Session
from trainer.tiny_runs import call, settings

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT: dict[str, Any] = {"steps": 3, "eval_every": 0, "checkpoint_every": 2, "keep_checkpoints": 9}


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "casts of operands": ("float8-tensor/split", {}, "inputs weights output-gradients"),
    "a sum of micro-batches": (
        "float32/split", {"batch_size": 16, "gradient_accumulation_steps": 16, "accumulation_dtype": "bfloat16"}, "accumulation",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_most_costly_place_is_named(case: str, place: Path, tmp_path: Path) -> None:
    recipe, changes, names = CASES[case]
    places = rounding_places(
        loop.train(settings(place, tmp_path / "run", recipe=recipe, **SHORT, **changes)), 3
    )
    assert not places.mismatch and places.started == 2
    rows = {row["name"]: row for row in places.rows}
    assert max(places.rows, key=lambda row: row["share"] or 0.0)["name"] in names.split(), str(
        places
    )
    assert rows["all"]["gradient"] == pytest.approx(rows["run"]["gradient"], rel=0.4), str(places)
    assert 0.7 < sum(row["share"] or 0.0 for row in places.rows) < 1.4, str(places)


def test_a_step_in_float32_differs_by_nothing_and_another_model_from_the_record(
    place: Path, tmp_path: Path
) -> None:
    folder = loop.train(settings(place, tmp_path / "run", recipe="float32/float32", **SHORT))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    plain, true_build = rounding_places(folder, 3), module.build

    def build(*arguments: Any) -> Session:
        session = true_build(*arguments)
        module = session.model.get_submodule("model.layers.1.mlp.down_proj")
        module.register_forward_pre_hook(
            lambda _, args: args[0].to(torch.float8_e4m3fn).to(args[0].dtype)
        )
        return session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "build", build)
        struck = rounding_places(folder, 3)
    assert not plain.mismatch and all(row["gradient"] < 1e-5 for row in plain.rows), str(plain)
    assert struck.mismatch, str(struck)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    for step in (0, 4):
        with pytest.raises(NarrowgaugeError, match="steps 1 to 3"):
            rounding_places(folder, step)
    result = call("diagnose", str(folder), "--replay", "3", "--json")
    assert json.loads(result.stdout)["replay"]["mismatch"] == "", result.output


def test_the_operation_that_made_the_first_infinity_of_a_step_is_named(
    place: Path, tmp_path: Path
) -> None:
    folder = loop.train(
        settings(
            place, tmp_path / "run", recipe="float32/float32", lr=1e25, warmup_steps=0, **SHORT
        )
    )
    assert rounding_places(folder, 1).bad_value == ""
    bad = rounding_places(folder, 2)
    assert "model." in bad.bad_value and bad.bad_value in str(bad), str(bad)
