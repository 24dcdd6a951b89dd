"""Published training runs agree with themselves, and a rule holds a part of them out."""

from __future__ import annotations

from typing import Any

import pytest

from benchmark_modules import benchmark_module
from narrowgauge.planner.efficiency import SOFTWARE

MEASURED = {
    "iteration_seconds", "tokens_per_second_per_chip", "model_tflops_per_chip", "hardware_tflops_per_chip",
    "mfu_percent", "hfu_percent", "peak_tflops", "flop_convention",
    "peak_memory_gib", "peak_memory_gb", "chip_hours", "tokens", "days_for_300e9_tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def published() -> Any:
    return benchmark_module("_published")


@pytest.fixture(scope="module")
def runs(published: Any) -> list[Any]:
    return [*published.load(), *published.load(held_out=True)]


@pytest.fixture(scope="module")
def later(published: Any) -> list[Any]:
    return [*published.load(later=True), *published.load(held_out=True, later=True)]


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("held_out", [False, True])
def test_a_run_is_held_out_by_its_name_alone(published: Any, held_out: bool, is_later: bool) -> None:
    found = published.load(held_out, is_later)
    assert {published.is_held_out(run.name, is_later) for run in found} == {held_out}
    assert {run.held_out for run in found} == {held_out}


def test_half_of_the_second_round_is_held_out(runs: list[Any], later: list[Any]) -> None:
    assert len({run.name for run in [*runs, *later]}) == len(runs) + len(later)
    assert len(later) > 80 and 0.4 < sum(run.held_out for run in later) / len(later) < 0.6


def test_software_is_a_row_of_the_shares(runs: list[Any], later: list[Any]) -> None:
    assert {run.software for run in [*runs, *later]} - {""} == set(SOFTWARE)


def test_names_are_unique_and_about_a_third_is_held_out(runs: list[Any]) -> None:
    assert len({run.name for run in runs}) == len(runs) > 100
    assert 0.3 < sum(run.held_out for run in runs) / len(runs) < 0.4


def test_every_run_has_a_source_and_a_measured_value(runs: list[Any], later: list[Any]) -> None:
    for run in [*runs, *later]:
        assert run.source and set(run.measured) <= MEASURED, run.name
        assert set(run.measured) - {"flop_convention", "peak_tflops", "tokens"}, run.name


def test_parallel_sizes_multiply_to_the_chips(runs: list[Any], later: list[Any]) -> None:
    for run in [*runs, *later]:
        if run.layout:
            ranks = run.layout["tensor"] * run.layout["pipeline"] * run.layout["context"] * run.layout["data"]
            assert ranks == run.machine["chips"], run.name
            assert run.layout["data"] % run.layout.get("expert", 1) == 0 or run.layout["tensor"] > 1, run.name
            assert run.step["global_batch"] % run.layout["data"] == 0, run.name


def test_values_printed_of_one_run_agree(published: Any, runs: list[Any], later: list[Any]) -> None:
    """A copying error, a wrong shape or a wrong FLOP convention would show; what is left is the sources' rounding."""
    compared = 0
    for run in [*runs, *later]:
        rates = published.rates(run)
        compared += len(rates) > 1
        assert max(rates.values()) / min(rates.values()) < 1.04, (run.name, rates)
    assert compared > 70


def test_shapes_have_the_published_parameter_counts(published: Any, runs: list[Any]) -> None:
    counts = {run.model: published.shape(run).parameters for run in runs if run.step.get("sequence_length") == 2048}
    assert counts["mpt-7b"] == 6_658_859_008
    assert counts["llama-30b"] == 32_528_943_616
    assert counts["gpt3-175b"] == pytest.approx(174.6e9, rel=1e-3)
    assert counts["megatron-1t"] == pytest.approx(1008.0e9, rel=1e-3)
