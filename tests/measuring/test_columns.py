"""The one table of columns: what laws declare is what they read, and no sentence claims more."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from measuring.test_first_difference import make_run
from measuring.test_laws import CASES
from narrowgauge.measuring.diagnose.first_difference import UNLIKE, first_difference
from narrowgauge.measuring.diagnose.laws import RULES, Laws
from narrowgauge.measuring.diagnose.step_metrics import COLUMNS, StepMetrics
from narrowgauge.measuring.provenance import unlike_ranks
from narrowgauge.measuring.reading import STAGES
from narrowgauge.measuring.watch.optimizer_columns import columns_of
from narrowgauge.runs.foreign_logs import NAMES
from narrowgauge.runs.record import Run, read_run

UNREAD = ("loss", "norm", "size", "share")
"""Units of columns that a law could judge."""
OF_NO_LAW = {"noise", "lost_fraction", "imprecision_share"}
"""Columns that are high in healthy runs: of stochastic rounding, and of weights that barely move."""


def test_each_column_has_a_stage_and_a_unit_and_a_law_or_a_reason():
    for name, column in COLUMNS.items():
        if name != "step":
            assert column.stage in STAGES and column.unit, name
    declared = {name for rule in RULES for name in rule.needs | rule.also}
    judged = {name for name, column in COLUMNS.items() if column.unit in UNREAD}
    assert judged - declared == OF_NO_LAW
    assert declared <= COLUMNS.keys()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.law.__name__)
def test_a_law_reads_what_it_declares(rule):
    read = set()

    class Watched(StepMetrics):
        def __getattr__(self, name):
            read.add(name)
            return super().__getattr__(name)

    for steps, _, _ in CASES.values():
        law = rule.law(lambda *args, **options: None)
        next(law)
        for step in steps:
            law.send(Watched(step.step, **step.columns))
    assert read <= rule.needs | rule.also
    assert rule.needs <= read


def test_a_log_of_another_program_fills_what_a_law_reads(tmp_path):
    """Of each column that a log may have, each of its names arrives in a step."""
    log = tmp_path / "log.csv"
    for column, names in NAMES.items():
        for name in names:
            if column == "step" or "*" in name or column not in COLUMNS:
                continue
            log.write_text(f"step,{name}\n1,0.5\n")
            run = read_run(log)
            (step,) = map(StepMetrics.of, run.steps or run.evals)
            assert getattr(step, column) == 0.5, name


@pytest.mark.parametrize("name", [n for n, c in COLUMNS.items() if c.unit not in UNLIKE])
def test_a_column_that_alone_differs_is_told_and_is_no_rounding(name):
    runs = make_run("a"), make_run("b")
    other = 0.201 if COLUMNS[name].unit == "setting" else 0.6
    for run, value in zip(runs, (0.2, other), strict=True):
        (run.evals if name == "val_loss" else run.steps)[:] = [{"step": 1, name: value}]
    result = first_difference(*runs)
    assert not result.is_rounding and result.readings[0].what == name, str(result)
    assert result.readings[0].stage == COLUMNS[name].stage


def test_no_setting_of_the_program_differs_where_rounding_is_told():
    changed = {(2, "grad:layers.1"): 1 + 1e-6}
    assert first_difference(
        make_run("a"), make_run("b", changed, machine={"num_threads": 1})
    ).is_rounding
    for table in ({"config": {"lr": 2e-3}}, {"optimizer": {"eps": 1e-4}}):
        first = make_run(
            "a", **{name: dict.fromkeys(values, 0.5) for name, values in table.items()}
        )
        assert not first_difference(first, make_run("b", changed, **table)).is_rounding


def test_what_no_record_says_explains_nothing():
    """Without a recorded format, or a count of tokens, no bound of rounding is known."""
    unknown = [make_run(name, config={"recipe": ""}) for name in "ab"]
    unknown[1].steps[2]["loss"] *= 1 + 1e-7
    assert not first_difference(*unknown).is_rounding and "no bound" in str(
        first_difference(*unknown)
    )
    uncounted = [make_run(name, prints=False) for name in "ab"]
    uncounted[1].steps[2]["loss"] *= 1 + 1e-7
    assert not first_difference(*uncounted).is_rounding


BAD = {
    "loss": math.nan, "val_loss": math.nan, "lr": math.nan, "grad_norm": math.nan, "limit": math.nan, "arrived": 0.0,
    "largest": math.inf, "edq": 0.2, "utilization": 0.2, "skipped": True, "kept": True, "same_data": True, "stored": {"a": 0.2},
    "apart": ["a"], "unsummed": ["a"], "loss_scale": (2.0, 1024.0), "tokens_per_second": (1000.0, 10.0),
}  # fmt: skip
"""By column: a bad value, or the values before and from step 30."""


@pytest.mark.parametrize("name", [n for n, c in COLUMNS.items() if c.area])
def test_a_column_alone_makes_its_law_speak(name):
    """Of a record with one bad column nothing says that its area was looked at, and nothing found."""
    rows = []
    for step in range(1, 101):
        bad = BAD[name]
        if isinstance(bad, tuple):
            bad = bad[step >= 30]
        rows.append({"step": step, name: bad})
    run = Run(Path("run"), {}, *([[], rows] if name == "val_loss" else [rows, []]))
    diagnosis = ng.diagnose(run)
    assert not diagnosis.ok, diagnosis


CONTRADICTIONS = [
    ({"limit": 1.0, "grad_norm": 6.0, "arrived": 0.38}, "clip-norm"),
    ({"limit": 1.0, "grad_norm": 6.0, "arrived": 1.0}, ""),
    ({"limit": 1.0, "grad_norm": 0.38, "arrived": 0.38}, ""),
    ({"limit": 1.0, "grad_norm": math.inf, "arrived": 0.38, "skipped": True}, ""),
    ({"loss": 2.5, "bad": ["a"], "skipped": False}, "nonfinite"),
    ({"loss": 2.5, "bad": ["a"], "skipped": True}, ""),
]
"""Numbers of one row, and the reading where they contradict each other."""


@pytest.mark.parametrize(("row", "kind"), CONTRADICTIONS)
def test_two_numbers_of_a_row_that_contradict_each_other_are_told(row, kind):
    readings = Laws().read(StepMetrics.of({"step": 1} | row))
    assert [reading.what for reading in readings] == [kind] * bool(kind)


def diagnosed(rows: list[dict[str, Any]], **run: Any) -> Any:
    return ng.diagnose(Run(Path("run"), run, rows))


def test_an_area_says_how_many_rows_showed_it():
    """A watch may end, and an audit is one step of ten."""
    rows = [{"step": step, "loss": 2.0, "skipped": False} for step in range(1, 31)]
    for row in rows[:10]:
        row |= {"arrived": 0.5, "kept": False}
    for row in rows[9::10]:
        row |= {"edq": 1.0, "edq_error": 0.01}
    words = str(diagnosed(rows))
    assert "gradients that reach the step (10 of 30 rows)" in words
    assert "audits (3 of 30 rows)" in words and "losses," in words


@pytest.mark.parametrize("name", [n for n, c in COLUMNS.items() if c.area])
def test_one_row_has_no_course(name):
    """What is not finite, and what ranks hold, is told of one row. All else is read over several."""
    bad = BAD[name]
    rows = [{"step": 1, name: bad[0] if isinstance(bad, tuple) else bad}]
    diagnosis = ng.diagnose(
        Run(Path("run"), {}, *([[], rows] if name == "val_loss" else [rows, []]))
    )
    area = COLUMNS[name].area
    is_read = any(rule.least == 1 for rule in RULES if name in rule.needs | rule.also)
    assert (diagnosis.unseen.get(area) == "too few rows") != is_read
    assert diagnosis.ok or area in diagnosis.areas


def test_a_step_that_has_a_validation_loss_is_a_row():
    rows = [{"step": step, "loss": 2.0, "val_loss": 2.5} for step in range(1, 31)]
    assert "30 rows watched" in diagnosed(rows).verdict


def test_what_a_run_could_not_have_had_is_not_named():
    rows = [{"step": step, "loss": 2.0, "arrived": 0.5} for step in range(1, 31)]
    ranks = COLUMNS["apart"].area
    assert ranks not in diagnosed(rows).unseen
    two = {"machine": {"ranks": 2}}
    assert ranks in diagnosed(rows, **two).unseen
    for row in rows:
        row |= {"apart": [], "unsummed": []}
    assert ranks in diagnosed(rows, **two).areas, "a measured empty list was looked at"
    assert "use of the device" not in diagnosed(rows).unseen
    log = diagnosed(rows, source={"file": "log.csv"})
    assert "use of the device" in log.unseen and "audits" not in log.unseen


@pytest.mark.parametrize("storage", ["stochastic", "word", "naive"])
def test_audits_of_a_random_rounding_are_not_accused(storage):
    """At a small rate the EDQ of few elements is far from 1 by chance."""
    for rate in (1e-7, 1e-5):
        told = set()
        laws = Laws()
        torch.manual_seed(0)
        model = torch.nn.Linear(32, 64).bfloat16()
        optimizer = ng.AdamW(model.parameters(), lr=rate, storage=storage, audit_every=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(1, 31):
                model(torch.randn(16, 32, dtype=torch.bfloat16)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                readings = laws.read(StepMetrics.of({"step": step} | columns_of(model, optimizer)))
                told.update(reading.what for reading in readings)
        assert told == ({"stored-share"} if storage == "naive" else set())


def test_a_rank_with_another_arithmetic_is_named():
    results = [{"gelu": "a", "sum": "b"}] * 4
    results[2] = {"gelu": "c", "sum": "b"}
    assert unlike_ranks(results) == {"2": ["gelu"]}
    assert "Rank 2 rounds otherwise" in str(diagnosed([], unlike_ranks={"2": ["gelu"]}))
