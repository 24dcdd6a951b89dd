"""Where the steps of run folders went: known parts are found again, and what is lost adds up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import RecordError
from narrowgauge.planner.measured.launches import attribute, attribution_dict, attribution_lines, measured_step
from narrowgauge.planner.measured.scaling_law import fit
from narrowgauge.runs.record import Run


def made(ranks: int, computing: float, sending: float = 0.0, waiting: float = 0.0, **more: Any) -> Run:
    """A run whose ranks compute, send and wait for known seconds, the wait in the mean of all ranks."""
    row: dict[str, Any] = {"seconds": computing + sending + waiting}
    if ranks > 1:
        row |= {"communication_seconds": sending + waiting, "wait_seconds": waiting * ranks / (ranks - 1)}
    rows = [{**row, "step": step} for step in range(1, 21)]
    rows[0] |= {"seconds": 60.0}  # compiles
    rows[9] |= more.pop("tenth", {})
    config = {"model": "llama-1m", "recipe": "bfloat16/word", "batch_size": 8, "sequence_length": 64, **more}
    machine = {"ranks": ranks} if ranks > 1 else {}
    return Run(Path(f"on-{ranks}"), {"config": config, "machine": machine}, rows)


def test_parts_of_a_step() -> None:
    step = measured_step(made(4, computing=1.0, sending=0.3, waiting=0.2))
    assert step.terms.groups == pytest.approx({"computing": 1.0, "sending": 0.3, "waiting": 0.2})
    assert (step.num_ranks, step.tokens, step.seconds) == (4, 512, pytest.approx(1.5))


def test_one_rank_only_computes() -> None:
    assert measured_step(made(1, computing=2.0)).terms.groups == pytest.approx({"computing": 2.0})


def test_what_is_lost_adds_up() -> None:
    found = attribute([made(4, 0.6, 0.2, 0.1), made(1, 2.0)])
    lost = {change.group: change.difference for change in found.lost(found.steps[1])}
    assert lost == pytest.approx({"computing": 0.1, "sending": 0.2, "waiting": 0.1})
    assert sum(lost.values()) == pytest.approx(found.steps[1].seconds - found.steps[0].seconds / 4)
    said = attribution_lines(found)
    assert "efficiency of 56%" in said[2] and "sending: 200 ms" in said[3] and "50% of what is lost" in said[3]


def test_larger_batches_are_counted() -> None:
    """Weak scaling: twice the ranks on twice the tokens in the same time lose nothing."""
    found = attribute([made(1, 2.0), made(2, 2.0, batch_size=16)])
    assert found.lost(found.steps[1]) == ()
    assert [point.seconds for point in found.points] == pytest.approx([2.0, 1.0])
    assert fit(found.points).efficiency(1, 2) == pytest.approx(1.0)


def test_the_late_rank_is_named() -> None:
    table = {"num_steps": 10, "num_last": [0, 1, 9], "late_seconds": [0.0, 0.1, 0.4]}
    [said] = attribution_lines(attribute([made(3, 1.0, 0.1, 0.4, tenth={"ranks": table})]))
    assert "Rank 2 is the last in 90% of the steps, 400 ms late" in said


def test_time_outside_steps() -> None:
    run = made(1, 2.0)
    finished = Run(run.path, run.run, run.steps, summary={"wall_seconds": 60 + 19 * 2.0 + 20.0})
    assert measured_step(finished).terms.groups["outside"] == pytest.approx(1.0)
    resumed = Run(run.path, run.run, run.steps, events=[{"kind": "resume"}], summary={"wall_seconds": 500.0})
    assert "outside" not in measured_step(resumed).terms.groups


def test_what_numerics_and_faults_cost_is_told_from_communication_and_synchronization() -> None:
    """On four ranks, of 20 steps 4 overflow, and a rollback undid 8: only 16 count."""
    whole, large = made(1, 2.0), made(4, 0.5, 0.1, 0.05)
    for row in large.steps[4:8]:
        row["skipped"] = True
    troubled = Run(large.path, large.run, large.steps, events=[{"kind": "rollback", "step": 12, "batches": 8}])
    found = attribute([whole, troubled])
    step = found.steps[1]
    assert step.terms.groups == pytest.approx(
        {"computing": 0.5, "sending": 0.1, "waiting": 0.05, "void": 0.65 * 4 / 16, "undone": 0.65 * 8 / 16}
    )
    lost = {change.group: change.difference for change in found.lost(step)}
    assert sum(lost.values()) == pytest.approx(step.seconds - 0.5)
    said = "\n".join(attribution_lines(found)[3:])
    for words in (
        "undid: 325 ms more",
        "(51% of what is lost). faults",
        "numerics: narrowgauge diagnose",
        "synchronization: ",
    ):
        assert words in said, said


def test_runs_of_different_work_are_refused() -> None:
    with pytest.raises(RecordError, match="differ in recipe: bfloat16/master, bfloat16/word"):
        attribute([made(1, 2.0), made(2, 1.0, recipe="bfloat16/master")])


def test_a_run_of_two_steps_is_refused() -> None:
    run = made(1, 2.0)
    with pytest.raises(RecordError, match="has 2 timed steps; 6 are needed"):
        measured_step(Run(run.path, run.run, run.steps[:2]))


def test_the_values_are_those_of_the_sentences() -> None:
    found = attribute([made(1, 2.0), made(4, 0.6, 0.2, 0.1)])
    values = attribution_dict(found)
    assert values["runs"][1]["lost_seconds"]["sending"] == pytest.approx(0.2)
    assert values["sentences"] == attribution_lines(found)
