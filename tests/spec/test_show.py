"""The tables: complete, equal to the words they are made of, and the same figures for every reader."""

from __future__ import annotations

import json
import math

import pytest

from narrowgauge.spec import notation, show, tables


def test_recipe_rows_parse_back_and_carry_the_words_figures() -> None:
    for row in show.rows("recipes"):
        recipe = notation.parse(row["name"])
        assert recipe.name == row["name"]
        assert recipe.bytes_per_param == row["bytes_per_param"]
        assert all(notation.parse(alias) == recipe for alias in row["aliases"])


def test_parts_of_a_recipe_sum_to_its_bytes() -> None:
    for name in [
        *notation.representative_names(),
        "bfloat16/tail8+bfloat16+float32",
        "bfloat16/bfloat16-pair+e6m5+float32",
    ]:
        detail = show.page_recipe(name)[0][0]
        assert sum(part["bytes"] for part in detail["stored"]) == detail["bytes_per_param"], name


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.1", 0.1), ("1e-8", 1e-8), ("0x1p-3", 0.125), ("-0x1.8p1", -3.0), (" 2 ", 2.0), ("-inf", -math.inf)],
)
def test_values_are_read_as_written(text: str, value: float) -> None:
    assert {row["name"]: row["value"] for row in show.page_value(text)[0]}["float64"] == value


def test_nan_stays_nan_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    values = {row["name"]: row["value"] for row in show.page_value("nan")[0]}
    assert math.isnan(values["float8_e4m3fn"])
    assert values["float4_e2m1fn"] == 0
    tables.write_json(show.page_value("nan")[0])
    assert {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)}["bfloat16"] == "nan"
