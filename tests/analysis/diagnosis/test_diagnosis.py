"""Diagnosis of one run: each cause from a record that only it explains, healthy and partial records, and the command."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import narrowgauge as ng
from analysis.diagnosis.records import (
    AT,
    EVERY,
    NUM_STEPS,
    PARAMETERS,
    healthy_run,
    later,
    raise_events,
    tensor,
    update,
    written,
)
from narrowgauge.analysis.diagnosis.causes import CAUSES, HEALTHY
from narrowgauge.analysis.diagnosis.evidence import gather
from narrowgauge.analysis.diagnosis.posterior import CONFIDENCE
from narrowgauge.analysis.diagnosis.replay_findings import ReplayedStep, ReplayMismatch
from narrowgauge.analysis.diagnosis.signs.sign_table import SIGNS, observe
from narrowgauge.cli.main import main
from narrowgauge.runs.record import Run
from narrowgauge.spec.tables import Row

DOWN = "model.layers.1.mlp.down_proj"

Fault = Callable[[Run], None]


def steps(change: Callable[[Row], Row]) -> Fault:
    """A fault that changes the rows of steps from its step on."""

    def strike(run: Run) -> None:
        for row in later(run.steps):
            row.update(change(row))

    return strike


def samples(change: Callable[[Row], None]) -> Fault:
    """A fault that changes the samples from its step on."""

    def strike(run: Run) -> None:
        for row in later(run.gauges):
            change(row)

    return strike


def always(change: Callable[[Row], None]) -> Fault:
    """A fault that is in every sample."""

    def strike(run: Run) -> None:
        for row in run.gauges:
            change(row)

    return strike


def spike(width: int, lead: int = 0) -> Fault:
    def strike(run: Run) -> None:
        for row in run.steps:
            if AT <= row["step"] < AT + width:
                row["loss"] += 3.0
            if AT - lead <= row["step"] < AT:
                row["grad_norm"] *= 20.0

    return strike


def event(kind: str, message: str, **columns: object) -> Fault:
    return lambda run: run.events.append({"kind": kind, "step": AT, "message": message, **columns})


def both(*faults: Fault) -> Fault:
    def strike(run: Run) -> None:
        for fault in faults:
            fault(run)

    return strike


def set_tensors(prefix: str, **changed: float) -> Callable[[Row], None]:
    def change(row: Row) -> None:
        row["tensors"].update({name: tensor(**changed) for name in row["tensors"] if name.startswith(prefix)})

    return change


def set_updates(**changed: float) -> Callable[[Row], None]:
    return lambda row: row["updates"].update({name: update(**changed) for name in PARAMETERS})


def massive(row: Row) -> None:
    """One channel is a token's only one: a norm of 64 channels gives it eight."""
    set_tensors("input:model.layers", amax=7.9)(row)
    row["tensors"]["weight:model.norm.weight"] = tensor(amax=1.0)


def grow_attention(row: Row) -> None:
    row["attention"]["model.layers.1.self_attn"] = [12.0 * 1.6 ** ((row["step"] - AT) / EVERY + 4), 0.01]


def overflow(run: Run) -> None:
    for row in later(run.steps):
        row.update(loss=math.nan, grad_norm=math.nan, skipped=True, loss_scale=max(1.0, row["loss_scale"] / 2))
    for row in run.gauges:
        row["tensors"][f"input:{DOWN}"] = tensor(amax=2.0 ** min(15.9, 1 + row["step"] / EVERY * 2))


def scaled(run: Run) -> None:
    for row in run.steps:
        row["loss_scale"] = 65536.0


def collapse(run: Run) -> None:
    for row in run.steps:
        if row["step"] > 110:
            row.update(loss_scale=max(1.0, 65536.0 / 2 ** (row["step"] - 110)), grad_norm=math.inf, skipped=True)
    for row in run.gauges:
        if row["step"] > 110:
            set_tensors("grad:", nonfinite=5)(row)


def ranks(run: Run) -> None:
    run.run["machine"]["ranks"] = 4


def late_rank(run: Run) -> None:
    for row in run.steps:
        late = [0.001, 0.001, 0.05, 0.001] if row["step"] >= AT else [0.001] * 4
        row["wait_seconds"] = late[2]
        if row["step"] % 10 == 0:
            row["ranks"] = {
                "num_steps": 10,
                "num_last": [0, 0, 10, 0] if row["step"] > AT else [3, 3, 2, 2],
                "late_seconds": late,
            }


def resumed(run: Run) -> None:
    run.events.append({"kind": "resume", "step": AT - 1, "message": f"from step {AT - 1}"})


CASES: dict[str, tuple[str, dict[str, object], Fault]] = {
    "fp16-overflow": ("float16/split", {}, both(scaled, overflow)),
    "gradient-underflow": (
        "float8-row/word", {}, samples(set_tensors("output_grad:model.layers", underflow=0.7, sqnr_db=2.0)),
    ),
    "loss-scale-collapse": ("float16/split", {}, both(scaled, collapse)),
    "lost-updates": (
        "bfloat16/naive", {"lr": 3e-3}, samples(set_updates(edq=0.3)),
    ),
    "frozen-moments": (
        "bfloat16/naive", {"beta2": 0.999}, samples(lambda row: row["moments"].update({name: [2.0, 0.9] for name in PARAMETERS})),
    ),
    "narrow-accumulation": (
        "bfloat16/word", {"accumulation_dtype": "bfloat16", "gradient_accumulation_steps": 32},
        lambda run: [row.update(loss=3.0 + 0.01 * (row["step"] % 3)) for row in run.steps] and None,
    ),
    "eps-underflow": ("float16/collage-plus", {"eps": 1e-8}, steps(lambda row: {"loss": math.nan, "grad_norm": math.nan})),
    "eps-too-large": (
        "bfloat16/word", {"eps": 1e-3}, both(always(set_tensors("grad:", rms=1e-5)), always(set_updates(update_to_weight=1e-5))),
    ),
    "attention-growth": ("bfloat16/word", {}, samples(grow_attention)),
    "logit-drift": ("bfloat16/word", {}, samples(lambda row: row["logits"].update(log_z=8.0 + (row["step"] - AT)))),
    "recovering-spike": ("bfloat16/word", {}, spike(12, lead=3)),
    "bad-data": ("bfloat16/word", {}, spike(1)),
    "embedding-shock": (
        "bfloat16/word", {},
        steps(lambda row: {"embedding_grad_norm": 9.0, "grad_norm": 9.01} if row["step"] % 20 < 3 else {}),
    ),
    "frozen-parameter": (
        "bfloat16/word", {}, samples(lambda row: row["tensors"].update({f"grad:{PARAMETERS[3]}": tensor(rms=0.0)})),
    ),
    "dead-layer": ("bfloat16/word", {}, both(*(
        samples(set_tensors(f"{kind}:model.layers.1.mlp", rms=0.0)) for kind in ("grad", "output_grad")
    ))),
    "glu-outliers": (
        "float8-row/word", {},
        samples(lambda row: row["tensors"].update({f"input:{DOWN}": tensor(outlier=200.0, top_feature=60.0, top_to_rest=150.0)})),
    ),
    "massive-activations": ("float8-tensor/word", {}, always(massive)),
    "rank-divergence": ("bfloat16/word", {}, both(ranks, event(
        "corruption", "model.norm.weight of rank 1 differs from that of 3 other ranks after step 80", tensor="model.norm.weight",
        detector="replicas",
    ))),
    "silent-corruption": (
        "bfloat16/word", {}, both(samples(set_tensors(f"weight:{DOWN}", amax=4000.0)), spike(1)),
    ),
    "stale-scales": ("float8-delayed/word", {}, both(
        lambda run: [row.update(saturated=0) for row in run.steps] and None,
        steps(lambda row: {"saturated": 5000}), samples(set_tensors("input:model.layers.1", overflow=0.05, sqnr_db=4.0)),
    )),
    "block-range": ("mxfp4/word", {}, samples(set_tensors(f"input:{DOWN}", underflow=0.9, sqnr_db=3.0))),
    "learning-rate-too-high": ("bfloat16/word", {"lr": 0.3}, both(
        steps(lambda row: {"loss": row["loss"] + 4.0, "grad_norm": 30.0}),
        samples(set_updates(update_to_weight=0.4)),
    )),
    "learning-rate-too-low": (
        "bfloat16/stochastic", {"lr": 1e-5},
        always(set_updates(noise=25.0)),
    ),
    "repeated-data": ("bfloat16/word", {}, steps(lambda row: {"batch_crc": f"{row['step'] % 20:08x}"})),
    "resume-changed": ("bfloat16/word", {}, both(resumed, steps(lambda row: {"loss": row["loss"] + 0.6}), event(
        "note", "lr was 0.003 up to step 80 and is 0.007 from there on", detector="changed-settings",
    ))),
    "software-change": ("bfloat16/word", {}, both(resumed, steps(lambda row: {"loss": row["loss"] + 0.6}), event(
        "note", "the run started with torch 2.8.0 and resumes with 2.9.0: bits may differ from an uninterrupted run",
        detector="changed-software",
    ))),
    "slow-rank": ("bfloat16/word", {}, both(ranks, late_rank)),
    "slow-data-loader": ("bfloat16/word", {}, lambda run: [row.update(data_seconds=0.06) for row in run.steps] and None),
}  # fmt: skip
"""By cause: the recipe, settings, and what the fault writes."""


def struck(name: str) -> Run:
    recipe, config, fault = CASES[name]
    run = healthy_run(recipe, **config)
    fault(run)
    raise_events(run)
    return run


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named_first(name: str) -> None:
    found = ng.diagnose(struck(name))
    shown = [(sign.sign, sign.step) for sign in found.signs]
    assert found.findings and found.findings[0].cause.name == name, (found.verdict, shown)
    first = found.findings[0]
    assert first.probability >= CONFIDENCE and first.chain
    assert "{" not in first.remedy and len(found.text().splitlines()) <= 10
    json.dumps(found.to_dict())


def test_a_replay_that_parts_without_a_reason_is_no_healthy_run() -> None:
    mismatch = ReplayMismatch(7, "loss", 5.25, 5.24)
    replay = ReplayedStep("run", 9, 0, mismatch, 5.1, 1.0)
    found = ng.diagnose(healthy_run(), replay=replay)
    assert [(each.cause.name, each.step) for each in found.findings] == [("silent-corruption", 7)], found.text()
    explained = dataclasses.replace(replay, reasons=("the run noted after step 5: other software",))
    assert ng.diagnose(healthy_run(), replay=explained).is_healthy


def test_a_replay_of_one_run_is_no_evidence_about_two() -> None:
    with pytest.raises(ng.errors.NarrowgaugeError, match="two were named"):
        ng.diagnose(healthy_run(), healthy_run(), replay=ReplayedStep("run", 9, 0, None, 5.1, 1.0))  # type: ignore[call-overload]


def test_a_healthy_run_has_no_finding() -> None:
    for recipe in ("bfloat16/word", "float8-row/word", "bfloat16/naive", "float32/float32"):
        run = healthy_run(recipe)
        raise_events(run)
        found = ng.diagnose(run)
        assert found.is_healthy and not found.findings, (recipe, found.text())


def test_two_faults_are_two_findings_and_a_consequence_is_none() -> None:
    run = struck("slow-data-loader")
    spike(1)(run)
    raise_events(run)
    assert {finding.cause.name for finding in ng.diagnose(run).findings} == {"slow-data-loader", "bad-data"}
    # A gradient that dies after memory was damaged is no fault of its own.
    run = struck("silent-corruption")
    for row in later(run.gauges):
        set_tensors("grad:", rms=0.0)(row)
    assert [finding.cause.name for finding in ng.diagnose(run).findings] == ["silent-corruption"]


def test_what_was_not_recorded_is_unknown_and_what_would_record_it_is_said() -> None:
    run = struck("attention-growth")
    run.gauges.clear()
    run.events[:] = [{"kind": "start", "step": 0, "message": "tiny"}]
    spike(12)(run)
    seen = observe(gather(run))
    assert seen["attention-logits-grow"].state == "unknown" and seen["loss-spikes"].state == "present"
    found = ng.diagnose(run)
    assert any("gauges" in said for said in found.missing)
    assert found.next_measurement is not None and found.next_measurement.gain > 0


def test_a_replay_is_advised_of_the_run_whatever_words_its_path_holds(tmp_path: Path) -> None:
    run = struck("lost-updates")
    moved = dataclasses.replace(run, path=tmp_path / "STEPS-RUN-1")
    moved.__dict__["gauges"] = run.gauges
    (moved.path / "data").mkdir(parents=True)
    (moved.path / "data" / "data.json").touch()
    measure = ng.diagnose(moved).next_measurement
    assert measure is not None and measure.what.startswith(f"narrowgauge diagnose {moved.path} --replay 110: ")


def test_nothing_is_claimed_below_the_confidence() -> None:
    run = healthy_run()
    run.steps[:] = [{"step": row["step"], "loss": row["loss"]} for row in run.steps]
    run.gauges.clear()
    for row in later(run.steps)[:3]:
        row["loss"] += 3.0
    raise_events(run)
    found = ng.diagnose(run)
    first = found.causes[0]
    assert bool(found.findings) == (first.cause.name != HEALTHY and first.probability >= CONFIDENCE)
    if not found.findings:
        assert "not known from this record" in found.verdict or found.is_healthy


def test_the_tables_fit_together() -> None:
    assert next(iter(CAUSES)) == HEALTHY and len(CAUSES) > 30
    for cause in CAUSES.values():
        assert set(cause.predicts) <= set(SIGNS), cause.name
        assert {*cause.required, *cause.notes} <= set(cause.predicts), cause.name
        assert all(0 < chance <= 1 for chance in cause.predicts.values())
        assert cause.predicts or cause.measure or cause.name == HEALTHY, cause.name
        assert not cause.remedy.endswith((",", ";")) and cause.title and cause.source
    predicted = {sign for cause in CAUSES.values() for sign in cause.predicts}
    assert set(SIGNS) == predicted, f"signs that no cause predicts: {set(SIGNS) - predicted}"
    assert all(0 < sign.base_rate < 0.5 for sign in SIGNS.values())


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def call(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), prog_name="narrowgauge")


def spiked(folder: Path, **config: object) -> Path:
    run = healthy_run(**config)
    spike(1)(run)
    return written(run, folder)


def test_the_command_prints_ten_lines_or_json(tmp_path: Path) -> None:
    folder = spiked(tmp_path / "run")
    said = call("diagnose", str(folder))
    assert said.exit_code == 0 and "bad-data" in said.output and len(said.output.splitlines()) <= 10
    found = json.loads(call("diagnose", str(folder), "--json").output)
    assert found["findings"][0]["cause"] == "bad-data" and found["findings"][0]["step"] == AT


def test_broken_and_partial_records_say_so_in_one_line(tmp_path: Path) -> None:
    folder = spiked(tmp_path / "run")
    gauges, rows = folder / "gauges.jsonl", folder / "steps.jsonl"
    gauges.write_text(gauges.read_text()[:900] + "\nxx\n" + gauges.read_text()[900:])
    rows.write_text(rows.read_text()[:-40])
    said = call("diagnose", str(folder))
    assert said.exit_code == 0 and "bad-data" in said.output and "not recorded: the gauges" in said.output
    rows.write_text("xx\n" + rows.read_text())
    for words in ([str(folder)], [str(tmp_path / "none")], [str(tmp_path)]):
        said = call("diagnose", *words)
        assert said.exit_code == 2 and "Traceback" not in said.output and said.output.count("\n") <= 2


def test_a_foreign_log_is_diagnosed_from_what_it_holds(tmp_path: Path) -> None:
    history = [
        {"step": step, "loss": 9.0 if step == AT else 4.0 - step / NUM_STEPS, "learning_rate": 1e-3}
        for step in range(1, NUM_STEPS)
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history, "global_step": NUM_STEPS}))
    found = ng.diagnose(tmp_path)
    assert found.findings[0].cause.name == "bad-data" and any("recipe" in said for said in found.missing)


def test_show_causes_lists_every_cause() -> None:
    rows = json.loads(call("show", "causes", "--json").output)
    assert [row["name"] for row in rows] == list(CAUSES)
    assert "what to do" in call("show", "causes").output
