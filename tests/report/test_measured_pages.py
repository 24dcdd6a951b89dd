"""Pages of measured times and of two launches: the figures say what the sentences say."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from narrowgauge.cli.main import main
from narrowgauge.planner.measured.launches import Attribution, MeasuredStep, read_launch
from narrowgauge.planner.measured.regression import compare_launches
from narrowgauge.planner.measured.scaling_law import fit, read_points
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.report.plan_page import render_attribution, step_bars, term_bars, time_curve

LAUNCH = """
model = "llama-8b"
recipe = "bfloat16/word"
batch_size = 1024
sequence_length = 4096
gradient_accumulation_steps = 512
[cluster]
chip = "H100-SXM"
chips = 16
interconnect_gbit_per_second = {rate}
"""


def test_the_curve_goes_through_the_points_and_has_the_asymptote() -> None:
    figure = time_curve(fit(read_points("128:10d,256:7d")), [512])
    by_name = {trace.get("name"): trace for trace in figure.data}
    assert by_name["measured"]["x"] == [128, 256] and by_name["measured"]["y"] == [10, 7]
    assert by_name["asked for"]["y"] == [pytest.approx(5.5)]
    least = by_name["never below 4 d"]["y"]
    assert least == pytest.approx([4.0] * len(least))
    law = by_name["T(N) = 768 d / N + 4 d"]
    assert law["y"] == pytest.approx([768 / chips + 4 for chips in law["x"]])
    band = next(trace for trace in figure.data if trace.get("fill"))
    half = len(law["x"])
    assert all(
        low <= y <= high for low, y, high in zip(band["y"][:half], law["y"], band["y"][: half - 1 : -1], strict=True)
    )


def test_times_that_no_law_fits_are_points_alone() -> None:
    figure = time_curve(fit(read_points("8:10h,16:2h")))
    assert [trace["name"] for trace in figure.data] == ["in proportion", "measured"] and "No law" in figure.how


def test_bars_are_the_terms_of_both_launches(tmp_path: Path) -> None:
    files = [tmp_path / "before.toml", tmp_path / "after.toml"]
    for file, rate in zip(files, (3200, 100), strict=True):
        file.write_text(LAUNCH.format(rate=rate))
    found = compare_launches(*(read_launch(file) for file in files))
    before, after = term_bars(found).data
    assert len(before["x"]) == len(after["x"]) == len(found.changes[:20])
    assert after["x"][0] - before["x"][0] == pytest.approx(found.changes[0].difference, rel=1e-3)


def test_bars_of_steps_add_up_to_the_step() -> None:
    terms = Terms((Term("matmuls", "computing", 2.0, ""), Term("communication", "communication", 0.5, "")))
    found = Attribution((MeasuredStep("one", 1, 64, terms), MeasuredStep("two", 2, 64, terms)))
    assert [sum(trace["x"][place] for trace in step_bars(found).data) for place in (0, 1)] == [2.5, 2.5]
    page = render_attribution(found)
    assert 'data-plot="steps"' in page and "A step of two" in page


def test_the_command_writes_the_pages(tmp_path: Path) -> None:
    files = [tmp_path / "before.toml", tmp_path / "after.toml"]
    for file, rate in zip(files, (3200, 100), strict=True):
        file.write_text(LAUNCH.format(rate=rate))
    asked = (("scaling", "128:10d,256:7d"), ("regression", *map(str, files)))
    for words, name in zip(asked, ("scaling", "terms-changed"), strict=True):
        page = tmp_path / "page.html"
        result = CliRunner().invoke(main, ["plan", *words, "--html", str(page)])
        assert result.exit_code == 0 and str(page) in result.output
        text = page.read_text(encoding="utf-8")
        assert text.startswith("<!doctype html>") and f'data-plot="{name}"' in text
