"""The tables of a page: which recipes are not to be used, which value is the best beyond chance, and what happened."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from markupsafe import escape

from analysis.comparison.made_runs import ROW, sixteen_bit_runs
from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.report.recipe_groups import groups_of
from narrowgauge.report.runs_page import MAX_EVENT_ROWS, MAX_REPETITIONS, cost_table, event_rows, questions
from narrowgauge.runs.record import Run
from report.made_pages import page_of

MakeRun = Callable[..., Run]


def made(make_run: MakeRun, recipe: str, losses: list[float], **summary: Any) -> list[Run]:
    """A run per loss; other figures of the summary as given."""
    runs = [make_run(recipe, seed, loss=lambda step, loss=loss: loss) for seed, loss in enumerate(losses)]
    return [dataclasses.replace(run, summary={**(run.summary or {}), **summary}) for run in runs]


def bold(runs: list[Run]) -> dict[str, list[str]]:
    """By recipe what its row prints in bold."""
    found = compare_runs(runs)
    table = cost_table(groups_of(found), found)
    return {line.recipe: [cell.text for cell in line.cells if cell.is_best] for line in table.lines}


def losing(run: Run) -> Run:
    """A run whose updates arrive at first and are lost late."""
    steps = [row | {"edq": 1.0 if row["step"] < 90 else 0.25, "lost_fraction": 0.75} for row in run.steps]
    return dataclasses.replace(run, steps=steps, summary={**(run.summary or {}), "edq": 0.99, "lost_fraction": 0.2})


def test_the_best_of_a_column_is_in_bold(make_run: MakeRun) -> None:
    master = made(make_run, "bfloat16/master", [3.0, 3.1, 3.2], bytes_per_param=16.0)
    even = made(make_run, "bfloat16/word", [2.99, 3.11, 3.19], bytes_per_param=8.04)
    assert bold(master + even) == {"bfloat16/master": [], "bfloat16/word": ["8.04"]}
    better = made(make_run, "bfloat16/word", [2.90, 3.01, 3.09], bytes_per_param=8.04)
    assert bold(master + better)["bfloat16/word"] == ["3.1000", "8.04"]
    # With one seed no loss is best.
    assert bold(master[:1] + better[:1])["bfloat16/word"] == ["8.04"]


def test_recipes_not_to_be_used_have_a_badge_and_nothing_in_bold(make_run: MakeRun) -> None:
    master = made(make_run, "bfloat16/master", [3.0, 3.1, 3.2], bytes_per_param=16.0)
    word = made(make_run, "bfloat16/word", [3.0, 3.1, 3.2], bytes_per_param=8.04)
    naive = [losing(run) for run in made(make_run, "bfloat16/naive", [2.5, 2.6, 2.7], bytes_per_param=8.0)]
    runs = master + word + naive
    found = compare_runs(runs)
    assert bold(runs) == {"bfloat16/master": [], "bfloat16/word": ["8.04"], "bfloat16/naive": []}
    *others, line = cost_table(groups_of(found), found).lines
    assert (line.recipe, line.badge, line.reason) == ("bfloat16/naive", "not to be used", "loses its updates")
    assert "late EDQ of 0.25" in line.hint and not any(other.badge for other in others)
    # The late values that the verdict uses, and not the run's sums.
    assert {"0.250", "75 %"} < {cell.text for cell in line.cells} and "0.990" not in {cell.text for cell in line.cells}


def test_what_is_printed_alike_is_not_in_bold(make_run: MakeRun) -> None:
    def memory(*sizes: float) -> dict[str, list[str]]:
        made_up = zip(("bfloat16/master", "bfloat16/word"), sizes, strict=True)
        return bold(
            [
                run
                for recipe, size in made_up
                for run in made(make_run, recipe, [3.0, 3.0], peak_memory_bytes=size * 2**20)
            ]
        )

    assert memory(740.12, 740.0) == {"bfloat16/master": [], "bfloat16/word": []}
    assert memory(750.0, 740.0)["bfloat16/word"] == ["740 MiB"]
    # More than half a percent, and yet the same on paper.
    assert memory(3.4, 2.6) == {"bfloat16/master": [], "bfloat16/word": []}
    worse = made(make_run, "bfloat16/master", [3.00002, 3.00002, 3.00002])
    better = made(make_run, "bfloat16/word", [3.00001, 3.00001, 3.00001])
    assert bold(worse + better) == {"bfloat16/master": [], "bfloat16/word": []}


def test_recipes_that_spend_the_same_share_the_bold(make_run: MakeRun) -> None:
    runs = made(make_run, "bfloat16/master", [3.0], bytes_per_param=16.0)
    runs += made(make_run, "bfloat16/word", [3.0], bytes_per_param=8.04)
    runs += made(make_run, "float8-row/word", [3.0], bytes_per_param=8.0)
    assert bold(runs) == {"bfloat16/master": [], "bfloat16/word": ["8.04"], "float8-row/word": ["8"]}
    assert bold(runs[1:]) == {"bfloat16/word": [], "float8-row/word": []}


def test_every_recipe_has_a_mark_of_its_own(make_run: MakeRun) -> None:
    legend = re.search(
        r'<div class="legend.*?</div>', page_of([make_run(f"made/recipe{place}") for place in range(32)]), re.S
    )
    assert legend is not None
    assert len(set(re.findall(r"<svg.*?</svg>", legend[0], re.S))) == 32


# ── questions of named sets ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_page_with_a_sets_recipes_answers_its_question() -> None:
    runs = sixteen_bit_runs(seconds={"bfloat16/naive": 0.75}, losses={"bfloat16/naive": (4.51, 4.6, 4.69)})
    found = compare_runs(runs)
    (asked,) = questions(groups_of(found), found)
    assert list(asked.table.columns) == [
        "Step",
        "Relative",
        "State",
        "Activations",
        "Peak",
        "Loss minus float32/float32",
    ]
    by_recipe = {line.recipe: [cell.text for cell in line.cells] for line in asked.table.lines}
    assert list(by_recipe) == list(ROW.needed)
    assert by_recipe["bfloat16/naive"] == ["750 ms", "1.50 ×", "8.0 MiB", "15.0 MiB", "23.0 MiB", "+0.5000"]
    assert by_recipe["float32/float32"] == ["500 ms", "1.00 ×", "16.0 MiB", "30.0 MiB", "46.0 MiB", "–"]
    page = page_of(runs)
    assert 'id="question-sixteen-bit"' in page and ROW.question in page
    assert all(str(escape(sentence)) in page for sentence in asked.sentences)
    assert 'id="question-' not in page_of(sixteen_bit_runs(recipes=ROW.needed[1:]))


def test_counted_memory_is_a_column_of_every_comparison() -> None:
    runs = sixteen_bit_runs(recipes=ROW.needed[:2])
    found = compare_runs(runs)
    table = cost_table(groups_of(found), found)
    cells = [{cell.column: cell.text for cell in line.cells} for line in table.lines]
    assert [(cell["Activations"], cell["Peak of tensors"]) for cell in cells] == [
        ("30.0 MiB", "46.0 MiB"),
        ("20.0 MiB", "36.0 MiB"),
    ]
    shown = found.table().plain().splitlines()
    assert "activ. MiB" in shown[0] and "peak MiB" in shown[0] and "46.0" in shown[1]
    for run in runs:
        assert run.summary is not None
        for name in ("activation_bytes", "peak_tensor_bytes"):
            run.summary.pop(name)
    without = compare_runs(runs).table().plain().splitlines()
    assert "activ. MiB" not in without[0] and "1.0" in without[1]


# ── events ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def skip(step: int) -> dict[str, Any]:
    return {"kind": "skip", "step": step, "message": f"scale {step}"}


def warnings_of(count: int) -> tuple[dict[str, Any], ...]:
    names = [f"layer.{place}" for place in range(count)]
    return tuple(
        {"kind": "warning", "step": 5, "message": f"'{name}' loses", "tensor": name, "advice": "split"}
        for name in names
    )


def test_repetitions_are_one_row_with_their_tensors(make_run: MakeRun) -> None:
    ((row,), more) = event_rows([(make_run(events=warnings_of(40)), "a")])
    assert (row.steps, row.event["message"], more) == ("5", "'layer.0' loses", 0)
    assert row.more == [f"layer.{place}" for place in range(1, 40)]
    page = page_of([make_run(events=warnings_of(MAX_REPETITIONS + 3))])
    assert f"and {MAX_REPETITIONS + 2} more like it" in page and "and 2 more in events.jsonl" in page


def test_a_stretch_of_skips_is_one_row(make_run: MakeRun) -> None:
    # Another kind of event on the same steps does not split the stretch.
    others = ({"kind": "nonfinite", "step": 4, "message": "inf"}, {"kind": "nonfinite", "step": 30, "message": "inf"})
    events = (skip(3), skip(4), others[0], *map(skip, range(5, 21)), others[1], skip(25))
    rows, _ = event_rows([(make_run(events=events), "a")])
    assert [(row.steps, row.event["kind"]) for row in rows] == [
        ("3–20", "skip"),
        ("4", "nonfinite"),
        ("30", "nonfinite"),
        ("25", "skip"),
    ]
    assert len(rows[0].more) == 17 and rows[0].more[-1] == "step 20: scale 20"


def test_the_run_with_most_events_does_not_displace_the_others(make_run: MakeRun) -> None:
    loud = make_run(events=tuple(map(skip, range(0, 4 * MAX_EVENT_ROWS, 2))))
    quiet = make_run(seed=1, events=(skip(1), {"kind": "finish", "step": 9, "message": "done"}))
    rows, more = event_rows([(loud, "loud"), (quiet, "quiet")])
    assert (len(rows), more) == (MAX_EVENT_ROWS, MAX_EVENT_ROWS + 2)
    assert [row.steps for row in rows if row.run == "quiet"] == ["1"]
    assert f"{MAX_EVENT_ROWS + 2} more rows are in events.jsonl" in page_of([loud, quiet])


def test_checkpoints_are_not_folded(make_run: MakeRun) -> None:
    events = tuple({"kind": "checkpoint", "step": step, "message": "kept"} for step in (1, 2))
    rows, _ = event_rows([(make_run(events=events), "a")])
    assert [row.steps for row in rows] == ["1", "2"]


def test_a_long_name_breaks_between_its_parts_and_a_number_never(make_run: MakeRun) -> None:
    event = {"kind": "warning", "step": 1, "message": "model.layers.0.post_norm.weight lost 0.07 <b>"}
    page = page_of([make_run(events=(event,))])
    assert "model.<wbr>layers.0.<wbr>post_<wbr>norm.<wbr>weight lost 0.07 &lt;b&gt;" in page
