"""What a cell of a table shows."""

import pytest

from narrowgauge.spec.tables import cell_text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (True, "yes"), (1 / 3, "0.333333"), ({"a": (1, 12_345)}, "a=1, 12,345")],
)
def test_a_cell_shows_a_value(value, text):
    assert cell_text(value) == text
