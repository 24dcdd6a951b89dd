"""Signs that follow from arithmetic or from what a step was trained on: each is where it must be, and not in its neighbour."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

import narrowgauge as ng
from analysis.diagnosis.records import AT, PARAMETERS, Row, healthy_run, later, raise_events, tensor, update
from narrowgauge.analysis.diagnosis.evidence import gather
from narrowgauge.analysis.diagnosis.signs.sign_table import SIGNS, observe
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import FIRST_EXPONENT, NUM_EXPONENTS

Q, K = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"


def changed(recipe: str, *changes: Callable[[Run], object], **config: object) -> Run:
    run = healthy_run(recipe, **config)
    for change in changes:
        change(run)
    raise_events(run)
    return run


def rows(change: Callable[[Row], Row]) -> Callable[[Run], object]:
    return lambda run: [row.update(change(row)) for row in later(run.steps)]


def samples(change: Callable[[Row], object], since: int = AT) -> Callable[[Run], object]:
    return lambda run: [change(row) for row in run.gauges if row["step"] >= since]


def weights_grow(*names: str) -> Callable[[Row], object]:
    return lambda row: row["tensors"].update(
        {f"weight:{name}.weight": tensor(rms=0.5 * row["step"] / 20) for name in names}
    )


def histogram(share: float) -> Callable[[Row], object]:
    counts = [0] * NUM_EXPONENTS
    counts[-23 - FIRST_EXPONENT], counts[-10 - FIRST_EXPONENT] = round(100 * share), round(100 * (1 - share))
    return lambda row: row.update(histograms={"output_grad": counts})


def weighted(spread: float) -> Callable[[Run], object]:
    draw = random.Random(1)

    def strike(run: Run) -> None:
        for row in run.steps:
            factor = math.exp(draw.uniform(-spread, spread))
            row.update(loss=row["loss"] * factor, grad_norm=row["grad_norm"] * factor)

    return strike


def resumed(run: Run) -> None:
    run.events.append({"kind": "resume", "step": AT - 1, "message": f"from step {AT - 1}"})


def again(run: Run) -> None:
    for row, first in zip(later(run.steps), run.steps, strict=False):
        row["batch_crc"] = first["batch_crc"]


def frozen(*flows: str) -> Callable[[Row], object]:
    """Both weights have no gradient; outputs of these have one."""
    return lambda row: row["tensors"].update(
        {f"grad:{name}.weight": tensor(rms=0.0) for name in (Q, K)}
        | {f"output_grad:{name}": tensor(rms=float(name in flows)) for name in (Q, K)}
    )


def rough(row: Row) -> Row:
    return {"loss": row["loss"] + 2.0, "grad_norm": 3.0}


def on_cpu(run: Run) -> None:
    run.run["machine"]["device"] = "cpu"
    for row in run.steps:
        row["cpu_seconds"] = 0.09


PRESENT: dict[str, tuple[str, Run]] = {
    "tokens-are-unusual": ("bad-data", changed("bfloat16/word", rows(
        lambda row: {"unigram_loss": 7.0, "loss": row["loss"] + 1.5} if row["step"] < AT + 30 else {}))),
    "loss-and-gradient-vary-together": ("micro-batch-normalization", changed("bfloat16/word", weighted(0.4))),
    "repeats-begin-at-resume": ("resume-changed", changed("bfloat16/word", resumed, again)),
    "rate-moves-at-resume": ("resume-changed", changed(
        "bfloat16/word", resumed, rows(lambda row: {"lr": 3e-2, "loss": row["loss"] + 0.6}))),
    "queries-and-keys-grow": ("attention-growth", changed(
        "bfloat16/word", samples(weights_grow(Q, K), 0),
        samples(lambda row: row["attention"].update({"model.layers.1.self_attn": [40.0, 0.2]})))),
    "logits-move": ("logit-drift", changed("bfloat16/word", samples(lambda row: row["logits"].update(log_z=2.0)))),
    "gradients-at-edge": ("gradient-underflow", changed("float16/split", samples(histogram(0.0), 0), samples(histogram(0.6)))),
    "blocks-round-to-zero": ("block-range", changed("mxfp8/word", samples(
        lambda row: row["tensors"].update({"input:model.layers.1.mlp.down_proj": tensor(underflow=0.2)})))),
    "gradient-flows-past": ("frozen-parameter", changed("bfloat16/word", samples(frozen(Q, K)))),
    "computing-slows-down": ("throttling", changed(
        "bfloat16/word", on_cpu, rows(lambda row: {"cpu_seconds": 0.2, "seconds": 0.22}))),
    "rate-bursts": ("recovering-spike", changed("bfloat16/word", rows(
        lambda row: {"lr": 0.1} if row["step"] < AT + 3 else rough(row) if row["step"] < AT + 12 else {}))),
}  # fmt: skip
"""By sign: the cause that it tells, and a record that shows it."""


@pytest.mark.parametrize("sign", PRESENT)
def test_the_sign_is_there_and_its_cause_is_named(sign: str) -> None:
    cause, run = PRESENT[sign]
    found = ng.diagnose(run)
    shown = [(one.sign, one.sentence) for one in found.signs]
    assert sign in dict(shown), shown
    assert [one.cause.name for one in found.findings] == [cause], (found.verdict, shown)
    assert observe(gather(healthy_run()))[sign].state != "present"


def test_what_looks_alike_is_not_the_same() -> None:
    def state(run: Run, sign: str) -> str:
        return observe(gather(run))[sign].state

    # Weights that all grow alike; a dead block, of which the last output alone has a gradient; a loss that varies by itself.
    everything = [name.removesuffix(".weight") for name in PARAMETERS]
    assert state(changed("bfloat16/word", samples(weights_grow(*everything), 0)), "queries-and-keys-grow") == "absent"
    assert state(changed("bfloat16/word", samples(frozen(K))), "gradient-flows-past") == "absent"
    run = changed("bfloat16/word", weighted(0.4))
    for row in run.steps:
        row["grad_norm"] = 0.5
    assert state(run, "loss-and-gradient-vary-together") == "absent"
    # Other programs make steps longer, and take no more of the processor's time.
    run = changed("bfloat16/word", on_cpu, rows(lambda row: {"seconds": 0.4}))
    assert state(run, "computing-slows-down") == "absent" and ng.diagnose(run).is_healthy
    # One batch that was rare, where the embedding's gradient alone jumped.
    run = changed(
        "bfloat16/word", rows(lambda row: {"embedding_grad_norm": 9.0, "grad_norm": 9.01} if row["step"] == AT else {})
    )
    assert state(run, "embedding-gradient-alone") == "absent"


def test_a_massive_channel_is_a_note_where_no_cast_shares_its_scale() -> None:
    def massive(row: Row) -> None:
        row["tensors"].update({f"input:{name}": tensor(amax=7.9, sqnr_db=None) for name in (Q, K)})
        row["tensors"]["weight:model.norm.weight"] = tensor(amax=1.0)

    found = ng.diagnose(changed("bfloat16/word", samples(massive)))
    assert found.is_healthy and len(found.notes) == 1 and "massive-activations" in found.notes[0]


def test_updates_are_measured_by_their_rate_and_not_where_they_were_lost() -> None:
    small = samples(lambda row: row.update(updates={name: update(update_to_weight=1e-6) for name in PARAMETERS}), 0)
    lost = samples(
        lambda row: row.update(updates={name: update(update_to_weight=1e-6, edq=0.1) for name in PARAMETERS}), 0
    )
    states = [observe(gather(changed("bfloat16/word", one)))["updates-below-rate"].state for one in (small, lost)]
    assert states == ["present", "unknown"]


def test_long_runs_have_more_of_what_is_rare() -> None:
    rates = [SIGNS["tokens-are-unusual"].base_rate_over(steps) for steps in (1, 10_000, 1_000_000)]
    assert rates[0] == pytest.approx(0.01, rel=0.01) and rates == sorted(rates) and 0.9 < rates[2] < 1
