"""Histograms over format ranges: shares, frames and the windows themselves against the formats' own figures."""

from __future__ import annotations

import math

from narrowgauge.report.figures.histograms import SHOWN_FORMATS, format_ranges, histogram
from narrowgauge.runs.schema import FIRST_EXPONENT, NUM_EXPONENTS
from narrowgauge.spec.formats import get_format


def counts(**at: int) -> list[int]:
    """``counts(m3=7)``: seven values at exponent −3."""
    bins = [0] * NUM_EXPONENTS
    for name, count in at.items():
        bins[(-1 if name[0] == "m" else 1) * int(name[1:]) - FIRST_EXPONENT] = count
    return bins


def test_bars_are_shares_at_their_exponents() -> None:
    rows = [
        {"step": 10, "histograms": {"weight": counts(m4=1, m3=2, m1=1)}},
        {"step": 20, "histograms": {"weight": counts(m2=5), "grad": counts(p3=1)}},
    ]
    figure = histogram(rows, 2)
    assert figure is not None
    assert [step["label"] for step in figure["layout"]["sliders"][0]["steps"]] == ["10", "20"]
    weights, grads = [trace for trace in figure["data"] if trace["type"] == "bar"]
    assert weights["x"] == [-4, -3, -2, -1]
    assert weights["marker"]["color"] == "@c2"
    assert figure["frames"] == [[[0.25, 0.5, None, 0.25], None], [[None, None, 1.0, None], [1.0]]]
    assert grads["y"] == [1.0]
    assert [weights["meta"]["title"], grads["meta"]["title"]] == ["Weights", "Parameter gradients"]


def test_windows_are_the_formats_own() -> None:
    rows = {row["name"]: row for row in format_ranges()}
    assert tuple(rows) == SHOWN_FORMATS
    e4m3 = rows["float8_e4m3fn"]
    assert (e4m3["subnormal"], e4m3["normal"], e4m3["last"]) == (-9, -6, 8)
    assert math.isclose(2 ** e4m3["max"], 448, rel_tol=1e-3)
    for name, row in rows.items():
        form = get_format(name)
        # The largest value that a bin counted as lost holds becomes zero; the next bin's smallest does not all do.
        top_of_lost = math.nextafter(2.0 ** row["zero_below"], 0)
        assert form.decode(form.encode(top_of_lost)) == 0
        assert form.decode(form.encode(1.5 * 2.0 ** row["zero_below"])) > 0
        assert 2.0 ** row["last"] <= form.max < 2.0 ** (row["last"] + 1)
