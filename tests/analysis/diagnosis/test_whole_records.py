"""Two runs, everything recorded: evaluations, model, optimizer, tensors that one run lacks, factors, and all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.diagnosis.test_alignment import NUMEL, TENSORS, write
from narrowgauge.analysis.diagnosis.pairs.first_difference import FirstDifference
from narrowgauge.analysis.diagnosis.pairs.two_runs import TwoRuns, compare_two
from narrowgauge.analysis.diagnosis.replay_findings import MeasuredEnvelope, ReplayedPair
from narrowgauge.runs.record import Run


def both(folder: Path, steps: int = 4, **given: Any) -> tuple[Run, Run]:
    return write(folder / "a", steps=steps), write(folder / "b", steps=steps, **given)


def test_evaluations_are_compared(tmp_path: Path) -> None:
    one, other = both(tmp_path)
    one.evals.append({"step": 4, "val_loss": 2.5})
    other.evals.append({"step": 4, "val_loss": 5.4})
    found = compare_two(one, other)
    first = found.alignment.first_difference
    assert first is not None and (first.step, first.stage, first.values) == (4, "evaluation", (2.5, 5.4))
    assert found.reason is not None and found.reason.name == "evaluation", found.text()
    other.evals[0]["val_loss"] = 2.5
    assert compare_two(one, other).alignment.first_difference is None


def test_an_evaluation_and_the_next_step_differ_by_an_update(tmp_path: Path) -> None:
    one, other = both(tmp_path, prints=False, changed={(3, "output:layers.0"): 1.1})
    one.fingerprints.clear()
    one.evals.append({"step": 2, "val_loss": 2.5})
    other.evals.append({"step": 2, "val_loss": 5.4})
    first = compare_two(one, other).alignment.first_difference
    assert first is not None and (first.step, first.stage) == (2, "update")


def test_the_models_and_optimizers_are_compared(tmp_path: Path) -> None:
    one, other = both(tmp_path, changed={(1, "output:layers.0"): 1.5})
    one.run["model"], other.run["model"] = {"num_parameters": 1000}, {"num_parameters": 1200}
    found = compare_two(one, other)
    assert found.evidence[0] == "not the same: num_parameters 1000 and 1200"
    assert found.reason is not None and found.reason.name == "other-model"
    other.run["model"] = one.run["model"]
    one.run["optimizer"], other.run["optimizer"] = {"eps": 1e-8}, {"eps": 1e-6}
    assert compare_two(one, other).evidence[0] == "not the same: eps 1e-08 and 1e-06"
    other.run["optimizer"] = one.run["optimizer"]
    said = compare_two(one, other).evidence[0]
    assert said == "the same in both: settings, data, model, optimizer, versions, machine"
    del one.run["data"], other.run["model"]  # what one of them does not say is not called the same
    assert compare_two(one, other).evidence[0] == "the same in both: settings, optimizer, versions, machine"


def with_departures(folder: Path, steps: range, factors: tuple[float, ...], kind: str = "grad") -> TwoRuns:
    """A second run in which the gradient of one layer, then of all, is off by the same factor in each step."""
    names = [name for name in TENSORS if name.startswith(f"{kind}:")]
    changed: dict[Any, Any] = {
        (step, name): factor for step in steps for name, factor in zip(names, factors, strict=True)
    }
    return compare_two(*both(folder, steps=6, changed={**changed, "only": True}))


def test_damage_does_not_recur(tmp_path: Path) -> None:
    """Layers that depart equally in every step are code; only what is there once, and not again, may be damage."""
    for number, (steps, factors) in enumerate(((range(2, 7), (1.02, 1.02)), (range(2, 7), (1.02, 1.0)))):
        found = with_departures(tmp_path / str(number), steps, factors)
        assert found.reason is not None and found.reason.name == "bug", found.text()
    first = write(tmp_path / "c", steps=6)
    changed: dict[Any, Any] = {(2, "grad:layers.0"): 1.02, "only": True}
    changed |= {(step, name): 1.02 for step in range(3, 7) for name in TENSORS if name.startswith("grad:")}
    found = compare_two(first, write(tmp_path / "d", steps=6, changed=changed))
    assert found.reason is not None and found.reason.name == "bug", found.text()
    once = with_departures(tmp_path / "once", range(2, 3), (1.0, 1.02))
    assert once.reason is not None and once.reason.name == "silent-corruption", once.text()


@pytest.mark.parametrize("factor", [1 + 1e-7, 1.01])
def test_a_record_that_parts_again_from_replays_that_agree_is_other_code(factor: float, tmp_path: Path) -> None:
    one, other = both(tmp_path, prints=False, changed={(3, "output:layers.1"): factor})
    for repeats in ((True, False), (False, True)):
        replayed = ReplayedPair(2, repeats, agree=True, persists=True)
        found = compare_two(one, other, replayed)
        assert found.reason is not None and found.reason.name == "bug", found.text()
    assert compare_two(one, other, ReplayedPair(2, (True, False), agree=True, persists=None)).reason is None


def test_a_varying_order_of_sums_is_named_only_where_it_was_measured(tmp_path: Path) -> None:
    """A small difference alone may be anything; a repetition that differs, or an envelope that holds it, tells."""
    one, other = both(tmp_path, changed={(2, "grad:layers.1"): 1 + 1e-6})
    found = compare_two(one, other)
    assert found.reason is None and found.reasons[0][0].name == "nondeterminism", found.text()
    inside = MeasuredEnvelope(2, "grad:layers.1", (1e-6, 2e-6))
    measured = compare_two(one, other, ReplayedPair(1, (None, None), agree=False, envelope=inside))
    assert measured.reason is not None and measured.reason.name == "nondeterminism", measured.text()
    varies = compare_two(one, other, ReplayedPair(1, (False, False), agree=True, persists=True))
    assert varies.reason is not None and varies.reason.name == "nondeterminism", varies.text()


def test_growth_over_all_rows_is_more_than_the_first_row_that_differs(tmp_path: Path) -> None:
    """A leak from later tokens begins as small as rounding, and then halves the loss."""
    one, other = both(tmp_path, steps=40, prints=False)
    one.fingerprints.clear()
    for row in other.steps:
        row["loss"] *= 1 - 1e-4 if row["step"] < 5 else max(0.5, 1 - 0.02 * row["step"])
    found = compare_two(one, other)
    assert found.reason is not None and found.reason.name == "bug", found.text()
    assert "from step" in found.text() and "lower" in found.text()
    for number, row in enumerate(other.steps):  # rounding that training amplifies has either sign
        row["loss"] = one.steps[number]["loss"] * (1 + 1e-3 * (-1) ** number)
    assert compare_two(one, other).reason is None


def test_what_only_one_run_has_is_the_answer(tmp_path: Path) -> None:
    one, other = both(tmp_path)
    for row in one.fingerprints:
        row["tensors"]["grad:layers.2"] = [5, 1.0, NUMEL]
    found = compare_two(one, other)
    first = found.alignment.first_difference
    assert first is not None and (first.step, first.stage, first.tensor) == (1, "grad", "grad:layers.2"), found.text()
    assert "only a has grad:layers.2" in found.text()
    # A kind that one of them did not record at all, as of a compiled model, says nothing.
    for row in one.fingerprints:
        del row["tensors"]["grad:layers.2"]
    for row in other.fingerprints:
        row["tensors"] = {name: entry for name, entry in row["tensors"].items() if not name.startswith("output:")}
    assert compare_two(one, other).alignment.first_difference is None


def test_a_constant_factor_over_all_gradients_is_said_as_that_number(tmp_path: Path) -> None:
    changed = {(step, name): 2.0 for step in range(1, 7) for name in TENSORS if name.startswith("grad:")}
    found = compare_two(*both(tmp_path / "a", steps=6, changed={**changed, "only": True}))
    assert "all gradients of b are 2 times those of a" in found.text(), found.text()
    one, other = both(tmp_path / "b", steps=30, prints=False)
    one.fingerprints.clear()
    for row in other.steps:
        row["grad_norm"] *= 0.25
    found = compare_two(one, other)
    assert "all gradient norms of b are 0.25 times those of a" in found.text(), found.text()
    assert found.reason is not None and found.reason.name == "bug"


def test_elementwise_updates_of_equal_inputs_do_not_round(tmp_path: Path) -> None:
    """Weights that differ after an update whose gradients are equal: no sum came between."""
    one, other = both(
        tmp_path,
        machine={"num_threads": 1},
        changed={(3, "weight:layers.0"): 1 + 1e-7, (3, "weight:layers.1"): 1 + 1e-7},
    )
    found = compare_two(one, other)
    assert found.reason is None or found.reason.name == "bug", found.text()
    assert "order-of-sums" not in {row.name for row, share in found.reasons if share > 0.1}


def test_first_difference_is_exported() -> None:
    assert FirstDifference(1, "evaluation").relative != FirstDifference(1, "evaluation").relative  # NaN: no values
