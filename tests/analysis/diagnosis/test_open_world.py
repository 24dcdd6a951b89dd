"""Causes that a record contradicts or says nothing of: what was measured decides, and where nothing was, nothing is claimed."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest

import narrowgauge as ng
from analysis.diagnosis.records import AT, EVERY, Row, healthy_run, later, raise_events, tensor
from narrowgauge.analysis.diagnosis.causes import CAUSES
from narrowgauge.analysis.diagnosis.coverage import AREAS
from narrowgauge.analysis.diagnosis.evidence import gather
from narrowgauge.analysis.diagnosis.loop_terms import LOOPS, TERMS, in_terms_of
from narrowgauge.analysis.diagnosis.pairs.reasons import REASONS
from narrowgauge.analysis.diagnosis.signs.sign_table import SIGNS, observe
from narrowgauge.runs.older_events import with_detector
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import METRICS


def trainer_log(folder: Path, rows: list[Row]) -> Path:
    """A log of Hugging Face's trainer."""
    folder.mkdir(exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows, "global_step": rows[-1]["step"]}))
    return folder


def sgd_rows(num_steps: int = 120, at: int = 50) -> list[Row]:
    """What float32 SGD logs at a rate beyond the stable one: the norm doubles, the loss climbs for 12 steps and stays up."""
    draw = random.Random(1)
    rows: list[Row] = []
    for step in range(1, num_steps + 1):
        loss = 2.5 + 2.0 * math.exp(-step / 30) + draw.gauss(0, 0.03) + 0.6 * min(12, max(0, step - at))
        norm = 0.5 * math.exp(draw.gauss(0, 0.1)) * min(1e4, 2.0 ** max(0, step - at + 4))
        rows.append({"step": step, "loss": loss, "grad_norm": norm, "learning_rate": 0.5})
    return rows


def test_a_divergence_in_float32_is_none_of_float16(tmp_path: Path) -> None:
    """A log that shows no float16 — no loss scale, no such setting — names no cause of float16, nor asks about one."""
    found = ng.diagnose(trainer_log(tmp_path / "run", sgd_rows()))
    of_float16 = {"fp16-divergence", "fp16-overflow", "loss-scale-collapse"}
    assert not of_float16 & {row.cause.name for row in found.causes}, found.text()
    rows = [{**row, "loss_scale": 65536.0} for row in sgd_rows()]
    assert of_float16 <= {row.cause.name for row in ng.diagnose(trainer_log(tmp_path / "scaled", rows)).causes}


LOG = (
    "aten.log outside the model's modules (forward) made inf in 3 of 256 values (float32 [256], the first at [4]), from self "
    "float32 [256] with magnitudes 0.01 to 1; it reaches the loss."
)


def test_the_rate_of_the_rows_outranks_that_of_the_settings() -> None:
    """A schedule that stays in its warm-up: the settings name a usual rate, and no step has it. In float32 nothing is rounded."""
    run = healthy_run(lr=3e-3)
    del run.config["recipe"]
    run.run["model"]["dtypes"] = "float32"
    for row in run.steps:
        row["lr"] = 1.2e-5
    evidence = gather(run)
    assert observe(evidence)["rate-is-low"].state == "present" and evidence.rounds_weights()
    for row in run.gauges:
        row["updates"].clear()
    assert not gather(run).rounds_weights()
    run.run["model"]["dtypes"] = "bfloat16, float32"
    assert gather(run).rounds_weights()
    for row in run.steps:  # while it rises, the settings say where to
        row["lr"] = 1e-6 * row["step"]
    assert observe(gather(run))["rate-is-low"].state == "absent"


@pytest.mark.parametrize(("order", "is_named"), [("anew", False), ("the same", True), ("with gaps", True)])
def test_whole_epochs_in_another_order_are_no_repeated_data(order: str, is_named: bool) -> None:
    run = healthy_run()
    for row in run.steps:
        epoch, within = divmod(row["step"] - 1, 12)
        batches = random.Random(epoch if order != "the same" else 0).sample(range(12), 12)
        row["batch_crc"] = f"{batches[within if order != 'with gaps' or epoch < 2 else within // 2]:016x}"
    assert (observe(gather(run))["batches-repeat"].state == "present") is is_named


def test_gradients_of_zero_are_not_rounded_where_nothing_is_narrow() -> None:
    """A record that names no recipe may be of float32: a dtype, a loss scale or a measured cast must say otherwise."""
    run = healthy_run()
    del run.config["recipe"]
    run.run["model"]["dtypes"] = "float32"
    for sample in run.gauges:
        for values in sample["tensors"].values():
            values[list(METRICS["tensors"]).index("underflow")] = None
    assert not gather(run).narrows_gradients()
    run.run["model"]["dtypes"] = "bfloat16"
    assert gather(run).narrows_gradients()
    run.run["model"]["dtypes"] = "float32"
    run.steps[0]["loss_scale"] = 1024.0
    assert gather(run).narrows_gradients()


def test_what_the_search_for_the_first_bad_value_found_decides() -> None:
    """The logarithm of a zero outside the model makes the loss NaN; the rate, thirty times the usual one, did not."""
    run = healthy_run(lr=0.1)
    for row in later(run.steps):
        row.update(loss=math.nan, grad_norm=math.nan)
    run.events.append(with_detector({"kind": "first_bad_value", "step": AT, "message": LOG}))
    raise_events(run)
    first = ng.diagnose(run).findings[0]
    assert first.cause.name == "undefined-operation" and first.step == AT, ng.diagnose(run).text()
    assert any("aten.log" in sign.sentence for sign in first.chain)
    # A product that overflows is a consequence of what made its operands so large.
    run.events[:] = [
        with_detector({"kind": "first_bad_value", "step": AT, "message": LOG.replace("aten.log", "aten.mm")})
    ]
    assert "undefined-operation" not in {each.cause.name for each in ng.diagnose(run).findings}


def test_other_text_from_some_step_on_is_one_change() -> None:
    for change, at in ((0.9, AT), (0.9, 30), (-0.9, 120)):
        run = healthy_run()
        for row in run.steps:
            if row["step"] >= at:
                row["unigram_loss"] += change
        seen = observe(gather(run))
        assert seen["tokens-are-unusual"].state == "absent", seen["tokens-are-unusual"].sentence
        assert seen["tokens-change"].state == "present" and seen["tokens-change"].step == at
        assert ng.diagnose(run).findings == () or ng.diagnose(run).findings[0].cause.name == "other-data"
    run = healthy_run()
    run.steps[60]["unigram_loss"] += 2.0
    seen = observe(gather(run))
    assert seen["tokens-are-unusual"].step == 61 and seen["tokens-change"].state == "absent"


def too_high(factor: float = 100.0) -> Run:
    """A rate that is far too high: attention grows and collapses too, as a consequence."""
    run = healthy_run(lr=1e-3 * factor)
    for row in later(run.gauges):
        row["attention"]["model.layers.1.self_attn"] = [12.0 * 1.6 ** ((row["step"] - AT) / EVERY + 4), 0.01]
        for name in row["tensors"]:
            if name.startswith("weight:") and ("q_proj" in name or "k_proj" in name):
                row["tensors"][name] = tensor(rms=0.5 * 1.5 ** ((row["step"] - AT) / EVERY + 1))
    raise_events(run)
    return run


def test_attention_that_grows_at_a_rate_far_too_high_is_the_rates() -> None:
    found = ng.diagnose(too_high())
    assert [each.cause.name for each in found.findings] == ["learning-rate-too-high"], found.text()
    run = too_high()
    del run.config["lr"]
    for row in run.steps:  # a recorder's settings need not name it, and its rows do
        row["lr"] = 0.1
    assert ng.diagnose(run).findings[0].cause.name == "learning-rate-too-high"
    assert ng.diagnose(too_high(factor=3)).findings[0].cause.name == "attention-growth"


def test_the_usual_rates_of_adamw_are_not_those_of_sgd() -> None:
    run = healthy_run(lr=0.1)
    assert observe(gather(run))["rate-is-high"].state == "present"
    run.run["recorder"], run.run["optimizer"] = {"program": "mine.py"}, {"class": "SGD", "lr": 0.1}
    assert observe(gather(run))["rate-is-high"].state == "unknown"


# ── an open world ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_no_cause_explains_is_unknown_with_where_it_begins() -> None:
    """A loss that climbs slowly to another level, and nothing else: no row of the table is told by that."""
    run = healthy_run()
    for row in run.steps:
        row["loss"] += 0.015 * max(0, row["step"] - 60)
    raise_events(run)
    found = ng.diagnose(run)
    first = min(sign.step or 0 for sign in found.signs)
    assert not found.findings and not found.is_healthy, found.text()
    assert f"something is wrong, since step {first}, and no known cause explains it" in found.verdict
    assert "unknown" in found.to_dict()["causes"] and "%" not in found.verdict


def test_a_run_without_a_sign_says_what_was_checked_and_what_would_show_the_rest(tmp_path: Path) -> None:
    rows = [{"step": k, "loss": 3.0 + math.exp(-k / 50), "learning_rate": 1e-3} for k in range(1, 200)]
    found = ng.diagnose(trainer_log(tmp_path / "log", rows))
    assert found.verdict == "no sign of a fault in what was checked."
    assert found.checked == ("losses", "learning rates")
    assert found.not_seen["gradient norms"] == "a column grad_norm"
    assert (
        "  checked: losses, learning rates\n  not to be seen from this record: gradient norms (a column grad_norm)"
        in found.text()
    )
    whole = ng.diagnose(healthy_run())
    assert {"tensors of layers", "gradient norms"} <= set(whole.checked) and whole.not_seen[
        "evaluations"
    ] == "--eval-every 100"
    assert "what model and loss compute" in whole.not_seen  # no row shows it
    assert whole.to_dict()["not_seen"] == whole.not_seen


@pytest.mark.parametrize("loop", ["recorder", "log"])
def test_advice_names_only_what_the_loop_at_hand_has(loop: str) -> None:
    for cause in CAUSES.values():
        said = in_terms_of(loop, cause.remedy)
        assert "--" not in said and "narrowgauge train" not in said and "  " not in said, (cause.name, said)
    for sign in SIGNS.values():
        if not any(read.startswith("replay.") for read in sign.reads):  # asked only of folders that hold their data
            said = in_terms_of(loop, sign.needs)
            assert "--" not in said and "narrowgauge train" not in said, (sign.name, said)
    for area in AREAS:
        assert "--" not in in_terms_of(loop, getattr(area, loop))


def test_every_name_in_braces_is_a_term_or_filled_later_and_every_term_is_used() -> None:
    later = {"module", "storage", "compute", "tensor"}
    templates = [
        *(cause.remedy for cause in CAUSES.values()),
        *(reason.remedy for reason in REASONS.values()),
        *(sign.needs for sign in SIGNS.values()),
        *(getattr(area, loop) for area in AREAS for loop in LOOPS),
    ]
    names = {name for template in templates for name in re.findall(r"{(\w+)}", template)}
    assert names - later == set(TERMS), "a misspelt term would be shown in its braces"
    for loop in LOOPS:
        for template in templates:
            left = set(re.findall(r"{(\w+)}", in_terms_of(loop, template)))
            assert left <= later, template


def test_the_rate_of_a_loop_of_ones_own_is_that_of_its_steps() -> None:
    """A schedule may multiply a setting of 1."""
    run = healthy_run(lr=1.0)
    run.run["recorder"] = {"program": "mine.py"}
    for row in run.steps:
        row["lr"] = 1e-3
    assert "times the usual rate" not in ng.diagnose(run).text()


def test_an_unusual_rate_that_does_no_harm_is_a_note() -> None:
    found = ng.diagnose(healthy_run(lr=0.1))
    assert found.is_healthy and "learning-rate-too-high); no effect shows" in found.text()


def test_steps_that_grow_are_no_slower_machine() -> None:
    def slower(grows: bool) -> ng.Diagnosis:
        run = healthy_run()
        run.run["machine"] = {"device": "cpu"}
        tokens = 0
        for place, row in enumerate(run.steps):
            factor = 1 if place < len(run.steps) // 2 else 3
            tokens += 256 * (factor if grows else 1)
            row |= {"tokens": tokens, "seconds": 0.1 * factor, "cpu_seconds": 0.1 * factor}
        return ng.diagnose(run)

    assert "throttling" in [each.name for each in slower(False).findings]
    assert "throttling" not in [each.name for each in slower(True).findings]


def test_float32_sums_are_not_in_question() -> None:
    run = healthy_run(gradient_accumulation_steps=8)
    run.run["model"] = {"formats": "float32"}
    assert not gather(run).accumulates()
    run.run["model"] = {"formats": "bfloat16, float32"}
    assert gather(run).accumulates()


def test_a_recorded_loop_is_advised_in_calls() -> None:
    run = too_high()
    run.run["recorder"] = {"program": "mine.py"}
    for row in run.steps:
        row["lr"] = 0.1
    (finding,) = ng.diagnose(run).findings
    assert finding.remedy == "Lower the learning rate by three to ten times, with a longer warm-up."
    del run.run["recorder"]
    assert "--lr" in ng.diagnose(run).findings[0].remedy
