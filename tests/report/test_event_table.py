"""The table of events: what repeats is one row, no run silences another, and long names break between their parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from narrowgauge.report.event_table import MAX_EVENT_ROWS, events_table
from narrowgauge.runs.record import Run

MakeRun = Callable[..., Run]


def skip(step: int) -> dict[str, Any]:
    return {"kind": "skip", "step": step, "message": f"scale {step}"}


def rows_of(markup: str) -> list[list[str]]:
    """The text of every cell."""
    rows = re.findall(r'<tr class="[a-z]+">(.*?)</tr>', markup, re.DOTALL)
    return [[re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<td>(.*?)</td>", row, re.DOTALL)] for row in rows]


def test_repetitions_are_told_once_with_their_tensors(make_run: MakeRun) -> None:
    events = tuple(
        {
            "kind": "warning",
            "step": 5,
            "message": f"'layer.{place}' loses",
            "tensor": f"layer.{place}",
            "advice": "split",
        }
        for place in range(40)
    )
    (row,) = rows_of(events_table([(make_run(events=events), "a")]))
    assert row[0] == "5" and "and 39 more like it" in row[3] and "layer.39" in row[3]


def test_a_stretch_of_skips_is_one_row(make_run: MakeRun) -> None:
    # Another kind of event on the same steps does not tear the stretch.
    others = ({"kind": "nonfinite", "step": 4, "message": "inf"}, {"kind": "nonfinite", "step": 30, "message": "inf"})
    events = (skip(3), skip(4), others[0], *map(skip, range(5, 21)), others[1], skip(25))
    rows = rows_of(events_table([(make_run(events=events), "a")]))
    assert [(row[0], row[2]) for row in rows] == [
        ("3–20", "skip"),
        ("4", "nonfinite"),
        ("30", "nonfinite"),
        ("25", "skip"),
    ]
    assert "and 17 more like it" in rows[0][3] and "step 20: scale 20" in rows[0][3]


def test_the_loudest_run_does_not_silence_the_others(make_run: MakeRun) -> None:
    loud = make_run(events=tuple(map(skip, range(0, 4 * MAX_EVENT_ROWS, 2))))
    quiet = make_run(seed=1, events=(skip(1), {"kind": "finish", "step": 9, "message": "done"}))
    markup = events_table([(loud, "loud"), (quiet, "quiet")])
    rows = rows_of(markup)
    assert len(rows) == MAX_EVENT_ROWS
    assert [row[0] for row in rows if row[1] == "quiet"] == ["1"]
    assert f"{2 * MAX_EVENT_ROWS + 2 - MAX_EVENT_ROWS} more rows" in markup


def test_checkpoints_are_not_folded(make_run: MakeRun) -> None:
    events = tuple({"kind": "checkpoint", "step": step, "message": "kept"} for step in (1, 2))
    assert [row[0] for row in rows_of(events_table([(make_run(events=events), "a")]))] == ["1", "2"]


def test_a_long_name_breaks_between_its_parts_and_a_number_never(make_run: MakeRun) -> None:
    event = {"kind": "warning", "step": 1, "message": "model.layers.0.post_norm.weight lost 0.07 <b>"}
    markup = events_table([(make_run(events=(event,)), "a")])
    assert "model.<wbr>layers.0.<wbr>post_<wbr>norm.<wbr>weight lost 0.07 &lt;b&gt;" in markup
