"""Answers to the questions of named sets of recipes: every sentence follows from what the runs measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from analysis.comparison.made_runs import MIB, ROW, sixteen_bit_runs
from narrowgauge.analysis.comparison.answers import Answer
from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.runs.record import Run
from narrowgauge.spec import chips


def answer(found: Sequence[Run]) -> Answer:
    (one,) = compare_runs(found).answers
    return one


def said(one: Answer, start: str) -> str:
    """The sentence that begins so, with plain spaces."""
    plain = [text.replace("\N{NO-BREAK SPACE}", " ") for text in one.sentences]
    return next((text for text in plain if text.startswith(start)), "")


def test_a_comparison_with_all_needed_recipes_answers_and_one_without_does_not() -> None:
    assert answer(sixteen_bit_runs()).row is ROW
    assert answer([*sixteen_bit_runs(), *sixteen_bit_runs(recipes=["tfloat32/float32"])]).row is ROW
    for left_out in ROW.needed:
        rest = [name for name in ROW.needed if name != left_out]
        assert compare_runs(sixteen_bit_runs(recipes=rest)).answers == ()


def test_equal_bytes_and_data_sheets_leave_precision_and_range() -> None:
    one = answer(sixteen_bit_runs())
    assert one.sentences[-1] == (
        "So float16 and bfloat16 differ in precision and range, not in memory or speed by the data sheets."
    )
    assert said(one, "Counted memory") == (
        "Counted memory: float16/float32 and bfloat16/float32 take the same (state 16.0 MiB, activations 20.0 MiB, peak "
        "36.0 MiB); float16/naive and bfloat16/naive take the same (state 8.0 MiB, activations 15.0 MiB, peak 23.0 MiB)."
    )
    assert said(one, "Of the peak of float32/float32, 46.0 MiB").endswith(
        "float16/float32 0.78, bfloat16/float32 0.78, float16/naive 0.50 and bfloat16/naive 0.50."
    )
    assert "float16 takes 16 bits, 11 of them significant, and reaches from 6e-08 to 65504" in said(
        one, "float16 takes"
    )


def test_bytes_that_differ_are_said_to_differ() -> None:
    one = answer(sixteen_bit_runs(summaries={"bfloat16/naive": {"activation_bytes": 18 * MIB}}))
    assert "bfloat16/naive takes 1.20 times the activations of float16/naive" in said(one, "Counted memory")
    assert one.sentences[-1].startswith("So float16 and bfloat16 differ in precision, range and memory, not in speed")


def test_memory_that_was_not_counted_is_not_concluded_from() -> None:
    one = answer(sixteen_bit_runs(summaries={"bfloat16/naive": {"peak_tensor_bytes": None}}))
    assert said(one, "The memory of these runs was not counted.") and not said(one, "Counted memory")
    assert "memory" not in one.sentences[-1]


SLOW = {"bfloat16/float32": 0.8}


def test_times_of_an_emulating_machine_say_nothing_of_the_formats() -> None:
    one = answer(sixteen_bit_runs(seconds=SLOW))
    assert said(one, "Times on this machine say nothing of the formats: it does not multiply float16 or bfloat16,")
    assert "bfloat16/float32 1.60 times that of float16/float32" in said(one, "Times on this machine")
    assert one.sentences[-1].endswith("not in memory or speed by the data sheets.")
    # One of the two is enough: the ratio compares a product with an emulated one.
    half = answer(sixteen_bit_runs(seconds=SLOW, multiplies=["float32", "bfloat16"]))
    assert said(half, "Times on this machine say nothing of the formats: it does not multiply float16,")


def test_times_of_a_machine_that_multiplies_both_are_the_formats() -> None:
    native = ["float32", "float16", "bfloat16"]
    slow = answer(sixteen_bit_runs(seconds=SLOW, multiplies=native))
    assert slow.sentences[-1].startswith("So float16 and bfloat16 differ in precision, range and speed, not in memory")
    even = answer(sixteen_bit_runs(seconds={"bfloat16/float32": 0.52}, multiplies=native))
    assert said(even, "A median step took: bfloat16/float32 1.04 times").endswith("within the noise of timings.")
    assert even.sentences[-1].endswith("not in memory or speed.")
    assert said(
        answer(sixteen_bit_runs(multiplies=None)),
        "Whether this machine multiplies float16 or bfloat16 was not recorded",
    )


def test_what_was_left_out_is_named_with_the_reason() -> None:
    why = "tfloat32/float32 was left out: this machine does not multiply tfloat32, and speed is its only benefit."
    assert answer(sixteen_bit_runs()).sentences[0] == why
    assert (
        answer(sixteen_bit_runs(multiplies=["float32", "tfloat32"])).sentences[0] == "tfloat32/float32 was not trained."
    )
    assert not said(answer(sixteen_bit_runs(recipes=ROW.recipes)), "tfloat32/float32 was")


def test_losses_are_paired_and_read_with_their_interval() -> None:
    one = answer(sixteen_bit_runs(losses={"bfloat16/naive": (4.51, 4.60, 4.69)}))
    text = said(one, "Validation loss")
    assert "bfloat16/float32 minus float16/float32 0.0000 ± 0.0000 (not distinguishable)" in text
    assert "bfloat16/naive minus float16/naive +0.5000 ± 0.0248 (certainly worse)" in text
    with_nan = answer(sixteen_bit_runs(losses={"float16/naive": (float("nan"),) * 3}))
    assert "float16/naive ended without a loss" in said(with_nan, "Validation loss")


def test_the_price_of_range_and_of_precision_is_what_the_runs_recorded() -> None:
    assert not said(answer(sixteen_bit_runs()), "Steps skipped") and not said(
        answer(sixteen_bit_runs()), "Of late updates"
    )
    one = answer(sixteen_bit_runs(summaries={"float16/float32": {"num_skipped": 1}}))
    assert said(one, "Steps skipped") == (
        "Steps skipped because gradients left the range: float16/float32 3 of 30; the others none."
    )
    found = sixteen_bit_runs()
    for run in found:
        if run.config["recipe"] == "bfloat16/naive":
            for row in run.steps[-3:]:
                row["edq"] = 0.25
    assert "bfloat16/naive 0.250" in said(answer(found), "Of late updates the weights took (EDQ, 1 loses nothing)")


def test_data_sheets_are_read_and_not_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [chip for chip in chips.CHIPS.values() if {"float16", "bfloat16"} <= set(chip.peak_tflops)]
    text = said(answer(sixteen_bit_runs()), f"All {len(both)} chips whose data sheets give both rates")
    assert "V100-SXM2-32GB" in text.partition(";")[2] and both[0].name not in text
    slower = dataclasses.replace(both[0], peak_tflops={**both[0].peak_tflops, "float16": 1.0})
    monkeypatch.setitem(chips.CHIPS, slower.name, slower)
    one = answer(sixteen_bit_runs())
    assert f"{slower.name} multiply the two at different ones" in said(one, f"Of {len(both)} chips")
    assert "speed by the data sheets, not in memory" in one.sentences[-1]
