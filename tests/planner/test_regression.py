"""Two launches compared: the term and the setting that made the step slower are named, whatever else is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import DataError
from narrowgauge.planner.launches import compare_launches, read_launch, sentences_of, tables_of

LAUNCH = """
model = "llama-8b"
recipes = "bfloat16/word"
sequence_length = 8192
layout = "fsdp2,shard=64,micro_batch=1,recompute=none,micro_batches=2"
chip = "H100-SXM"
chips = 64
interconnect_gbit_per_second = 3200
"""


def launch(folder: Path, *edits: tuple[str, str], more: str = "") -> dict[str, Any]:
    text = LAUNCH
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    file = folder / "launch.toml"
    file.write_text(text + more, encoding="utf-8")
    return read_launch(file)


def grown(comparison: dict[str, Any]) -> float:
    """Seconds by which the modelled step grew."""
    return float(comparison["steps"][0]["after"] - comparison["steps"][0]["before"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("recipe = 3", "Did you mean 'recipes'"),
        ("step_seconds = 0", "has step_seconds = 0"),
        ('tokens_per_step = "x"', "is not float"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, more: str, words: str) -> None:
    with pytest.raises(DataError) as caught:
        launch(tmp_path, more=more)
    assert words in f"{caught.value} {caught.value.advice}"


@pytest.mark.parametrize(
    ("edit", "setting", "group"),
    [
        (("3200", "400"), "interconnect_gbit_per_second", "communication"),
        (("recompute=none", "recompute=full"), "layout", "matmuls"),
        (("H100-SXM", "A100-SXM4-80GB"), "chip", "matmuls"),
        (("bfloat16/word", "bfloat16/float32"), "recipes", "communication"),
        (("chips = 64", 'chips = 64\nsoftware = "fsdp-2023"'), "software", "gaps"),
    ],
)
def test_one_slower_setting_is_found(
    tmp_path: Path, edit: tuple[str, str], setting: str, group: str
) -> None:
    comparison = compare_launches(launch(tmp_path), launch(tmp_path, edit))
    [effect] = comparison["settings"]
    assert effect["setting"] == setting
    assert effect["seconds"] == pytest.approx(grown(comparison)) and effect["seconds"] > 0
    assert comparison["terms"][0]["group"] == group
    assert sum(row["after"] - row["before"] for row in comparison["terms"]) == pytest.approx(
        effect["seconds"]
    )


def test_larger_batches_are_not_slower(tmp_path: Path) -> None:
    """Twice the micro-batches take twice the time, for twice the tokens."""
    comparison = compare_launches(
        launch(tmp_path), launch(tmp_path, ("micro_batches=2", "micro_batches=4"))
    )
    assert abs(grown(comparison)) < 0.02 * comparison["steps"][0]["after"]


def test_what_no_setting_explains_is_left_over(tmp_path: Path) -> None:
    same = launch(tmp_path, more="step_seconds = 2.0\n")
    slow = launch(tmp_path, more="step_seconds = 3.0\n")
    comparison = compare_launches(same, slow)
    assert comparison["settings"] == [] and grown(comparison) == 0
    table = tables_of(comparison)[0]
    assert [table.columns[3].cell(row) for row in table.rows] == ["+0 s", "+1 s"]
    explained, next_ = sentences_of(comparison)
    assert explained == "The terms explain +0 s of +1 s (0%)." and "Measure next" in next_


def test_what_the_terms_explain_needs_no_other_measurement(tmp_path: Path) -> None:
    fast, slow = launch(tmp_path), launch(tmp_path, ("3200", "400"))
    seconds = grown(compare_launches(fast, slow))
    comparison = compare_launches(
        {**fast, "step_seconds": 2.0}, {**slow, "step_seconds": 2.0 + 1.1 * seconds}
    )
    [explained] = sentences_of(comparison)
    assert explained.endswith("(91%).")
    assert "need step_seconds" in sentences_of(compare_launches(fast, slow))[0]
