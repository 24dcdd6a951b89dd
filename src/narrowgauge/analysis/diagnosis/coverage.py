"""What a record shows, what it does not, and the one flag or call that would show each: what was checked bounds what is claimed.

A run without a sign is not a run without a fault: a label that is shifted, a mask that lets the future through or a parameter
in no group of the optimizer leave rows like any others. So an answer lists what was looked at, and what this record cannot show.

Advice is given in the words of the loop at hand. ``narrowgauge train`` has flags, a loop of one's own has calls, and the
log of another framework has neither: :data:`WORDS` says each in its own way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from narrowgauge.analysis.diagnosis.evidence import Evidence
from narrowgauge.runs.record import Run

LOOPS: dict[str, str] = {
    "trainer": "a run of narrowgauge train",
    "recorder": "a loop of one's own with ng.RunRecorder",
    "log": "the log of another framework",
}
"""How a record may have come about."""


@dataclass(frozen=True, slots=True)
class Area:
    """Something about a run that a record may show.

    Args:
        reads: what it takes, any of them, as for :meth:`Evidence.has`.
        trainer, recorder, log: what records it, in each loop of :data:`LOOPS`; empty where every such record has it, or none can.
        applies: whether the run can have it at all.
    """

    name: str
    reads: tuple[str, ...]
    trainer: str
    recorder: str
    log: str
    applies: Callable[[Evidence], bool] = lambda evidence: True


_RECORDED = "ng.RunRecorder in the loop"

AREAS: tuple[Area, ...] = (
    Area("losses", ("steps.loss",), "", "recorder.step(loss)", "a column loss"),
    Area("gradient norms", ("steps.grad_norm",), "", "recorder.step(loss, grad_norm=norm)", "a column grad_norm"),
    Area("learning rates", ("steps.lr",), "", "recorder.step(loss, lr=rate)", "a column lr"),
    Area("evaluations", ("run.evals",), "--eval-every 100", "recorder.evaluate(loss)", "a column val_loss"),
    Area("repeated batches", ("steps.batch_crc",), "", "recorder.step(loss, batch=tokens)", _RECORDED),
    Area("frequencies of tokens", ("steps.unigram_loss",), "", "recorder.step(loss, unigram_loss=…)", ""),
    Area(
        "tensors of layers", ("tensors.rms",), "--gauges-every 20", "ng.RunRecorder(…, gauges_every=20)",
        "ng.RunRecorder(…, gauges_every=20) in the loop",
    ),
    Area(
        "lost updates", ("steps.edq", "updates.edq"), "--audit-every 10", "an optimizer of Narrowgauge's", "",
        lambda evidence: evidence.recipe is None or evidence.rounds_weights(),
    ),
    Area("durations of steps", ("steps.seconds",), "", "", _RECORDED),
    Area(
        "a step computed again", ("replay.step",), "narrowgauge diagnose RUN --replay STEP", "", "",
        lambda evidence: evidence.has("run.data") or evidence.has("replay.step"),
    ),
    Area("what model and loss compute", (), "", "ng.check(model, optimizer)", "ng.check(model, optimizer)"),
)  # fmt: skip
"""The areas, in the order in which they are told; the last is what no row shows."""


def loop_of(run: Run) -> str:
    """How a run's record came about, a key of :data:`LOOPS`."""
    return "log" if run.is_foreign else "recorder" if "recorder" in run.run else "trainer"


def checked(evidence: Evidence) -> tuple[str, ...]:
    """The areas that the record shows."""
    return tuple(area.name for area in AREAS if any(evidence.has(read) for read in area.reads))


def not_seen(evidence: Evidence) -> dict[str, str]:
    """The areas that the run has and the record does not show, each with what would; empty text where nothing there is does."""
    loop = loop_of(evidence.run)
    return {
        area.name: str(getattr(area, loop))
        for area in AREAS
        if area.applies(evidence) and not any(evidence.has(read) for read in area.reads)
    }


# ── advice in the words of the loop ──────────────────────────────────────────────────────────────────────────────────────

WORDS: tuple[tuple[str, str, str], ...] = (
    ("; resume without --accept-changes", "", ""),
    ("--on-spike skip leaves such steps out", "the loop may leave such steps out", "the loop may leave such steps out"),
    ("--on-spike skip leaves such batches out", "the loop may leave such batches out", "the loop may leave such batches out"),
    ("--accumulation-dtype float32, or kahan for the same bytes", "Sum them in float32, as ng.GradientAccumulator does",
     "Sum them in float32"),
    ("Take compute 'bfloat16', or keep '{module}' in float32 (keep = [\"{module}\"] in a recipe file)",
     "Prepare it with compute 'bfloat16', or keep '{module}' in float32 (keep = [\"{module}\"] in a recipe file)",
     "Train in bfloat16, or keep the layer in which it begins in float32"),
    ("take compute 'bfloat16'", "prepare it with compute 'bfloat16'", "train in bfloat16"),
    ("a longer --warmup-steps", "a longer warm-up", "a longer warm-up"),
    ("--eps", "epsilon", "epsilon"),
    ("--lr", "the learning rate", "the learning rate"),
    ("the same --data, --batch-size and --sequence-length", "the same data, batch size and sequence length",
     "the same data, batch size and sequence length"),
    ("one --seed", "one seed", "one seed"),
    ("--gauges-every 20", "ng.RunRecorder(…, gauges_every=20)", "ng.RunRecorder(…, gauges_every=20) in the loop"),
    ("--audit-every 10", "an optimizer of Narrowgauge's", "an optimizer of Narrowgauge's"),
    ("--verify-every 100", "a comparison of what the ranks hold", "a comparison of what the ranks hold"),
    ("--eval-every 100", "recorder.evaluate(loss)", "a column val_loss"),
    ("a run of narrowgauge train of this version, which records batch_crc", "recorder.step(loss, batch=tokens)",
     "recorder.step(loss, batch=tokens) of ng.RunRecorder"),
)  # fmt: skip
"""How advice to ``narrowgauge train`` is said to a loop of one's own, and where there is but a log."""

_COLUMN = re.compile(r"a run of narrowgauge train of this version, which records (\w+)")


def in_words_of(loop: str, advice: str) -> str:
    """Advice in the words of a loop of :data:`LOOPS`.

    Example:
        >>> in_words_of("recorder", "Lower --lr by three to ten times."), in_words_of("trainer", "Lower --lr.")
        ('Lower the learning rate by three to ten times.', 'Lower --lr.')
    """
    if loop == "trainer":
        return advice
    for flag, recorder, log in WORDS:
        advice = advice.replace(flag, recorder if loop == "recorder" else log)
    return _COLUMN.sub(r"recorder.step(loss, \1=…)" if loop == "recorder" else r"a column \1", advice)
