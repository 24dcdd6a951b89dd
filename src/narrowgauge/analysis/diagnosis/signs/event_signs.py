"""Signs that are events: what the detectors of the monitor raised, and what the trainer wrote.

A detector alone decides whether something happened, by its own threshold; here its events become signs. Several detectors of
one thing make one sign, and one detector of several kinds of tensor makes one sign per kind, since causes differ in where they
strike.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable
from dataclasses import replace

from narrowgauge.analysis.diagnosis.evidence import Evidence
from narrowgauge.analysis.diagnosis.signs.sign import ABSENT, UNKNOWN, Observation, Sign, present
from narrowgauge.analysis.monitor.alarms import Alarms
from narrowgauge.analysis.monitor.detectors import DETECTORS
from narrowgauge.runs.finding import Finding
from narrowgauge.runs.schema import Row, number, step_of

GAUGES, AUDIT, VERIFIED = "{gauges}", "{audit}", "{verification}"
_GLU = ("input:*down_proj", "input:*.w2", "input:*fc2", "input:*c_proj")


def first_of(events: Iterable[Row]) -> Observation:
    """The first event as an observation."""
    event = min(events, key=step_of, default=None)
    if event is None:
        return ABSENT
    tensor = event.get("tensor")
    return present(
        step_of(event),
        str(event.get("message") or event.get("kind")).rstrip("."),
        tensor if isinstance(tensor, str) else None,
        number(event.get("value")),
        number(event.get("threshold")),
    )


def is_named(event: Row, patterns: tuple[str, ...]) -> bool:
    """Whether an event is about a tensor that a pattern matches; any event where there is no pattern."""
    return not patterns or any(fnmatch.fnmatchcase(str(event.get("tensor") or ""), pattern) for pattern in patterns)


def _raised(
    evidence: Evidence, *detectors: str, on: tuple[str, ...] = (), off: tuple[str, ...] = (), least: int = 1
) -> Observation:
    events = [event for event in evidence.raised_by(*detectors) if is_named(event, on)]
    events = [event for event in events if not (off and is_named(event, off))]
    return first_of(events[least - 1 :])


def _detected(
    name: str,
    meaning: str,
    base_rate: float,
    *detectors: str,
    on: tuple[str, ...] = (),
    off: tuple[str, ...] = (),
    least: int = 1,
) -> Sign:
    """The sign that detectors have raised an event; ``least``: that many of them."""
    kind = DETECTORS[detectors[0]].kind
    tables = {DETECTORS[each].table for each in detectors}
    needs = "" if tables == {"steps"} else AUDIT if kind == "lost_updates" else GAUGES

    def find(evidence: Evidence) -> Observation:
        return _raised(evidence, *detectors, on=on, off=off, least=least)

    return Sign(name, meaning, (f"events.{kind}",), base_rate, find, needs)


def _audited(evidence: Evidence, detector: str, *checks: str) -> Observation:
    """What a detector or a check raised, else the step where the audit of all parameters exceeds that detector's threshold."""
    raised, row = _raised(evidence, detector, *checks), DETECTORS[detector]
    if raised.state == "present":
        return raised
    facts, length = Alarms(evidence.recipe).facts, 0
    for step in evidence.run.steps:
        value = number(step.get(row.field))
        if value is None:
            continue
        applies = row.applies({"noise": number(step.get("noise"))}, facts)
        length = length + 1 if applies and row.trips(value, row.threshold) else 0
        if length == row.consecutive:
            at = int(step["step"])
            found = Finding.filled(row.name, f"the model {row.message}", "", {"value": value, "limit": row.threshold})
            return present(at, found.message, None, value, row.threshold)
    return ABSENT


def _of_updates(name: str, meaning: str, base_rate: float, detector: str, *checks: str) -> Sign:
    """The sign of a detector whose metric the audit measures too, where no gauge does; ``checks`` raise the same event."""
    told = _detected(name, meaning, base_rate, detector)
    return replace(told, find=lambda evidence: _audited(evidence, detector, *checks), needs=AUDIT)


def _saturates(evidence: Evidence) -> Observation:
    """With delayed scales a sample's cast saturates in healthy runs too: there only the count of every step is a sign."""
    if evidence.recipe is not None and evidence.is_delayed():
        return UNKNOWN
    return _raised(evidence, "overflow")


def _noted(name: str, meaning: str, check: str, base_rate: float = 0.002, reads: str = "run.ours") -> Sign:
    """The sign that a check of the run has raised an event."""
    return Sign(name, meaning, (reads,), base_rate, lambda evidence: _raised(evidence, check))


def _verified(name: str, meaning: str, *checks: str, is_state: bool) -> Sign:
    """The sign that ranks were compared and differed; unknown where the run ended before they were."""

    def find(evidence: Evidence) -> Observation:
        found = _raised(evidence, *checks)
        every, saves = (evidence.number_of(name) or math.inf for name in ("verify_every", "checkpoint_every"))
        last = evidence.steps[-1] if evidence.steps else 0
        # States are compared before each checkpoint too, of which the last is written at the end.
        saved = is_state and every < math.inf and (saves <= last or "finish" in evidence.events)
        return UNKNOWN if found is ABSENT and not (every <= last or saved) else found

    return Sign(name, meaning, ("run.ranks",), 0.002, find, needs=VERIFIED)


SIGNS_OF_EVENTS: tuple[Sign, ...] = (
    _of_updates("updates-lost", "the storage takes less than nine tenths of the update", 0.006, "lost-updates", "audit"),
    _of_updates("rounding-noise", "the storage adds more rounding noise than update", 0.01, "noise"),
    _detected("moments-freeze", "second moments no longer follow the gradients", 0.0015, "frozen-moments"),
    _detected(
        "gradients-underflow", "a cast rounds much of a gradient to zero", 0.001, "underflow", on=("output_grad:*", "grad:*")
    ),
    _detected(
        "operands-underflow", "a cast rounds much of an input or a weight to zero", 0.0015, "underflow",
        on=("input:*", "weight:*"),
    ),
    Sign("operands-saturate", "a cast saturates much of a tensor", ("events.overflow",), 0.0015, _saturates, GAUGES),
    _detected(
        "gate-outliers", "the input of a down projection, after the gate, has growing outliers", 0.0015,
        "growing-outliers", "growing-feature", "drowning-feature", on=_GLU,
    ),
    _detected(
        "channel-outliers", "few channels of an input, not after a gate, have growing outliers", 0.002,
        "growing-outliers", "growing-feature", "drowning-feature", off=_GLU,
    ),
    _detected("weight-jumps", "a weight's largest magnitude jumped, as no update makes it", 0.0005, "weight-jump"),
    _detected("input-jumps", "a layer's largest input jumped", 0.003, "input-jump"),
    _detected("weights-grow", "a weight grows far beyond what it was", 0.01, "weight-surge", "weight-growth", "weight-peak"),
    _detected("attention-logits-grow", "attention logits grow", 0.0007, "attention-logits", "attention-growth"),
    _detected("attention-collapses", "attention settles on one position", 0.0007, "attention-entropy"),
    _detected("logits-drift", "the model's logits drift away from zero", 0.0015, "logit-drift"),
    _detected("gradient-is-zero", "a gradient is zero everywhere", 0.001, "dead-gradient"),
    _detected("parameter-does-not-move", "a parameter received no update", 0.002, "dead-update"),
    _detected(
        "values-not-finite", "weights, inputs or logits hold values that are not finite", 0.002,
        "nonfinite", "nonfinite-logits", "nonfinite-attention",
    ),
    _detected(
        "gradients-not-finite", "gradients hold values that are not finite, beyond the search for a loss scale", 0.002,
        "nonfinite-gradient", "nonfinite-scaled",
    ),
    _detected("loss-scale-falls", "the loss scale is halved again and again", 0.003, "scale-halvings", "scale-skips"),
    _detected("loss-scale-at-floor", "the loss scale has reached its floor", 0.002, "scale-floor"),
    _detected("loss-spikes", "the loss jumps far above recent steps", 0.005, "loss-spike"),
    _detected("gradient-spikes", "the gradient norm jumps far above recent steps", 0.1, "gradient-spike"),
    _detected(
        "repeated-spikes", "the loss or the gradient norm jumps three times or more", 0.02, "loss-spike", "gradient-spike",
        least=3,
    ),
    _detected("loss-climbs", "the loss climbs slowly and does not recover", 0.005, "loss-climb"),
    _detected("gradient-norm-grows", "the gradient norm grows far beyond what it was", 0.01, "gradient-growth"),
    _verified("ranks-hold-other-values", "ranks that should hold the same values do not", "replicas", is_state=True),
    _verified(
        "computes-other-values", "a rank computes other gradients of the same micro-batch, or memory changed at rest",
        "recomputation", "rest", is_state=False,
    ),
    Sign(
        "weight-stands-still", "a trained weight ends as it began, to the bit", ("steps.loss",), 0.0001,
        # Other records do not compare the first weights with the last.
        lambda evidence: found if (found := _raised(evidence, "standing-still")).state == "present" else UNKNOWN,
    ),
    _noted("rank-is-late", "one rank is the last to arrive in nearly all steps", "straggler", reads="steps.ranks"),
    _noted("settings-changed", "the run was resumed with other settings", "changed-settings", 0.01),
    _noted("software-changed", "the run was resumed with other versions or on another machine", "changed-software", 0.01),
    Sign(
        "checkpoint-was-damaged", "a checkpoint did not match its manifest", ("run.ours",), 0.002,
        lambda evidence: first_of(evidence.events.get("checkpoint_damaged", [])),
    ),
)  # fmt: skip
