"""Lines that hide one another take turns, and no others do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from narrowgauge.report.figures.loss_figures import difference, loss_against_seconds, training_loss, validation_loss
from narrowgauge.report.figures.traces import OVERLAP, Figure
from narrowgauge.runs.record import Run
from report.made_pages import group_runs

MakeRun = Callable[..., Run]


def falls(off: float = 0.0) -> Callable[[int], float]:
    return lambda step: 3 + 4 * math.exp(-step / 20) + off


def dashes(figure: Figure | None) -> dict[str, str]:
    assert figure is not None
    return {trace["name"]: trace["line"]["dash"] for trace in figure.data if "name" in trace}


@pytest.mark.parametrize("draw", [training_loss, validation_loss, loss_against_seconds])
def test_lines_on_one_another_are_drawn_by_turns(draw: Callable[..., Figure | None], make_run: MakeRun) -> None:
    offs = {"master": 0.0, "naive": 0.3, "word": 0.001, "exact": -0.002}
    runs = [make_run(f"bfloat16/{name}", loss=falls(off)) for name, off in offs.items()]
    figure = draw(group_runs(runs))
    found = {name.partition("/")[2]: dash for name, dash in dashes(figure).items()}
    # Three lie on one another: each leaves gaps for those below it, of one rhythm.
    assert found == {"master": "solid", "naive": "solid", "word": "14px,7px", "exact": "7px,14px"}
    assert figure is not None and figure.how.endswith(OVERLAP)


def test_lines_that_are_apart_are_whole(make_run: MakeRun) -> None:
    runs = [make_run(f"bfloat16/{name}", loss=falls(off)) for name, off in {"master": 0.0, "word": 0.1}.items()]
    figure = validation_loss(group_runs(runs))
    assert set(dashes(figure).values()) == {"solid"} and figure is not None and OVERLAP not in figure.how


def test_lines_that_part_late_coincide_as_long_as_most_of_the_way_is_shared(make_run: MakeRun) -> None:
    def parts_at(step: int) -> Callable[[int], float]:
        return lambda now: falls(0.0 if now < step else 0.5)(now)

    for step, dash in ((45, "7px,7px"), (20, "solid")):
        runs = [make_run("bfloat16/master", steps=60, loss=falls())]
        runs.append(make_run("bfloat16/word", steps=60, loss=parts_at(step)))
        assert dashes(training_loss(group_runs(runs)))["bfloat16/word"] == dash


def test_how_near_is_near_is_the_figures_own_height(make_run: MakeRun) -> None:
    """What diverged ends the axis, and must not make neighbours of all others."""
    runs = [make_run(f"bfloat16/{name}", loss=falls(off)) for name, off in {"master": 0.0, "word": 0.2}.items()]
    runs.append(make_run("bfloat16/naive", loss=lambda step: 5.0 if step < 20 else 500.0))
    assert set(dashes(validation_loss(group_runs(runs))).values()) == {"solid"}


def test_differences_that_are_nothing_lie_on_one_another(make_run: MakeRun) -> None:
    offs = {"master": 0.0, "word": 0.0001, "exact": 0.00005, "naive": 0.2}
    runs = [make_run(f"bfloat16/{name}", loss=falls(off)) for name, off in offs.items()]
    found = dashes(difference(group_runs(runs), "bfloat16/master"))
    assert found == {"bfloat16/word": "solid", "bfloat16/exact": "7px,7px", "bfloat16/naive": "solid"}


def test_a_recipe_beyond_the_palette_keeps_its_own_dash(make_run: MakeRun) -> None:
    names = ("master", "word", "exact", "split", "kahan", "naive", "no-master", "compact", "states8", "stochastic")
    runs: list[Any] = [make_run(f"bfloat16/{name}", loss=falls()) for name in names]
    found = list(dashes(validation_loss(group_runs(runs))).values())
    assert found[0] == "solid" and found[8:] == ["dash", "dash"] and all("px" in dash for dash in found[1:8])
