"""The tables: complete, equal to the words they are made of, and the same figures for every reader."""

import pytest

from narrowgauge.spec import parse, show
from narrowgauge.spec.tables import cell_text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (True, "yes"), (1 / 3, "0.333333"), ({"a": (1, 12_345)}, "a=1, 12,345")],
)
def test_a_cell_shows_a_value(value: object, text: str) -> None:
    assert cell_text(value) == text


def test_a_recipe_names_its_sources() -> None:
    for name in parse.representative_names():
        recipe = parse.parse(name)
        facts = show.recipe_facts(name).values()
        assert {recipe.compute.source, recipe.storage.source} <= set(facts), name
