"""What was declared of the optimizer and of a step, against what they are: rule, settings, decayed parameters, micro-batches.

Declarations come from ``ng.task``, or from the arguments of a framework's trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from narrowgauge.recompute.capture import StepCapture
from narrowgauge.recompute.piece_results import DEPARTS, PieceResult
from narrowgauge.recompute.rules.definitions import decay_of
from narrowgauge.recompute.task import Task

PIECE = "update"


def check_declared(step: StepCapture, task: Task, groups: Iterable[Mapping[str, Any]]) -> list[PieceResult]:
    """Compare a step with what was declared; nothing is compared that was not.

    Args:
        step: after its update.
        task: the declarations.
        groups: those of the optimizer.
    """
    return [
        *_of_rule(step, task),
        *_of_settings(step, task, list(groups)),
        *_of_decay(step, task),
        *_of_micro_batches(step, task),
    ]


def _of_rule(step: StepCapture, task: Task) -> Iterator[PieceResult]:
    if task.optimizer and step.rule and step.rule != task.optimizer:
        values = {"rule": step.rule, "declared": task.optimizer}
        yield PieceResult(PIECE, DEPARTS, (), 1.0, 0.0, "optimizer-other", values, step.step)


def _of_settings(step: StepCapture, task: Task, groups: list[Mapping[str, Any]]) -> Iterator[PieceResult]:
    for name, declared in task.settings.items():
        found = [value for group in groups if (value := _setting(name, group)) is not None]
        wrong = [value for value in found if not _is_like(value, declared)]
        if wrong:
            values = {"setting": name, "value": wrong[0], "declared": declared}
            yield PieceResult(PIECE, DEPARTS, (), 1.0, 0.0, "setting-other", values, step.step)


def _setting(name: str, group: Mapping[str, Any]) -> Any:
    """A setting of a group; the rate as it was before schedules, and decay only where there is any."""
    if name == "lr":
        return group["initial_lr"] / group.get("lr_factor", 1.0) if "initial_lr" in group else None
    value = group.get(name)
    return None if name == "weight_decay" and not value else value


def _is_like(value: Any, declared: Any) -> bool:
    if isinstance(declared, (tuple, list)):
        return len(value) == len(declared) and all(map(_is_like, value, declared))
    return bool(abs(float(value) - float(declared)) <= 1e-6 * abs(float(declared)))


def _of_decay(step: StepCapture, task: Task) -> Iterator[PieceResult]:
    declared = task.decay_groups
    if declared == "":
        return
    wrong: dict[str, list[str]] = {"decay-unwanted": [], "decay-wanted": []}
    has_decay = any(decay_of(sample) for sample in step.parameters.values())
    for name, sample in step.parameters.items():
        if isinstance(declared, str):
            is_left_out = declared == "matrices-not-embeddings" and name in step.embeddings
            wanted = declared == "all" or (len(sample.shape) > 1 and not is_left_out)
        else:
            wanted = name in declared
        is_decayed = decay_of(sample) > 0
        if is_decayed and not wanted:
            wrong["decay-unwanted"].append(name)
        elif has_decay and wanted and not is_decayed:
            wrong["decay-wanted"].append(name)
    told = declared if isinstance(declared, str) else "by name"
    for cause, names in wrong.items():
        if names:
            yield PieceResult(PIECE, DEPARTS, tuple(names), 1.0, 0.0, cause, {"declared": told}, step.step)


def _of_micro_batches(step: StepCapture, task: Task) -> Iterator[PieceResult]:
    """More of them than declared; an epoch may end with fewer."""
    number = len(step.calls)
    if task.micro_batches is not None and number > task.micro_batches:
        values = {"number": number, "declared": task.micro_batches}
        yield PieceResult("gradient", DEPARTS, (), 1.0, 0.0, "micro-batches-many", values, step.step)
