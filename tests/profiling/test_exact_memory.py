"""``plan --exact``: what a layer keeps is counted, replaces the formula in the plan, and what cannot be counted is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from narrowgauge.cli.main import main
from narrowgauge.errors import DataError
from narrowgauge.planner.memory.activations import COUNTED, LayerCount
from narrowgauge.planner.plan import plan
from narrowgauge.profiling.exact_memory import LayerCounts, require_counted
from narrowgauge.spec.notation import parse

_ASKED = ("plan", "run", "--model", "llama-1m", "--chip", "H100-SXM", "--sequence-length", "128", "--recipe")


@pytest.mark.parametrize("recipe", ["bfloat16/word", "float8-row/word", "bfloat16/float32"])
def test_a_layer_keeps_what_the_formula_says(recipe: str) -> None:
    counts = LayerCounts("llama-1m")
    counts(parse(recipe), 128)
    (row,) = counts.rows()
    assert row["bytes_per_token"] == pytest.approx(row["formula_bytes_per_token"], rel=0.03)
    # Autocast keeps casts of the weights, whatever the number of tokens.
    assert row["bytes_per_layer"] == pytest.approx(row["formula_bytes_per_layer"], rel=0.01, abs=64)
    assert (row["bytes_per_layer"] > 1e5) == recipe.endswith("float32")


def test_recipes_of_equal_tensors_are_counted_once() -> None:
    counts = LayerCounts("llama-1m")
    assert counts(parse("bfloat16/word"), 64) is counts(parse("bfloat16/master"), 64)
    assert len(counts.rows()) == 1 and "bfloat16 over bfloat16 weights 5,656 (formula 5,656)" in counts.sentence()


def test_what_is_counted_is_what_the_plan_adds_up_and_decides_by() -> None:
    """Layers that keep a thousand times as much, and layers that keep next to nothing."""
    given = {"recipes": ["bfloat16/word"], "chip": "H100-SXM", "chips": 8}
    usual = plan("llama-8b", **given).best  # type: ignore[arg-type]
    assert not usual.is_counted and usual.row()["activations_from"] == "formula"
    fewest = plan("llama-8b", **given, counted=lambda recipe, length: LayerCount(1.0, 0.0)).best  # type: ignore[arg-type]
    assert fewest.is_counted and fewest.row()["activations_from"] == "count"
    kept = sum(term.value for term in fewest.memory if term.source == COUNTED)
    tokens = fewest.layout.micro_batch * fewest.sequence_length
    assert kept == 32 * tokens and fewest.layout.micro_batch > usual.layout.micro_batch
    pinned = {"recompute": "none", "tensor": 1}
    most = plan("llama-8b", **given, counted=lambda recipe, length: LayerCount(1e9, 0.0), layout=pinned)  # type: ignore[arg-type]
    assert most.best.fits is False and most.best.memory.total > 1e12


def test_layers_of_other_libraries_keep_to_the_formula() -> None:
    layout = {"tensor": 8, "shard": 1, "data": 1}
    given = {"recipes": ["bfloat16/word"], "chip": "H100-SXM", "chips": 8, "layout": layout}
    found = plan("llama-8b", **given, counted=lambda recipe, length: LayerCount(1.0, 0.0))  # type: ignore[arg-type]
    assert not found.best.is_counted
    # What narrowgauge train reaches instead has its layers whole, and counted.
    require_counted(found)
    with pytest.raises(DataError, match="--exact was requested"):
        require_counted(replace(found, trainable=None))


def test_experts_are_not_counted() -> None:
    with pytest.raises(DataError, match="layers without experts"):
        LayerCounts("mixtral-8x7b")


def test_the_command_says_what_was_counted() -> None:
    words = [*_ASKED, "bfloat16/word", "--exact"]
    result = CliRunner().invoke(main, [*words, "--explain"])
    assert result.exit_code == 0 and "Counted in the model's own modules" in result.output and COUNTED in result.output
    found = json.loads(CliRunner().invoke(main, [*words, "--json"]).output)
    assert found["counted"][0]["compute"] == "bfloat16" and found["options"][0]["activations_from"] == "count"
