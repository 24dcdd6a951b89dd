"""Two sets of weights: values that differ, tensors that stayed, and everything that a table of
weights must not hide.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.checks.moved import moved
from narrowgauge.cli.main import main
from narrowgauge.errors import RecordError

Weights = dict[str, Tensor]


def weights() -> Weights:
    torch.manual_seed(0)
    names = [
        f"layers.{number}.{part}"
        for number in range(2)
        for part in ("norm.weight", "proj.weight", "proj.bias")
    ]
    return {
        n: torch.ones(4) if "norm" in n else torch.randn(4, 4) if "weight" in n else torch.zeros(4)
        for n in names
    }


def trained() -> Weights:
    return {name: value + 0.5 for name, value in weights().items()}


def changed(**values: Tensor | None) -> Weights:
    after = {
        **trained(),
        **{f"layers.1.{key.replace('_', '.')}": value for key, value in values.items()},
    }
    return {name: value for name, value in after.items() if value is not None}


CASES: dict[str, tuple[Weights, str, str, bool]] = {
    "trained": (trained(), "", "", True),
    "not trained": (weights(), "never-moved", "layers.0.norm.weight and 5 others", False),
    "one frozen": (changed(proj_weight=weights()["layers.1.proj.weight"]), "never-moved", "layers.1.proj.weight", True),
    "a norm at one": (changed(norm_weight=torch.ones(4)), "never-moved", "layers.1.norm.weight", False),
    "a matrix of ones": (changed(proj_weight=torch.ones(4, 4)), "", "", True),
    "a NaN": (changed(proj_bias=torch.tensor([0.0, math.nan, 1, 1])), "nonfinite", "layers.1.proj.bias", False),
    "a tensor less": (changed(proj_bias=None), "one-sided-tensors", "layers.1.proj.bias", False),
    "a tensor more": (changed(lora_A=torch.ones(4)), "one-sided-tensors", "layers.1.lora.A", False),
    "another shape": (changed(proj_weight=torch.randn(2, 8)), "one-sided-tensors", "layers.1.proj.weight", False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_moved_and_what_did_not_is_read(case: str) -> None:
    after, kind, tensor, is_ok = CASES[case]
    result = moved(weights(), after)
    readings = {reading.what: reading.tensor for reading in result}
    assert (readings.get(kind, "") == tensor) and result.ok == is_ok and (kind or not readings), (
        str(result)
    )
    assert json.dumps(result.to_dict()) and {row["name"] for row in result.rows} <= set(weights())


def test_rows_hold_exact_counts_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.arange(100.0)
    after = torch.arange(100.0)
    after[[3, 98]] = 7.0
    after[50] = math.nan
    before[50] = math.nan
    for size in (1 << 17, 7):
        monkeypatch.setattr("narrowgauge.checks.fit.CHUNK", size)
        (row,) = moved({"a": before}, {"a": after}).rows
        assert (row["differ"], row["nonfinite"], row["values"], row["constant"]) == (
            2,
            1,
            100,
            None,
        )
        (row,) = moved({"a": torch.full((50,), 2.0)}, {"a": torch.full((50,), 3.0)}).rows
        assert (row["constant"], row["change"]) == (3.0, pytest.approx(0.5))
    assert before.isnan().sum() == after.isnan().sum() == 1, "nothing is written"


def test_values_in_another_format_are_rounded_to_it_first() -> None:
    before = {"a": torch.randn(64, 64)}
    assert [r.what for r in moved(before, {"a": before["a"].bfloat16()})] == ["never-moved"]
    (row,) = moved({"a": before["a"].bfloat16()}, before).rows
    assert row["differ"] > 0 and row["dtype"] == "bfloat16 → float32"
    for dtype in (torch.float8_e4m3fn, torch.float16, torch.int8, torch.uint8, torch.bool):
        assert [
            r.what
            for r in moved({"a": torch.ones(4, 4).to(dtype)}, {"a": torch.zeros(4, 4).to(dtype)})
        ] == []


def test_folders_shards_modules_and_wrappers_name_the_same_tensors(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

    model = Model()
    folder = tmp_path / "one"
    sharded = tmp_path / "shards"
    folder.mkdir(), sharded.mkdir()
    stored = {"embed.weight": model.embed.weight.detach() - 1, "mask": torch.ones(3)}
    save_file(stored, folder / "model.safetensors")
    places: dict[str, Any] = {
        name: f"part-{number}.safetensors" for number, name in enumerate(stored)
    }
    for name, file in places.items():
        save_file({name: stored[name]}, sharded / file)
    save_file({"stale": torch.ones(1)}, sharded / "stale.safetensors")
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert [r.what for r in moved(folder, sharded)] == ["never-moved"]
    assert moved(folder / "model.safetensors", sharded).rows == moved(folder, stored).rows
    model.register_buffer("mask", torch.zeros(3))
    assert moved(sharded, nn.DataParallel(model)).ok and moved(sharded, torch.compile(model)).ok


def test_the_command_prints_the_table_or_json_and_refuses_what_holds_no_weights(
    tmp_path: Path,
) -> None:
    for name, tensors in {"base": weights(), "last": trained()}.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    words = ["moved", str(tmp_path / "base.safetensors"), str(tmp_path / "last.safetensors")]
    printed, as_json = (
        CliRunner().invoke(main, [*words, *flag]).output for flag in ([], ["--json"])
    )
    assert "100.00% of 48 values in 6 tensors differ" in printed and "proj.bias" in printed
    assert json.loads(as_json)["ok"] and len(json.loads(as_json)["rows"]) == 6
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"no weights")
    (tmp_path / "parts").mkdir()
    for rank in range(2):
        save_file({"a": torch.ones(2)}, tmp_path / "parts" / f"{rank}.safetensors")
    for path in ("empty", "absent", "broken.safetensors", "parts"):
        with pytest.raises(RecordError, match="Cannot read weights"):
            ng.moved(weights(), tmp_path / path)
