"""The tables: complete, equal to the words they are made of, and the same figures for every reader."""

from __future__ import annotations

import pytest

from narrowgauge.spec import notation, show
from narrowgauge.spec.tables import cell_text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (True, "yes"), (1 / 3, "0.333333"), ({"a": (1, 12_345)}, "a=1, 12,345")],
)
def test_a_cell_shows_a_value(value: object, text: str) -> None:
    assert cell_text(value) == text


def test_a_recipe_s_words_sum_to_its_bytes_and_its_sources_are_named() -> None:
    for name in notation.representative_names():
        recipe = notation.parse(name)
        detail = show.page_recipe(name)[0]
        assert sum(part["bytes"] for part in detail["stored"]) == detail["bytes_per_param"], name
        assert {recipe.compute.source, recipe.storage.source} <= set(detail["facts"].values()), name
