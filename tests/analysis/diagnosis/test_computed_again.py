"""What a step that was computed again contradicts is said before every cause that rows make likely, and what it does not, too."""

from __future__ import annotations

import pytest

import narrowgauge as ng
from analysis.diagnosis.records import AT, Row, healthy_run, raise_events
from narrowgauge.analysis.diagnosis.replay_findings import ReplayedStep
from narrowgauge.report.diagnosis_page import render_diagnosis
from narrowgauge.report.hindsight import hindsight
from narrowgauge.runs.finding import Finding
from narrowgauge.runs.record import Run
from report.test_runs_page import Document

COMPUTES = "what model and loss compute"


def departure(name: str, step: int, kind: str = "warning", tensor: str = "") -> Row:
    """The event that a recorder writes."""
    said = {"message": f"{name} in words.", "advice": "Look at it.", "detector": name}
    return {"kind": kind, "step": step, **said, **({"tensor": tensor} if tensor else {})}


def audited(*events: Row, equal: tuple[str, ...] = ("loss", "update"), departs: tuple[str, ...] = ()) -> Run:
    """A loop with a recorder, of which two steps were computed again."""
    run = healthy_run()
    run.run["recorder"] = {"program": "mine.py"}
    for step in (2, 100):
        run.steps[step - 1]["recomputed"] = {"equal": list(equal), "departs": list(departs), "unchecked": {}}
    run.events.extend(events)
    return run


def test_a_departure_is_a_finding_before_causes_of_rows() -> None:
    run = audited(departure("schedule-many", 2), departure("gradient-scaled", 100, tensor="head.weight"))
    run.steps[AT - 1]["loss"] += 3.0
    raise_events(run)
    found = ng.diagnose(run)
    names = [finding.name for finding in found.findings]
    assert names[:2] == ["gradient-scaled", "schedule-many"] and len(names) > 2, "errors, warnings, causes"
    assert found.findings[-1].step == AT and not found.findings[-1].is_measured
    assert found.verdict.startswith("gradient-scaled in words (gradient-scaled) at step 100, in head.weight; and ")
    assert "  what to do: Look at it." in found.text()
    first = found.to_dict()["findings"][0]
    assert (first["cause"], first["step"], first["tensor"], first["measured"]) == (
        "gradient-scaled", 100, "head.weight", True,
    )  # fmt: skip


def test_no_run_with_a_departure_is_healthy_and_notes_are_notes() -> None:
    found = ng.diagnose(audited(departure("evaluated-in-training", 2), departure("evaluated-in-training", 2)))
    assert not found.is_healthy and [finding.name for finding in found.findings] == ["evaluated-in-training"]
    noted = ng.diagnose(audited(departure("z-loss", 2, "note"), departure("gradient-departs", 100, "note", "head")))
    assert noted.is_healthy and not noted.findings
    assert noted.notes == (
        "step 2: z-loss: z-loss in words",
        "step 100: gradient-departs (head): gradient-departs in words",
    )


def test_many_departures_leave_a_ticket_readable() -> None:
    names = ("frozen", "rate", "decay", "sign", "eps", "beta")
    found = ng.diagnose(audited(*(departure(name, 2) for name in names)))
    assert len(found.findings) == len(names) and found.verdict.endswith("; and 2 more (--json).")
    assert len(found.text().splitlines()) <= 10


def test_what_a_replay_finds_is_a_finding() -> None:
    def replayed(severity: str) -> ReplayedStep:
        each = Finding("sees-future", "outputs change with later tokens.", "Look.", "layers.1", severity, step=60)
        return ReplayedStep("made", 60, 50, None, 2.5, None, departures=(each,), checked=("loss",))

    found = ng.diagnose(healthy_run(), replay=replayed("error"))
    assert not found.is_healthy and found.findings[0].name == "sees-future"
    assert found.verdict == "outputs change with later tokens (sees-future) at step 60, in layers.1."
    assert COMPUTES in found.checked and "step 60 computed again: equal to rounding in loss" in found.coverage()
    assert hindsight(found.findings[0], healthy_run()) is None, "no earlier record shows it"
    noted = ng.diagnose(healthy_run(), replay=replayed("note"))
    assert noted.is_healthy and "sees-future" in noted.text(), "the replay says it"


def test_a_piece_of_a_replay_that_departs_is_not_said_to_be_equal() -> None:
    each = Finding("gradient-scaled", "the gradient is 2 times what it should be.", "Look.", severity="error", step=60)
    replay = ReplayedStep("made", 60, 50, None, 2.5, None, departures=(each,), departed=("gradient",))
    found = ng.diagnose(healthy_run(), replay=replay)
    assert COMPUTES in found.checked and "equal to rounding" not in found.coverage()


def test_steps_that_are_equal_to_rounding_are_said_to_be_checked() -> None:
    found = ng.diagnose(audited())
    assert found.is_healthy and COMPUTES in found.checked and COMPUTES not in found.not_seen
    assert "\n  steps 2, 100 computed again: equal to rounding in loss, update\n" in found.text()
    assert found.to_dict()["recomputed"] == {"steps": [2, 100], "equal": ["loss", "update"], "unchecked": {}}
    assert "steps 2, 100 computed again" in ng.diagnose(audited(departs=("loss", "update"))).coverage()


def test_where_nothing_was_computed_again_the_call_is_named_that_would_show_it() -> None:
    run = healthy_run()
    assert ng.diagnose(run).not_seen[COMPUTES] == "narrowgauge diagnose RUN --replay STEP"
    run.run["recorder"] = {"program": "mine.py"}
    assert ng.diagnose(run).not_seen[COMPUTES] == "ng.RunRecorder(…, audit_every=1000)"
    run.steps[1]["recomputed"] = {"equal": [], "departs": [], "unchecked": {"gradient": "a compiled model"}}
    found = ng.diagnose(run)
    assert found.not_seen[COMPUTES] == "" and COMPUTES not in found.checked
    assert "step 2 computed again: not checked: gradient (a compiled model)" in found.coverage()
    run.steps[1]["recomputed"] = "damaged"
    assert ng.diagnose(run).recomputed is None


@pytest.mark.parametrize("step", [2, 100])
def test_a_page_shows_a_departure_with_what_it_means_and_since_when(step: int) -> None:
    run = audited(departure("gradient-scaled", step, tensor="head.weight"))
    text = Document(render_diagnosis(ng.diagnose(run), run)).text
    for words in (
        f"Gradient-scaled in words (gradient-scaled) at step {step}, in head.weight.",
        "Gradient-scaled in words: training computes something else than it says",
        f"first alarm while training, step {step}",
        "Look at it.",
    ):
        assert words in text, words
    assert ("Of the steps before, 2 was computed again last" in text) == (step == 100)
