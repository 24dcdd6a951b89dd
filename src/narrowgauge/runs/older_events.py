"""Older events: records from before events carried the id of their detector, read as if they did.

Such a row tells its detector by its sentence alone, so this is the one place that reads sentences. The phrases are those of the
versions that wrote them: they stay as they are when a message is reworded.
"""

from __future__ import annotations

import re

from narrowgauge.runs.schema import Row

_ONE_DETECTOR = {
    "lost_updates": "lost-updates", "noise": "noise", "frozen_moments": "frozen-moments", "underflow": "underflow",
    "overflow": "overflow", "logits": "logit-drift", "loss_spike": "loss-spike", "gradient_spike": "gradient-spike",
    "unchanged_weights": "unchanged-weights", "lost_decay": "lost-decay", "loss_climb": "loss-climb",
    "straggler": "straggler", "first_bad_value": "replay",
}  # fmt: skip
"""Kinds of events that one detector raised."""

# Of several phrases in one sentence the first counts.
_PHRASES: dict[str, tuple[tuple[str, str], ...]] = {
    "noise": (("most of that is rounding noise", "weight-noise"),),
    "outliers": (
        ("has outliers:", "growing-outliers"),
        ("times the rms of all", "growing-feature"),
        ("times the energy of all others", "drowning-feature"),
        ("has a growing amax:", "weight-surge"),
        ("has grown to an amax", "weight-peak"),
    ),
    "growth": (("has grown to an rms", "weight-growth"), ("the gradient norm grows", "gradient-growth")),
    "attention": (
        ("has attention logits up to", "attention-logits"),
        ("has growing attention logits", "attention-growth"),
        ("attends to one position only", "attention-entropy"),
    ),
    "dead_layer": (("is zero everywhere", "dead-gradient"), ("received no update", "dead-update")),
    "nonfinite": (
        ("the logits are not finite", "nonfinite-logits"),
        ("has attention logits that are not finite", "nonfinite-attention"),
        ("the loss or the gradient norm is not finite", "nonfinite-step"),
        ("values that are not finite, in every sample", "nonfinite-scaled"),
    ),
    "loss_scale": (
        ("the loss scale was halved", "scale-halvings"),
        ("the loss scale has reached its floor", "scale-floor"),
        ("steps were skipped", "scale-skips"),
    ),
    "corruption": (
        ("changed in memory", "rest"),
        ("computes another gradient", "recomputation"),
        ("compute different gradients", "recomputation"),
        ("differs", "replicas"),
    ),
    "note": ((" from there on", "changed-settings"), ("the run started with", "changed-software")),
}
_BY_TENSOR: dict[str, tuple[tuple[str, dict[str, str]], ...]] = {
    "outliers": (("far above its recent values", {"weight": "weight-jump", "input": "input-jump"}),),
    "nonfinite": (
        (
            "values that are not finite",
            {"weight": "nonfinite", "input": "nonfinite", "output": "nonfinite",
             "output_grad": "nonfinite-gradient", "grad": "nonfinite-gradient"},
        ),
    ),
}  # fmt: skip
"""Phrases that several detectors used, by kind of tensor."""


_OPERATION = re.compile(r"\baten\.\w+")
"""The name of an operation in the sentence of a bad value."""


def with_detector(event: Row) -> Row:
    """A row of ``events.jsonl`` with the columns ``detector``, ``phase`` and ``operation``; one with a detector stays as it is.

    Example:
        >>> with_detector({"kind": "note", "step": 8, "message": "lr was 0.1 up to step 8 and is 0.2 from there on"})["detector"]
        'changed-settings'
    """
    kind = event.get("kind")
    if "detector" in event or not isinstance(kind, str):
        return event
    text, tensor = str(event.get("message", "")), str(event.get("tensor") or "").partition(":")[0]
    shared = [found[tensor] for phrase, found in _BY_TENSOR.get(kind, ()) if phrase in text and tensor in found]
    own = [detector for phrase, detector in _PHRASES.get(kind, ()) if phrase in text]
    detector = next(iter([*own, *shared]), _ONE_DETECTOR.get(kind, ""))
    phase = {"phase": "forward"} if kind == "first_bad_value" and "(forward)" in text else {}
    made_by = _OPERATION.search(text) if kind == "first_bad_value" else None
    operation = {"operation": made_by[0]} if made_by is not None and "operation" not in event else {}
    return {**event, "detector": detector, **phase, **operation} if detector else event
