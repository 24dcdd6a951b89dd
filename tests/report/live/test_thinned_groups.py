"""Lines of a live page: what a report would draw, at the steps that show every spike."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from narrowgauge.report.figures.history_figures import skipped
from narrowgauge.report.figures.loss_figures import training_loss
from narrowgauge.report.figures.series import Series, band, series_of
from narrowgauge.report.live.live_page import LivePage
from narrowgauge.report.live.thinned_groups import thinned
from narrowgauge.report.publishing import read_runs
from report.live.growing_runs import begin
from report.made_pages import group_runs


def test_each_spike_keeps_its_height_and_all_lines_have_the_same_steps() -> None:
    x = np.arange(1.0, 10_001)
    lines = [Series(x, np.sin(x / 500)), Series(x[:7000], np.cos(x[:7000] / 500))]
    lines[0].y[1234], lines[1].y[4321], lines[0].y[5555] = 99.0, -99.0, np.nan
    found = thinned(lines, 100)
    assert found[0].y[found[0].x == 1235] == 99 and found[1].y[found[1].x == 4322] == -99
    assert np.isnan(found[0].y[found[0].x == 5556]).all() and 5556 in found[0].x
    np.testing.assert_array_equal(found[1].x, found[0].x[found[0].x <= 7000])
    assert len(found[0]) < 500 and found[1].x[-1] == 7000
    assert band(found).count[0] == 2


def test_lines_of_different_steps_keep_only_points_that_they_have() -> None:
    found = thinned([series_of([(step, step) for step in range(first, 900, 3)]) for first in (1, 2)], 10)
    for first, line in zip((1, 2), found, strict=True):
        assert set(line.x % 3) == {first} and (line.x == line.y).all()


@pytest.mark.parametrize("num_steps", [50, 20_000])
def test_figures_are_those_of_the_report(tmp_path: Path, num_steps: int) -> None:
    for seed in (0, 1):
        with begin(tmp_path / f"seed{seed}", seed=seed, steps=num_steps) as writer:
            lines = [
                {"step": s, "loss": 2 + (s * (seed + 3)) % 17 / s, "skipped": s % 1000 == 7}
                for s in range(1, num_steps + 1)
            ]
            for row in lines:
                writer.step(row)
    page = LivePage([tmp_path])
    while page.poll() or not page.is_read:
        pass
    page.update()
    live = {name[7:]: json.loads(text) for name, (_, text) in page._parts.items() if name.startswith("figure:")}
    report = group_runs(read_runs([tmp_path]))
    for make in (training_loss, skipped):
        figure = make(report)
        assert figure is not None
        mine = live[figure.name]
        if num_steps == 50:
            assert mine["data"] == figure.data and mine["how"] == figure.how
        for own, other in zip(mine["data"], figure.data, strict=True):
            assert own["meta"] == other["meta"]
            values = [[y for y in trace["y"] if y is not None] for trace in (own, other)]
            if own["meta"].get("view") != "smoothed":
                assert max(values[0]) == pytest.approx(max(values[1]), rel=1e-5)
