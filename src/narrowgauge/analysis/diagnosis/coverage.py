"""What a record shows, what it does not, and the one flag or call that would show each: what was checked bounds what is claimed.

A run without a sign is not a run without a fault: a label that is shifted, a mask that lets the future through or a parameter
in no group of the optimizer leave rows like any others. So an answer lists what was looked at, and what this record cannot show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from narrowgauge.analysis.diagnosis.evidence import Evidence
from narrowgauge.analysis.diagnosis.loop_terms import in_terms_of, loop_of


@dataclass(frozen=True, slots=True)
class Area:
    """Something about a run that a record may show.

    Args:
        reads: what it takes, any of them, as for :meth:`Evidence.has`.
        trainer, recorder, log: what records it, in each loop of :data:`~narrowgauge.analysis.diagnosis.loop_terms.LOOPS`, as a
            template of its terms; empty where every such record has it, or none can.
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
    Area("evaluations", ("run.evals",), "{evaluations}", "{evaluations}", "{evaluations}"),
    Area("repeated batches", ("steps.batch_crc",), "", "{batches}", _RECORDED),
    Area("frequencies of tokens", ("steps.unigram_loss",), "", "{unigram_loss}", ""),
    Area("tensors of layers", ("tensors.rms",), "{gauges}", "{gauges}", "{gauges}"),
    Area(
        "lost updates", ("steps.edq", "updates.edq"), "{audit}", "{audit}", "",
        lambda evidence: evidence.recipe is None or evidence.rounds_weights(),
    ),
    Area("durations of steps", ("steps.seconds",), "", "", _RECORDED),
    Area(
        "what model and loss compute", ("run.recomputed",), "narrowgauge diagnose RUN --replay STEP",
        "ng.RunRecorder(…, audit_every=1000)", "ng.check(model, optimizer, step=2)",
    ),
)  # fmt: skip
"""The areas, in the order in which they are told; the last is what only a step shows that is computed again."""


def checked(evidence: Evidence) -> tuple[str, ...]:
    """The areas that the record shows."""
    return tuple(area.name for area in AREAS if any(evidence.has(read) for read in area.reads))


def not_seen(evidence: Evidence) -> dict[str, str]:
    """The areas that the run has and the record does not show, each with what would; empty text where nothing there is does.

    Where steps were computed again and no piece could be, to do so once more shows nothing.
    """
    loop = loop_of(evidence.run)
    return {
        area.name: "" if area is AREAS[-1] and evidence.recomputed else in_terms_of(loop, getattr(area, loop))
        for area in AREAS
        if area.applies(evidence) and not any(evidence.has(read) for read in area.reads)
    }
