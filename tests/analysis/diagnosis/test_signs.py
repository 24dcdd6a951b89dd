"""Signs of records made by hand: what ordinary runs show is no fault, and what was not recorded is unknown."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path

import pytest

import narrowgauge as ng
from analysis.diagnosis.records import AT, Row, healthy_run, raise_events, update
from narrowgauge.analysis.diagnosis.evidence import gather
from narrowgauge.analysis.diagnosis.signs.sign_table import SIGNS, observe
from narrowgauge.runs.record import Run


def state(run: Run | Path, sign: str) -> str:
    return observe(gather(run))[sign].state


def hugging_face_log(folder: Path, rows: list[Row]) -> Path:
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows, "global_step": rows[-1]["step"]}))
    return folder


# ── ordinary runs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_healthy_log_of_another_framework_is_healthy(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = [
        {"step": step, "loss": 3.0 + math.exp(-step / 200) + draw.gauss(0, 0.02), "learning_rate": 1e-3}
        for step in range(10, 2001, 10)
    ]
    found = ng.diagnose(hugging_face_log(tmp_path, rows))
    assert found.is_healthy and not found.findings and "no sign of a fault" in found.verdict


@pytest.mark.parametrize("every", [1, 100])
def test_a_schedule_that_restarts_is_no_jump_of_the_rate(every: int) -> None:
    run = healthy_run()
    for row in run.steps:
        row["step"] *= every
        # A warm-up of few rows, and a cosine that begins anew three times.
        row["lr"] = (
            3e-3 * min(row["step"] / (3 * every), 1) * (1.01 + math.cos(math.pi * (row["step"] / every % 40) / 40))
        )
    run.gauges.clear()
    assert state(run, "rate-jumps") == ("unknown" if every > 1 else "absent")
    assert ng.diagnose(run).is_healthy


def test_a_rate_above_all_earlier_ones_is_a_jump() -> None:
    run = healthy_run()
    for row in run.steps[AT:]:
        row["lr"] *= 5
    assert state(run, "rate-jumps") == "present"


def test_a_rate_that_is_high_for_one_step_is_a_burst_of_one_step() -> None:
    run = healthy_run()
    run.steps[AT]["lr"] *= 5
    assert f"for 1 step from step {AT + 1} on" in observe(gather(run))["rate-bursts"].sentence


@pytest.mark.parametrize(
    ("tokens", "expected"), [(None, "unknown"), (4096, "absent"), (1 << 22, "present")], ids=["none", "few", "many"]
)
def test_how_much_a_loss_may_vary_depends_on_the_tokens_of_a_step(tokens: int | None, expected: str) -> None:
    # Fine-tuning on answers of a few words: 0.5 ± 0.12.
    run, draw = healthy_run(), random.Random(0)
    for row in run.steps:
        row.update(loss=0.5 + draw.gauss(0, 0.12), tokens=None if tokens is None else tokens * row["step"])
    assert state(run, "loss-is-erratic") == expected
    assert not ng.diagnose(run).findings  # one sign alone names nothing


def test_the_width_of_a_spike_is_counted_in_steps() -> None:
    for every, expected in ((1, "present"), (100, "unknown")):
        run = healthy_run()
        for row in run.steps:
            row["step"] *= every
        run.steps[AT]["loss"] += 3.0
        run.gauges.clear()
        raise_events(run)
        assert state(run, "loss-spikes") == "present" and state(run, "spike-of-one-batch") == expected
        assert state(run, "spike-recovers-slowly") == ("absent" if every == 1 else "unknown")
    run = healthy_run()
    for row in run.steps:
        row["step"] *= 100
    for row in run.steps[AT : AT + 2]:
        row["loss"] += 3.0
    slow = observe(gather(run))["spike-recovers-slowly"]
    assert slow.state == "present" and slow.value == 200


# ── what was not recorded ────────────────────────────────────────────────────────────────────────────────────────────────


def test_events_of_one_kind_do_not_stand_for_those_of_others() -> None:
    run = healthy_run()
    run.events.append({"kind": "note", "step": 3, "message": "a remark"})
    run.steps[AT]["loss"] += 3.0
    for row in run.gauges[5:]:
        row["attention"]["model.layers.1.self_attn"][1] = 0.01
    seen = observe(gather(run))
    assert seen["loss-spikes"].state == "present" and seen["attention-collapses"].state == "present"
    # Where detectors ran, what they did not raise was not there.
    run.config["on_spike"] = "report"
    assert state(run, "loss-spikes") == "absent"


def test_ranks_that_were_never_compared_are_not_known_to_agree() -> None:
    run = healthy_run(verify_every=1000)
    run.run["machine"]["ranks"] = 2
    signs = ("ranks-hold-other-values", "computes-other-values")
    assert [state(run, sign) for sign in signs] == ["unknown", "unknown"]
    run.events.append(
        {"kind": "finish", "step": 160, "message": "done"}
    )  # with a checkpoint, before which states are compared
    assert [state(run, sign) for sign in signs] == ["absent", "unknown"]
    run.config["verify_every"] = 100
    assert [state(run, sign) for sign in signs] == ["absent", "absent"]


def test_the_audit_of_all_parameters_shows_what_no_gauge_sampled() -> None:
    for recipe, column, sign, bad in (
        ("bfloat16/naive", "edq", "updates-lost", 0.3),
        ("bfloat16/stochastic", "noise", "rounding-noise", 20.0),
    ):
        run = healthy_run(recipe, on_spike="report")
        run.gauges.clear()
        assert state(run, sign) == "unknown"
        for row in run.steps[::10]:
            row.update(edq=1.0, noise=0.1)
        assert state(run, sign) == "absent"
        for row in run.steps[::10][-2:]:
            row[column] = bad
        assert state(run, sign) == "absent"  # two audits may be chance
        run.steps[::10][-3][column] = bad
        found = observe(gather(run))[sign]
        assert found.state == "present" and found.step == run.steps[::10][-1]["step"]


# ── second moments and epsilon ───────────────────────────────────────────────────────────────────────────────────────────


def frozen(recipe: str, bias: float, **config: object) -> Run:
    run: Run = healthy_run(recipe, **config)
    for row in run.gauges[4:]:
        row["moments"] = {name: [bias, 0.9] for name in row["moments"]}
    raise_events(run)
    return run


def test_second_moments_freeze_by_beta2_only_where_half_their_spacing_is_larger() -> None:
    named = ng.diagnose(frozen("bfloat16/naive", 2.0, beta2=0.999)).findings
    assert [finding.cause.name for finding in named] == ["frozen-moments"]
    found = ng.diagnose(frozen("bfloat16/naive", 20.0, beta2=0.95))
    assert [finding.cause.name for finding in found.findings] == ["eps-underflow"]
    assert "beta2" not in found.text().rpartition("what to do")[2]
    # float16 has three more bits of mantissa, and a pair of parts more than twice as many.
    for recipe, beta2, names in (
        ("float16/naive", 0.999, {"eps-underflow"}),
        ("float16/naive", 0.9996, {"frozen-moments"}),
        ("bfloat16/collage-plus", 0.999, {"eps-underflow"}),
    ):
        assert {one.cause.name for one in ng.diagnose(frozen(recipe, 20.0, beta2=beta2)).findings} == names, recipe


@pytest.mark.parametrize(
    ("recipe", "dtype", "count", "expected"),
    [
        ("bfloat16/word", "bfloat16", 9, "absent"),
        ("bfloat16/word", "bfloat16", 10, "present"),
        ("bfloat16/word", "float8_e5m2", 1, "absent"),
        ("bfloat16/word", "float8_e5m2", 2, "present"),
        ("bfloat16/word", "float8_e5m2-stochastic", 100, "absent"),
        ("bfloat16/word", "float32", 100, "absent"),
        ("float32/float32", "float8_e5m2", 100, "absent"),
        ("float64/float64", "bfloat16", 100, "absent"),
    ],
)
def test_a_sum_is_narrow_from_where_its_own_row_loses_more_than_the_storage(
    recipe: str, dtype: str, count: int, expected: str
) -> None:
    run = healthy_run(recipe, accumulation_dtype=dtype, gradient_accumulation_steps=count)
    assert state(run, "accumulates-in-bfloat16") == expected


def test_epsilon_is_zero_only_where_the_storage_computes_in_few_bits() -> None:
    for recipe, eps, expected in (
        ("float16/collage-plus", 1e-8, "present"),
        ("float16/collage-plus", 1e-4, "absent"),
        ("bfloat16/collage-plus", 1e-8, "absent"),
        ("float16-throughout/naive", 1e-8, "absent"),  # its storage computes in float32
        ("bfloat16/word", 0.0, "absent"),  # which the optimizer replaces
    ):
        assert state(healthy_run(recipe, eps=eps), "eps-rounds-to-zero") == expected, recipe


def test_values_that_are_not_finite_alone_name_no_epsilon() -> None:
    run = healthy_run()
    for row in run.steps[AT:]:
        row.update(loss=math.nan, grad_norm=math.nan)
    found = ng.diagnose(run)
    assert "eps-underflow" not in {row.cause.name for row in found.causes} and not found.is_healthy


# ── several causes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def names_of(run: Run) -> set[str]:
    return {finding.cause.name for finding in ng.diagnose(run).findings}


def test_a_setting_has_no_step_and_makes_nothing_its_consequence() -> None:
    run = healthy_run(lr=0.1)
    run.steps[AT]["loss"] += 3.0
    raise_events(run)
    found = ng.diagnose(run)
    assert {finding.cause.name: finding.step for finding in found.findings} == {"learning-rate-too-high": AT + 1}
    assert (found.signs[0].sign, found.signs[0].step) == ("rate-is-high", None)
    for row in run.steps:
        row["data_seconds"] = 0.06
    assert names_of(run) == {"learning-rate-too-high", "slow-data-loader"}


def test_slower_steps_alone_do_not_say_why() -> None:
    run = healthy_run()
    for row in run.steps[AT:]:
        row["seconds"] *= 1.8
    found = ng.diagnose(run)
    assert not found.findings and not found.is_healthy and found.causes[0].cause.name == "throttling"
    assert found.next_measurement is not None and "cpu_seconds" in found.next_measurement.what


def test_a_low_rate_is_a_finding_where_weights_hardly_move() -> None:
    for recipe in ("bfloat16/word", "float32/float32"):
        run = healthy_run(recipe, lr=1e-5)
        for row in run.steps:
            row["lr"] = 1e-5
        assert ng.diagnose(run).is_healthy  # fine-tuning
        for row in run.gauges:
            row["updates"] = {name: update(update_to_weight=1e-5) for name in row["updates"]}
        assert state(run, "weights-hardly-move") == "present" and names_of(run) == {"learning-rate-too-low"}
    for row in run.steps:  # fine-tuning starts where token frequencies alone do not lead
        row["loss"] = 1.0 + row["loss"] / 10
    assert state(run, "weights-hardly-move") == "unknown" and not ng.diagnose(run).findings
    del run.steps[50:]
    assert state(run, "weights-hardly-move") == "unknown"


def test_slow_steps_are_no_consequence_of_a_fault_in_the_arithmetic() -> None:
    run = healthy_run("bfloat16/naive", beta2=0.95)
    for row in run.gauges:
        row["updates"] = {name: [0.3, 0.9, 0.7, 0.9, 1e-3, 0.2] for name in row["updates"]}
    for row in run.steps:
        row["data_seconds"] = 0.06
    raise_events(run)
    assert names_of(run) == {"lost-updates", "slow-data-loader"}


def test_two_causes_between_which_nothing_decides_keep_no_third_back() -> None:
    run = healthy_run()
    for row in run.steps:
        row["data_seconds"] = 0.06
        if row["step"] >= AT:
            row.update(loss=math.nan, grad_norm=math.nan)
    run.gauges.clear()
    raise_events(run)

    assert names_of(run) == {"slow-data-loader"}


# ── one observation, counted once ────────────────────────────────────────────────────────────────────────────────────────


def test_what_says_more_of_a_sign_is_unknown_without_it() -> None:
    seen = observe(gather(healthy_run()))
    for name, sign in SIGNS.items():
        if sign.given:
            assert seen[sign.given].state != "present" and seen[name].state == "unknown", name
    run = healthy_run()
    run.steps[AT].update(loss=math.nan, grad_norm=math.nan)
    raise_events(run)
    shown = {name for name, row in observe(gather(run)).items() if row.state == "present"}
    assert shown == {"loss-not-finite", "one-step-not-finite"}
    run.steps[AT]["loss"] = 3.0
    assert state(run, "norm-not-finite") == "present"


def test_what_a_resume_changed_is_a_note_until_the_loss_moves() -> None:
    run = healthy_run()
    run.events.extend(
        [
            {"kind": "resume", "step": AT - 1, "message": f"from step {AT - 1}"},
            {
                "kind": "note",
                "step": AT,
                "message": f"lr was 0.003 up to step {AT - 1} and is 0.007 from there on",
                "detector": "changed-settings",
            },
            {
                "kind": "note",
                "step": AT,
                "message": "the run started with torch 2.8.0 and resumes with 2.9.0: bits may differ",
                "detector": "changed-software",
            },
        ]
    )
    found = ng.diagnose(run)
    assert found.is_healthy and len(found.notes) == 2 and "note: lr was 0.003" in found.text()
    assert found.to_dict()["notes"] == list(found.notes)
    # A spike long before or after a resume is not due to it.
    run.steps[AT + 60]["loss"] += 3.0
    raise_events(run)
    assert names_of(run) == {"bad-data"}


def test_a_setting_that_loses_something_is_a_note_until_an_effect_shows() -> None:
    run = healthy_run("bfloat16/word/compressed8")
    run.run["machine"]["ranks"] = 2
    found = ng.diagnose(run)
    assert found.is_healthy and len(found.notes) == 1 and "narrow-all-reduce" in found.notes[0]
    for row in run.steps:
        row["loss"] = 3.0 + 0.01 * (row["step"] % 3)
    found = ng.diagnose(run)
    assert not found.notes and found.findings[0].cause.name == "narrow-all-reduce"


def test_no_measurement_is_advised_that_the_run_cannot_make() -> None:
    run = healthy_run()
    run.gauges.clear()
    for row in run.steps[AT:]:
        row.update(loss=math.nan)
    measure = ng.diagnose(run).next_measurement
    assert measure is None or ("replay" not in measure.what and "--verify-every" not in measure.what)


# ── evaluations ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_validation_loss_that_parts_from_the_training_loss_is_a_sign() -> None:
    sign = "validation-parts-from-training"
    run = healthy_run()
    assert state(run, sign) == "unknown"
    for step, gap in ((40, 0.05), (80, 0.06), (120, 0.04), (160, 0.05)):
        level = statistics.median(row["loss"] for row in run.steps[step - 30 : step])
        run.evals.append({"step": step, "val_loss": level + gap})
    assert state(run, sign) == "absent"
    run.evals[-2]["val_loss"] += 0.2
    run.evals[-1]["val_loss"] += 0.5
    seen = observe(gather(run))[sign]
    assert seen.state == "present" and seen.step == 120 and seen.value == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("rule", "lr", "low", "high"),
    [
        ("adamw", 0.003, "absent", "absent"),
        ("lion", 0.001, "absent", "absent"),
        ("lion", 0.016, "absent", "present"),  # 16 times Lion's usual rate, and 5 times AdamW's
        ("adamw", 0.016, "absent", "absent"),
        ("sgd", 0.3, "unknown", "unknown"),  # whose rates no size of a model knows
    ],
)
def test_a_rate_is_held_against_that_of_its_rule(rule: str, lr: float, low: str, high: str) -> None:
    run = healthy_run(rule=rule, lr=lr)
    assert (state(run, "rate-is-low"), state(run, "rate-is-high")) == (low, high)


def test_signs_of_adamws_steps_are_not_read_of_other_rules() -> None:
    for sign, of_rule, expected in (
        ("updates-below-rate", "adamw", {"absent", "present"}),
        ("updates-below-rate", "lion", {"unknown"}),
        ("gradients-below-eps", "adamw", {"absent", "present"}),
        ("gradients-below-eps", "galore", {"unknown"}),
    ):
        assert state(healthy_run(rule=of_rule), sign) in expected, (sign, of_rule)
