"""Two runs: the first step and tensor in which they part, and the reason, for records with one known difference each.

The records are written here, entry by entry, so that what differs is known exactly; test_two_trainings.py trains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from narrowgauge.analysis.diagnosis.pairs.alignment import align
from narrowgauge.analysis.diagnosis.pairs.first_difference import STAGES
from narrowgauge.analysis.diagnosis.pairs.reasons import REASONS, weigh
from narrowgauge.analysis.diagnosis.pairs.two_runs import TwoRuns, compare_two
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.writer import RunWriter

SETTINGS: dict[str, Any] = {"recipe": "bfloat16/word", "seed": 0, "lr": 1e-3, "max_grad_norm": 1.0, "batch_size": 4}
MACHINE: dict[str, Any] = {"num_threads": 2, "capability": "AVX2", "device": "cpu"}
NUMEL = 1 << 20
TENSORS = (
    "tokens:batch", "output:layers.0", "output:layers.1", "grad:layers.1", "grad:layers.0",
    "weight:layers.0", "weight:layers.1", "exp_avg:layers.0", "exp_avg:layers.1",
)  # fmt: skip
CLIP = TENSORS[5:]


def write(
    folder: Path,
    *,
    settings: Any = None,
    machine: Any = None,
    arithmetic: Any = None,
    data: str = "a",
    changed: Any = None,
    prints: bool = True,
    steps: int = 4,
) -> Run:
    """A run of some steps, whose entries differ from those of every other one only where ``changed`` says.

    Args:
        changed: ``(step, tensor)`` to the factor of that tensor's norm; from then on, all that comes later differs too, unless
            the key ``"only"`` is there.
    """
    changed = dict(changed or {})
    only = changed.pop("only", False)
    run = {
        "config": {**SETTINGS, **(settings or {})},
        "machine": {**MACHINE, **(machine or {})},
        "versions": {"torch": "2.13.0"},
        "data": {"fingerprint": data},
        **({"arithmetic": arithmetic} if arithmetic else {}),
    }
    with RunWriter.create(folder, run) as writer:
        is_off = False
        for step in range(1, steps + 1):
            row: dict[str, list[float]] = {}
            for number, name in enumerate(TENSORS):
                factor = changed.get((step, name), 1.0)
                is_off = is_off or (factor != 1.0 and not only)
                off = factor != 1.0 or (is_off and name != "tokens:batch")
                row[name] = [
                    1000 * step + number + 0.5 * off,
                    2.0 * (factor if factor != 1.0 else 1 + 1e-4 * off),
                    NUMEL,
                ]
                row[name][0] = int(2 * row[name][0])
            writer.step(
                {
                    "step": step,
                    "loss": 3.0 + row["output:layers.1"][1],
                    "lr": 1e-3,
                    "grad_norm": row["grad:layers.0"][1],
                }
            )
            if prints:
                writer.fingerprint({"step": step, "tensors": row})
    return read_run(folder)


def test_every_reason_acts_at_stages_of_the_table_and_says_what_to_do() -> None:
    for row in REASONS.values():
        assert set(row.stages) <= set(STAGES) and row.size in ("any", "rounding", "above"), row.name
        assert row.remedy.endswith((".", ")")) and 0 < row.weight <= 1, row.name
    assert all(any(stage in row.stages for row in REASONS.values() if not row.decided_by) for stage in STAGES)


def test_equal_records_are_the_same_run_whatever_was_written_about_the_machine(tmp_path: Path) -> None:
    found = compare_two(write(tmp_path / "a"), write(tmp_path / "b", machine={"num_threads": 1}))
    assert found.alignment.first_difference is None and found.reason is None and not found.reasons
    assert (
        found.verdict == "The same in all that both recorded (4 steps), although they were given num_threads 2 and 1."
    )


def test_one_step_in_common_is_not_steps(tmp_path: Path) -> None:
    found = compare_two(write(tmp_path / "a", steps=1), write(tmp_path / "b"))
    assert found.verdict == "The same in all that both recorded (1 step)."


CASES: dict[str, tuple[dict[str, Any], str, str, int, str]] = {
    "another seed": (
        {"settings": {"seed": 1}, "changed": {(1, "tokens:batch"): 1.1}}, "random-numbers", "tokens", 1, "tokens:batch",
    ),
    "other data": ({"data": "b", "changed": {(1, "tokens:batch"): 1.1}}, "data", "tokens", 1, "tokens:batch"),
    "other batches": ({"changed": {(2, "tokens:batch"): 1.1}}, "data-order", "tokens", 2, "tokens:batch"),
    "another recipe": (
        {"settings": {"recipe": "float8-row/word"}, "changed": {(1, "output:layers.0"): 1.01}},
        "format", "output", 1, "output:layers.0",
    ),
    "fewer threads": (
        {"machine": {"num_threads": 1}, "changed": {(2, "grad:layers.1"): 1 + 1e-6}},
        "order-of-sums", "grad", 2, "grad:layers.1",
    ),
    "another processor": (
        {"machine": {"capability": "AVX512"}, "changed": {(2, "output:layers.1"): 1 + 1e-6}},
        "hardware", "output", 2, "output:layers.1",
    ),
    "another rate": (
        {"settings": {"lr": 2e-3}, "changed": {(1, "weight:layers.0"): 1.001}},
        "optimizer-settings", "update", 1, "weight:layers.0",
    ),
    "a gradient times 1.01": (
        {"changed": {(3, "grad:layers.0"): 1.01, (4, "grad:layers.0"): 1.01}}, "bug", "grad", 3, "grad:layers.0",
    ),
    "a gradient that is off in one step": (
        {"changed": {(3, "grad:layers.0"): 1.01}}, "silent-corruption", "grad", 3, "grad:layers.0",
    ),
    "a flipped bit of a weight": (
        {"changed": {(3, "weight:layers.1"): 1.5, "only": True}}, "silent-corruption", "update", 3, "weight:layers.1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_reason_the_step_and_the_tensor_are_named(case: str, tmp_path: Path) -> None:
    given, reason, stage, step, tensor = CASES[case]
    found = compare_two(write(tmp_path / "a"), write(tmp_path / "b", **given))
    parting = found.alignment.first_difference
    assert parting is not None
    assert (parting.stage, parting.step, parting.tensor) == (stage, step, tensor)
    assert found.reason is not None and found.reason.name == reason, found.text()
    assert len(found.text().splitlines()) <= 10
    assert found.to_dict()["reasons"][reason] == pytest.approx(found.reasons[0][1])


ARITHMETIC = {
    "settings": {"threads": "2", "torch": "2.13.0"},
    "results": {"sum of a tensor": "sequential #1", "softmax": "8 strided sums #2", "function silu": "1.83 ulp #3"},
}


@pytest.mark.parametrize(
    ("settings", "results", "reason"),
    [
        ({"threads": "1"}, {"sum of a tensor": "pairwise #4"}, "order-of-sums"),
        ({}, {"softmax": "4 strided sums #4"}, "order-of-sums"),
        ({"capability": "DEFAULT"}, {"softmax": "4 strided sums #4", "function silu": "1.9 ulp #5"}, "hardware"),
        ({"torch": "2.14.0"}, {"function silu": "1.9 ulp #5"}, "kernels"),
    ],
)
def test_the_measured_arithmetic_tells_orders_machines_and_versions_apart(
    settings: dict[str, str], results: dict[str, str], reason: str, tmp_path: Path
) -> None:
    other = {"settings": {**ARITHMETIC["settings"], **settings}, "results": {**ARITHMETIC["results"], **results}}
    changed = {(2, "output:layers.1"): 1 + 1e-6}
    first = write(tmp_path / "a", arithmetic=ARITHMETIC)
    found = compare_two(first, write(tmp_path / "b", arithmetic=other, changed=changed))
    assert found.reason is not None and found.reason.name == reason
    assert {each.name for each in found.alignment.differences} == set(results)


def test_a_setting_that_cannot_act_there_is_not_the_reason(tmp_path: Path) -> None:
    """The limit of the gradient norm changes no gradient of the first step: something else does."""
    found = compare_two(
        write(tmp_path / "a"),
        write(
            tmp_path / "b",
            settings={"max_grad_norm": 2.0},
            changed={(step, "grad:layers.0"): 1.01 for step in range(1, 5)},
        ),
    )
    assert found.reason is not None and found.reason.name == "bug"
    assert found.evidence[0] == "not the same: max_grad_norm 1.0 and 2.0"


def test_without_fingerprints_the_columns_name_step_and_stage_and_the_answer_says_what_to_record(
    tmp_path: Path,
) -> None:
    changed = {(3, "grad:layers.0"): 1.01}
    found = compare_two(write(tmp_path / "a", prints=False), write(tmp_path / "b", prints=False, changed=changed))
    parting = found.alignment.first_difference
    assert parting is not None and (parting.step, parting.stage, parting.tensor) == (3, "norm", "")
    assert "--fingerprints-every 1" in found.next_measurement


def test_steps_between_two_recorded_ones_are_asked_for(tmp_path: Path) -> None:
    runs = [
        write(tmp_path / name, changed=changed) for name, changed in (("a", {}), ("b", {(3, "weight:layers.0"): 1.1}))
    ]
    for run in runs:
        del run.fingerprints[1:3]
    found = compare_two(*runs)
    assert found.alignment.first_difference is not None and found.alignment.first_difference.equal_until == 1
    assert "--stop-after 4: nothing was hashed between steps 1 and 4" in found.next_measurement


def test_records_without_a_common_step_are_not_compared(tmp_path: Path) -> None:
    found = compare_two(write(tmp_path / "a", steps=0), write(tmp_path / "b"))
    assert found.verdict == "The records have no step in common, so they cannot be compared." and not found.reasons


def test_probabilities_add_up_and_are_sorted(tmp_path: Path) -> None:
    runs = (
        write(tmp_path / "a"),
        write(tmp_path / "b", machine={"num_threads": 1}, changed={(2, "grad:layers.1"): 1 + 1e-6}),
    )
    shares = list(weigh(align(*runs)).values())
    assert sum(shares) == pytest.approx(1.0) and shares == sorted(shares, reverse=True)


def test_a_bug_is_found_behind_rounding_that_began_earlier(tmp_path: Path) -> None:
    """Another number of threads from step 2 on, and at step 4 one gradient that is off by a hundredth."""
    changed = {(2, "grad:layers.1"): 1 + 1e-6, (4, "grad:layers.0"): 1.01}
    found = diagnose(tmp_path, machine={"num_threads": 1}, changed=changed)
    assert found.reason is not None and found.reason.name == "bug", found.text()
    parting, rounded = found.alignment.first_difference, found.alignment.rounded
    assert parting is not None and (parting.step, parting.tensor) == (4, "grad:layers.0")
    assert rounded is not None and (rounded.step, rounded.tensor) == (2, "grad:layers.1")
    assert found.to_dict()["rounding_since"] == 2 and not found.next_measurement
    assert "before, they differ by rounding alone: since step 2" in found.text()


def test_differences_that_grow_from_step_to_step_stay_rounding(tmp_path: Path) -> None:
    changed = {(step, name): 1 + 1e-6 * 5**step for step in range(2, 6) for name in TENSORS if name != "tokens:batch"}
    found = diagnose(tmp_path, machine={"num_threads": 1}, changed=changed, steps=6)
    assert found.reason is not None and found.reason.name == "order-of-sums", found.text()


def test_the_same_text_in_another_folder_is_no_difference(tmp_path: Path) -> None:
    changed = {(3, "grad:layers.0"): 1.01, (4, "grad:layers.0"): 1.01}
    runs = [
        write(tmp_path / name, settings={"data": f"/{name}/text"}, changed=given)
        for name, given in (("a", {}), ("b", changed))
    ]
    found = compare_two(*runs)
    assert not found.alignment.differences and found.reason is not None and found.reason.name == "bug"


def diagnose(folder: Path, *, steps: int = 4, **given: Any) -> TwoRuns:
    """An undisturbed run and one with changes."""
    return compare_two(write(folder / "a", steps=steps), write(folder / "b", steps=steps, **given))


def test_the_checksum_of_the_tokens_tells_other_batches_where_nothing_was_hashed(tmp_path: Path) -> None:
    runs = [
        write(tmp_path / name, prints=False, changed=given)
        for name, given in (("a", {}), ("b", {(3, TENSORS[2]): 1.1}))
    ]
    for run, other in zip(runs, (False, True), strict=True):
        for row in run.steps:
            row["batch_crc"] = f"{row['step'] + 7 * (other and row['step'] >= 3):08x}"
    found = compare_two(*runs)
    first = found.alignment.first_difference
    assert first is not None and (first.step, first.stage) == (3, "tokens")
    assert found.reason is not None and found.reason.name == "data-order", found.text()


KINDS_OF_RANKS = ("held", "tokens", "output", "sent", "grad", "clip", "weight", "exp_avg")
NO_CLIP = {(4, kind): {1: 7} for kind in ("weight", "exp_avg")} | {(4, "clip"): {1: 1.0}}
ON_RANKS: dict[str, tuple[dict[tuple[int, str], dict[int, float]], str, str, str]] = {
    "no clip on one of three": (NO_CLIP, "one-rank", "clip", "it applied no clip in the second run"),
    "another gradient sent by one of three": (
        {(4, "sent"): {1: 7}, (4, "grad"): {0: 7, 1: 7, 2: 7}}, "one-rank", "grad", "only rank 1 differs",
    ),
    "other tokens on one of three": ({(4, "tokens"): {1: 7}}, "data-order", "tokens", "only rank 1 differs"),
    "a weight that changed at rest on one of three": ({(4, "held"): {1: 7}}, "silent-corruption", "held", "only rank 1"),
}  # fmt: skip


def with_ranks(run: Run, changed: dict[tuple[int, str], dict[int, float]], num_ranks: int = 3) -> Run:
    """A run whose rows also hold hashes by rank, and which clips by a half on each."""
    for row in run.fingerprints:
        step = row["step"]
        row["ranks"] = {
            kind: [
                changed.get((step, kind), {}).get(rank, 0.5 if kind == "clip" else 100 * step + rank)
                for rank in range(num_ranks)
            ]
            for kind in KINDS_OF_RANKS
        }
    return run


@pytest.mark.parametrize("case", ON_RANKS)
def test_the_rank_is_named_that_alone_is_not_as_in_the_other_run(case: str, tmp_path: Path) -> None:
    changed, reason, stage, said = ON_RANKS[case]
    found = compare_two(with_ranks(write(tmp_path / "a"), {}), with_ranks(write(tmp_path / "b"), changed))
    parting = found.alignment.first_difference
    assert parting is not None and (parting.step, parting.stage, parting.ranks) == (4, stage, (1,)), found.text()
    assert found.reason is not None and found.reason.name == reason, found.text()
    if stage != "clip":
        assert said in found.text()
    else:  # the ranks of the second run do not even agree with each other
        assert "1 on rank 1, 0.5 on rank 2; rank 1 applied no clip" in found.text()
    assert "rank 1" in found.verdict and found.to_dict()["ranks"] == [1]


def test_another_layout_of_the_same_run_is_no_difference_of_one_rank(tmp_path: Path) -> None:
    """Shards hash other parts than replicas do, on every rank; and three ranks are not compared with two."""
    other_parts = {(step, kind): dict.fromkeys(range(3), 7) for step in range(1, 5) for kind in ("grad", "weight")}
    one = with_ranks(write(tmp_path / "a"), {})
    for other in (with_ranks(write(tmp_path / "b"), other_parts), with_ranks(write(tmp_path / "c"), {}, 2)):
        assert compare_two(one, other).alignment.first_difference is None


def test_runs_with_other_batches_are_compared_at_equal_tokens_too(tmp_path: Path) -> None:
    """Twice the batch: step 2 of one has seen what step 1 of the other has, and the mean of its two losses is compared."""
    one = write(tmp_path / "a", steps=8, prints=False)
    other = write(tmp_path / "b", settings={"batch_size": 8}, prints=False, changed={(1, "output:layers.1"): 1.05})
    for run, tokens in ((one, 64), (other, 128)):
        for row in run.steps:
            row["tokens"] = tokens * row["step"]
    found = compare_two(one, other)
    assert found.reason is not None and found.reason.name == "data", found.text()
    seen = found.alignment.at_tokens
    assert seen is not None and seen.steps == ((2, 1), (4, 2), (6, 3), (8, 4)) and seen.tokens[-1] == 512
    losses = [row["loss"] for row in one.steps]
    assert seen.losses[1] == (pytest.approx(sum(losses[2:4]) / 2), other.steps[1]["loss"])
    assert (
        "at equal tokens (4 places, steps 2 and 1 to steps 8 and 4, 512 tokens) the loss of the second" in found.text()
    )
    assert "compared at equal tokens too" in found.text() and found.to_dict()["equal_tokens"]["places"] == 4
    for row in other.steps:
        row["tokens"] += 1
    assert "nowhere have both seen equally many" in compare_two(one, other).text()


def test_a_run_that_its_ranks_stopped_parts_where_they_found_the_damage(tmp_path: Path) -> None:
    """What one rank alone holds is summed between two updates: the run stops before its record shows anything."""
    one, other = write(tmp_path / "a"), write(tmp_path / "b", steps=2)
    name = "exp_avg of layers.0"
    message = f"{name} of rank 1 changed in memory after step 2"
    other.events.append(
        {"kind": "corruption", "step": 2, "message": message, "tensor": name, "rank": 1, "detector": "rest"}
    )
    found = compare_two(one, other)
    parting = found.alignment.first_difference
    assert parting is not None and (parting.step, parting.tensor, parting.ranks) == (3, "held:exp_avg:layers.0", (1,))
    assert found.reason is not None and found.reason.name == "silent-corruption" and message in found.text()
