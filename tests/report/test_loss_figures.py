"""The figures' data: known answers on made-up runs, one colour per recipe, and a sentence for every reader."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.analysis.comparison.run_stats import LossCurve
from narrowgauge.report.figures import history_figures, loss_figures
from narrowgauge.report.figures.history_figures import event_strip
from narrowgauge.report.figures.loss_figures import comparison_figures
from narrowgauge.report.figures.palette import colour, dash_of, plain, symbol_of
from narrowgauge.report.figures.traces import Figure
from narrowgauge.report.recipe_groups import Group, run_names
from narrowgauge.runs.record import Run
from report.made_pages import group_runs

MakeRun = Callable[..., Run]


def mean_of(figure: Figure | None, place: int, view: str | None = None) -> dict[str, Any]:
    """The line of a group's mean."""
    assert figure is not None
    (found,) = (
        trace
        for trace in figure.data
        if trace["meta"]["group"] == place and trace.get("name") and trace["meta"].get("view") == view
    )
    return found


def bands_of(figure: Figure | None) -> list[dict[str, Any]]:
    assert figure is not None
    return [trace for trace in figure.data if trace.get("fill") == "toself"]


@pytest.fixture
def groups(make_run: MakeRun) -> list[Group]:
    """Two seeds of one recipe half a nat apart, and one of another, a nat worse at half the bytes."""
    return group_runs(
        [
            make_run("bfloat16/master", 0, loss=lambda step: 3.0, bytes_per_param=16.0),
            make_run("bfloat16/master", 1, loss=lambda step: 3.5, bytes_per_param=16.0),
            make_run("bfloat16/word", 0, loss=lambda step: 4.0, bytes_per_param=8.0),
        ]
    )


def test_seeds_become_a_mean_and_a_band(groups: list[Group]) -> None:
    figure = loss_figures.validation_loss(groups)
    assert mean_of(figure, 0)["x"] == [20, 40, 60, 80, 100]
    assert mean_of(figure, 0)["y"] == pytest.approx([3.35] * 5)
    (band,) = bands_of(figure)
    assert band["meta"]["group"] == 0
    assert (min(band["y"]), max(band["y"])) == (3.1, 3.6)


def test_training_loss_is_there_smoothed_and_raw(make_run: MakeRun) -> None:
    figure = loss_figures.training_loss(
        group_runs([make_run(steps=1000, loss=lambda step: 50.0 if step == 500 else 1.0)])
    )
    assert figure is not None
    assert [view for view, _ in figure.views] == ["smoothed", "raw"]
    assert max(mean_of(figure, 0, "raw")["y"]) == 50.0
    assert 1.0 < max(mean_of(figure, 0, "smoothed")["y"]) < 10.0


def test_a_loss_that_is_not_finite_is_a_gap_and_a_cross(make_run: MakeRun) -> None:
    run = make_run(steps=100, loss=lambda step: math.nan if step in (30, 31) else 1.0)
    figure = loss_figures.training_loss(group_runs([run]))
    line = mean_of(figure, 0, "raw")
    assert [x for x, y in zip(line["x"], line["y"], strict=True) if y is None] == [30, 31]
    assert figure is not None
    (crosses,) = (trace for trace in figure.data if trace.get("yaxis") == "y2" and trace["meta"]["view"] == "raw")
    assert crosses["x"] == [30, 31]


def test_differences_are_paired_by_seed(make_run: MakeRun) -> None:
    made = [make_run("bfloat16/master", seed, loss=lambda step, seed=seed: 3.0 + seed) for seed in (0, 1)]
    made += [make_run("bfloat16/word", seed, loss=lambda step, seed=seed: 3.25 + seed) for seed in (0, 1, 2)]
    figure = loss_figures.difference(group_runs(made), "bfloat16/master")
    assert figure is not None
    # Seeds lie a whole nat apart; each pair differs by a quarter, so the band has no height.
    assert mean_of(figure, 1)["y"] == pytest.approx([0.25] * 5)
    assert set(bands_of(figure)[0]["y"]) == {0.25}
    assert "bfloat16/master" in figure.title
    assert loss_figures.difference(group_runs(made[:2])) is None


def test_loss_is_drawn_over_bytes_and_the_axis_begins_at_zero(groups: list[Group]) -> None:
    figure = loss_figures.loss_against_bytes(groups)
    assert figure is not None
    assert [(trace["x"], trace["y"]) for trace in figure.data] == [([16.0], [3.35]), ([8.0], [4.1])]
    assert figure.data[0]["error_y"]["array"] == pytest.approx([0.25])
    assert figure.layout["xaxis"]["range"][0] == 0


def test_points_differ_by_marker_and_are_named_on_hover(make_run: MakeRun) -> None:
    names = ["bfloat16/word", "bfloat16/naive", "<b>mine</b>"]
    figure = loss_figures.loss_against_bytes(group_runs([make_run(name) for name in names]))
    assert figure is not None
    assert [trace["hovertemplate"].partition("<extra>")[2] for trace in figure.data] == [
        f"{plain(name)}</extra>" for name in names
    ]
    assert len({trace["marker"]["symbol"] for trace in figure.data}) == 3


def test_what_cannot_be_placed_is_named(make_run: MakeRun) -> None:
    made = [make_run("bfloat16/word"), make_run("bfloat16/naive", finished=False)]
    figure = loss_figures.loss_against_bytes(group_runs(made))
    assert figure is not None
    assert "bfloat16/naive" in figure.how
    assert loss_figures.loss_against_bytes(group_runs(made[1:])) is None


def test_seconds_are_sums_of_steps(groups: list[Group]) -> None:
    assert mean_of(loss_figures.loss_against_seconds(groups), 0)["x"] == pytest.approx([10, 20, 30, 40, 50], rel=1e-6)


# ── loss against seconds ────────────────────────────────────────────────────────────────────────────────────────────


def timed(run: Run, step_seconds: float) -> Run:
    for row in run.steps:
        row["seconds"] = step_seconds
    return run


def alone_of(figure: Figure | None, place: int) -> list[tuple[int, list[float], list[float]]]:
    """The stretches of single runs of a group: seed, seconds, losses."""
    assert figure is not None
    found: list[tuple[int, list[float], list[float]]] = []
    for trace in figure.data:
        if trace["meta"]["group"] == place and "alone" in trace.get("hovertemplate", ""):
            ends = [-1, *(at for at, y in enumerate(trace["y"]) if y is None)]
            for before, end in itertools.pairwise(ends):
                piece = slice(before + 1, end)
                found.append((trace["customdata"][end], trace["x"][piece], trace["y"][piece]))
    return found


def test_seeds_are_joined_over_seconds_at_the_moments_that_all_share(make_run: MakeRun) -> None:
    # Validations at 10, 20, … 50 s of one seed, at 12, 24, … 60 s of the other; losses fall by 0.01 a step.
    made = [
        timed(make_run(seed=seed, loss=lambda step, seed=seed: 4.0 + seed - step / 100), step)
        for seed, step in ((0, 0.5), (1, 0.6))
    ]
    figure = loss_figures.loss_against_seconds(group_runs(made))
    line = mean_of(figure, 0)
    assert line["x"] == pytest.approx([12, 20, 24, 30, 36, 40, 48, 50])
    curves = [LossCurve.of(run) for run in made]
    assert line["y"] == pytest.approx([statistics.fmean(c.loss_at(at) or 0.0 for c in curves) for at in line["x"]])
    assert set(line["customdata"]) == {2}
    (span,) = bands_of(figure)
    sides = [curves[1].loss_at(at) for at in line["x"]] + [curves[0].loss_at(at) for at in reversed(line["x"])]
    assert span["x"] == [*line["x"], *reversed(line["x"])] and span["y"] == pytest.approx(sides)
    # What lies outside is each seed's own: one began before the other, which ended after it.
    assert alone_of(figure, 0) == [
        (0, [10.0, 12.0], pytest.approx([3.9, 3.86])),
        (1, [50.0, 60.0], pytest.approx([4.26667, 4.1])),
    ]
    assert figure is not None and "equal moments" in figure.how and "single seeds" in figure.how


def test_the_verdicts_losses_at_equal_time_lie_on_the_lines_that_are_drawn(make_run: MakeRun) -> None:
    made = [
        timed(make_run(recipe, seed, loss=lambda step, slope=slope: 4.0 - step / slope), step)
        for recipe, slope, step in (("bfloat16/master", 100, 0.7), ("bfloat16/word", 90, 0.5))
        for seed in (0, 1)
    ]
    found = compare_runs(made)
    figure = loss_figures.loss_against_seconds(group_runs(made))
    assert len(found.equal_time) == 2
    for place, row in enumerate(found.equal_time):
        line = mean_of(figure, place)
        drawn = LossCurve(tuple(zip(line["x"], line["y"], strict=True)))
        assert drawn.loss_at(row["seconds"]) == pytest.approx(row["val_loss"], rel=1e-5)


def test_one_seed_draws_its_own_curve_over_seconds(make_run: MakeRun) -> None:
    run = make_run(loss=lambda step: math.nan if step == 40 else 3.0)
    figure = loss_figures.loss_against_seconds(group_runs([run]))
    line = mean_of(figure, 0)
    assert (line["x"], line["y"]) == ([10, 20, 30, 40, 50], [3.1, None, 3.1, 3.1, 3.1])
    assert figure is not None and not bands_of(figure) and not alone_of(figure, 0)
    (crosses,) = (trace for trace in figure.data if trace.get("yaxis") == "y2")
    assert crosses["x"] == [20]
    assert "thick" not in figure.how and "equal moments" not in figure.how and "same seeds" not in figure.how


def test_what_the_verdict_does_not_count_is_drawn_alone_over_seconds(make_run: MakeRun) -> None:
    made = [make_run(seed=seed, loss=lambda step, seed=seed: 3.0 + seed) for seed in (0, 1)]
    # One that was killed early, and one that went far away: neither shortens the others' line nor enters its mean.
    killed = make_run(seed=2, loss=lambda step: 3.5, finished=False)
    del killed.steps[40:], killed.evals[2:]
    away = make_run(seed=3, loss=lambda step: 3.0 + step)
    figure = loss_figures.loss_against_seconds(group_runs([*made, killed, away]))
    line = mean_of(figure, 0)
    assert line["y"] == pytest.approx([3.6] * 5) and set(line["customdata"]) == {2}
    assert "of 4 seeds" in line["hovertemplate"]
    lone = alone_of(figure, 0)
    assert [(seed, x) for seed, x, _ in lone] == [(2, [10.0, 20.0]), (3, [10.0, 20.0, 30.0, 40.0, 50.0])]
    assert figure is not None and "Beyond it: bfloat16/word." in figure.how
    assert figure.layout["yaxis"]["range"][1] < 40


def test_runs_that_are_all_under_way_are_read_as_one(make_run: MakeRun) -> None:
    made = [make_run(seed=seed, finished=False) for seed in (0, 1)]
    figure = loss_figures.loss_against_seconds(group_runs(made))
    assert len(mean_of(figure, 0)["x"]) == 5 and not alone_of(figure, 0)
    # One that has a single point yet does not take the others' line away.
    begun = make_run(seed=2, finished=False)
    del begun.evals[1:]
    figure = loss_figures.loss_against_seconds(group_runs([*made, begun]))
    assert len(mean_of(figure, 0)["x"]) == 5 and [seed for seed, _, _ in alone_of(figure, 0)] == [2]


def test_seeds_without_a_moment_in_common_are_points(make_run: MakeRun) -> None:
    made = [timed(make_run(seed=seed), step) for seed, step in ((0, 0.5), (1, 0.25))]
    for run in made:
        del run.evals[:-1]
    figure = loss_figures.loss_against_seconds(group_runs(made))
    assert figure is not None and len(figure.data) == 1 and figure.data[0]["mode"] == "lines+markers"
    assert [(seed, x) for seed, x, _ in alone_of(figure, 0)] == [(0, [50.0]), (1, [25.0])]
    assert figure.how.startswith("Lower and further to the left") and "thick" not in figure.how
    json.dumps(figure.data, allow_nan=False)


def test_recipes_of_other_seeds_are_said_not_to_compare_over_seconds(make_run: MakeRun) -> None:
    made = [make_run("bfloat16/master", 0), make_run("bfloat16/master", 1), make_run("bfloat16/word", 0)]
    uneven, even = (loss_figures.loss_against_seconds(group_runs(runs)) for runs in (made, [made[0], made[2]]))
    assert uneven is not None and even is not None
    assert "same seeds" in uneven.how and "same seeds" not in even.how


def test_runs_without_times_have_no_line_over_seconds(make_run: MakeRun) -> None:
    run = make_run()
    for row in run.steps:
        del row["seconds"]
    assert loss_figures.loss_against_seconds(group_runs([run])) is None


def test_losses_far_apart_get_a_log_axis(make_run: MakeRun) -> None:
    near = loss_figures.validation_loss(group_runs([make_run()]))
    far = loss_figures.validation_loss(group_runs([make_run(loss=lambda step: 1e5 / step**3)]))
    assert near is not None and far is not None
    assert (near.layout["yaxis"]["type"], far.layout["yaxis"]["type"]) == ("linear", "log")


def test_scale_and_counts_are_drawn_only_where_they_tell(make_run: MakeRun) -> None:
    plain_run = group_runs([make_run(more={"skipped": False, "saturated": 0})])
    assert history_figures.loss_scale(plain_run) is None
    assert history_figures.skipped(plain_run) is None
    scaled = group_runs([make_run(more={"skipped": True, "loss_scale": 1024.0})])
    counted, scale = history_figures.skipped(scaled), history_figures.loss_scale(scaled)
    assert mean_of(counted, 0)["y"][-1] == 100
    assert set(mean_of(scale, 0)["y"]) == {1024.0}
    assert scale is not None and scale.layout["yaxis"]["type"] == "log"


def test_the_worst_tensor_is_named_per_step(make_run: MakeRun) -> None:
    from_gauges = [
        {"step": 10, "tensors": {"input:<i>a</i>": [1, 1, 0, 0.25, 0, None], "input:b": [1, 1, 0, 0.125, 0, None]}},
        {"step": 20, "tensors": {"input:<i>a</i>": [1, 1, 0, None, 0, None], "input:b": [1, 1, 0, 0.5, 0, None]}},
    ]
    made = group_runs([make_run(gauges=from_gauges)])
    line = mean_of(history_figures.worst_underflow(made), 0)
    assert (line["x"], line["y"]) == ([10, 20], [0.25, 0.5])
    assert line["customdata"] == ["input:&lt;i&gt;a&lt;/i&gt;", "input:b"]
    assert history_figures.worst_overflow(made) is None


def test_events_stand_on_their_steps_by_kind(make_run: MakeRun) -> None:
    happened = (
        {"kind": "start", "step": 0, "message": "begun"},
        {"kind": "warning", "step": 7, "message": "<b>lost</b>"},
        {"kind": "never heard of", "step": 9},
        {"kind": "note"},
    )
    strip = event_strip(run_names(group_runs([make_run(events=happened)])))
    assert strip is not None
    found = {trace["name"]: (trace["x"], trace["text"]) for trace in strip["data"]}
    assert found["routine"] == ([0], ["start: begun"])
    assert found["warning"] == ([7], ["warning: &lt;b&gt;lost&lt;/b&gt;"])
    assert found["never heard of"][0] == [9]
    assert event_strip(run_names(group_runs([make_run()]))) is None


def test_a_recipe_has_one_colour_in_every_figure(groups: list[Group]) -> None:
    for found in comparison_figures(groups).values():
        for figure in found:
            for trace in figure.data:
                own = {colour(trace["meta"]["group"]), colour(trace["meta"]["group"], 0.18)}
                marker = trace.get("marker", {})
                used = {trace.get("fillcolor"), trace.get("line", {}).get("color"), marker.get("color")}
                assert used - {None} <= own, (figure.name, used)


def test_beyond_the_palette_recipes_differ_by_dash_or_marker() -> None:
    # Lines have no marker and points no dash, so each must tell apart alone.
    for look in (dash_of, symbol_of):
        assert len({(colour(place), look(place)) for place in range(32)}) == 32, look


def test_crosses_of_two_recipes_on_one_step_are_both_seen(make_run: MakeRun) -> None:
    made = [make_run(f"bfloat16/{name}", loss=lambda step: math.nan) for name in ("word", "naive")]
    figure = loss_figures.training_loss(group_runs(made))
    assert figure is not None
    crosses = [trace for trace in figure.data if trace.get("yaxis") == "y2" and trace["meta"]["view"] == "raw"]
    assert [trace["x"] for trace in crosses] == [list(range(1, 101))] * 2
    assert crosses[0]["y"][0] != crosses[1]["y"][0]


def test_an_axis_of_differences_holds_zero_and_shows_no_last_digits(make_run: MakeRun) -> None:
    made = [make_run("bfloat16/master", loss=lambda step: 3.9), make_run("bfloat16/word", loss=lambda step: 3.9 + 1e-9)]
    figure = loss_figures.difference(group_runs(made), "bfloat16/master")
    assert figure is not None
    assert figure.layout["yaxis"]["autorangeoptions"]["include"] == pytest.approx([-0.002, 0.002])
    assert "is no difference" not in figure.how
    spread = loss_figures.loss_against_bytes(group_runs(made))
    assert spread is not None
    assert spread.layout["yaxis"]["autorangeoptions"]["include"] == pytest.approx([3.998, 4.002])
    broken = [made[0], make_run("bfloat16/word", loss=lambda step: math.nan)]
    assert loss_figures.difference(group_runs(broken), "bfloat16/master") is None


def test_seconds_are_those_of_the_verdict(make_run: MakeRun) -> None:
    run = make_run(steps=100)
    # The first step compiled: it counts as a median one, as in the comparison.
    run.steps[0]["seconds"] = 60.0
    line = mean_of(loss_figures.loss_against_seconds(group_runs([run])), 0)
    assert line["x"] == pytest.approx([seconds for seconds, _ in LossCurve.of(run).points], rel=1e-6)
    assert line["x"][0] == pytest.approx(10.0)


def test_what_is_not_counted_is_not_called_healthy(make_run: MakeRun) -> None:
    # Overflow of a cast is sampled; only delayed scales are counted in every step.
    rows = [{"step": 1, "tensors": {"input:a": [1, 1, 0, 0.0, 0.02, None]}}]
    groups = group_runs([make_run(gauges=rows, more={"skipped": False})])
    drawn = comparison_figures(groups)["history"]
    said = history_figures.absent(groups, drawn)
    assert "worst-overflow" in {figure.name for figure in drawn}
    assert "No step was skipped." in said and "delayed scale" not in said
    counted = group_runs([make_run(more={"skipped": False, "saturated": 0})])
    assert "no value exceeded a delayed scale" in history_figures.absent(counted, [])


def test_every_figure_says_how_to_read_it_and_is_valid_json(make_run: MakeRun) -> None:
    rows = [{"step": 1, "tensors": {"input:a": [1, 1, 0, 0.1, 0.1, None]}}]
    made = [
        make_run(
            "bfloat16/word",
            gauges=rows,
            more={"skipped": True, "loss_scale": 2.0},
            loss=lambda step: math.inf if step == 5 else 2.0,
        ),
        make_run("bfloat16/naive", loss=lambda step: 3.0),
    ]
    found = [figure for section in comparison_figures(group_runs(made)).values() for figure in section]
    assert len({figure.name for figure in found}) == len(found) == 10
    for figure in found:
        assert len(figure.how) > 60 and figure.how.endswith("."), figure.name
        json.dumps([figure.data, figure.layout], allow_nan=False)
        assert figure.layout["xaxis"]["title"]["text"] and figure.layout["yaxis"]["title"]["text"]


def test_runs_that_wrote_nothing_make_no_figures(make_run: MakeRun) -> None:
    bare = make_run(steps=0, finished=False)
    assert comparison_figures(group_runs([bare])) == {"loss": [], "cost": [], "storage": [], "history": [], "ranks": []}


def test_plotly_reads_tags_in_labels_so_they_are_escaped() -> None:
    assert plain("</script>&amp;") == "&lt;/script&gt;&amp;amp;"


def test_what_diverged_does_not_flatten_the_others_and_is_named(make_run: MakeRun) -> None:
    made = [
        make_run("bfloat16/master"),
        make_run("bfloat16/word", loss=lambda step: 2.01 + 5.0 * math.exp(-step / 30)),
        make_run("bfloat16/naive", loss=lambda step: 7.0 + step),
    ]
    for make in (
        loss_figures.training_loss,
        loss_figures.validation_loss,
        loss_figures.loss_against_seconds,
        loss_figures.difference,
    ):
        figure = make(group_runs(made))
        assert figure is not None
        assert figure.layout["yaxis"]["range"][1] < 80, figure.name
        assert "Beyond it: bfloat16/naive." in figure.how, figure.name
        calm = make(group_runs(made[:2]))
        assert calm is not None and "range" not in calm.layout["yaxis"] and "Beyond it" not in calm.how


def test_a_loss_scale_is_ticked_at_powers_of_two(make_run: MakeRun) -> None:
    made = [make_run("float16/master", more={"loss_scale": 2.0**scale}) for scale in (3,)]
    figure = history_figures.loss_scale(group_runs(made))
    assert figure is not None
    assert figure.layout["yaxis"]["tickvals"] == [8.0]
    assert figure.layout["yaxis"]["ticktext"] == ["2<sup>3</sup>"]
