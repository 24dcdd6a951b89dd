"""The generator of faults: its trials are repeatable, plant what they say, and judge both ways."""

from __future__ import annotations

import random

import pytest

from benchmark_modules import benchmark_module
from recompute.audited_loop import Loop

faults = benchmark_module("random_faults")


@pytest.mark.parametrize(("seed", "answer"), [(1, "located"), (2, "first"), (17, "first")])
def test_a_trial_is_repeatable_and_judged(seed: int, answer: str) -> None:
    row = faults.trial(seed)
    assert (row["answer"], row["in three"]) == (answer, "yes" if answer == "first" else ""), row
    assert faults.trial(seed) == row


@pytest.mark.parametrize(("seed", "answer"), [(0, "first"), (6, "first"), (18, "silent"), (28, "first")])
def test_a_trial_of_data_or_evaluations_is_repeatable_and_judged(seed: int, answer: str) -> None:
    row = faults.data_trial(seed)
    assert row["answer"] == answer, row
    assert faults.data_trial(seed) == row


@pytest.mark.parametrize(
    ("kind", "seed", "answer"),
    [("counts", 4, "first"), ("schedules", 3, "first"), ("positions", 9, "first"), ("positions", 13, "silent")],
)
def test_a_trial_of_a_further_kind_is_repeatable_and_judged(kind: str, seed: int, answer: str) -> None:
    row = faults.kind_trial(kind, seed)
    assert row["answer"] == answer and ("(no fault)" in row["fault"]) is (answer == "silent"), row
    assert faults.kind_trial(kind, seed) == row


def test_a_fault_that_is_planted_changes_the_loop_and_a_wrong_name_is_not_right() -> None:
    fault = faults.of_gradient(random.Random(3), Loop(every=0))
    loop, healthy = Loop(every=0), Loop(every=0)
    fault.plant(loop)
    assert not loop.run(3).bits().equal(healthy.run(3).bits()), fault.says
    assert fault.piece == "gradient" and "rate" not in fault.names
