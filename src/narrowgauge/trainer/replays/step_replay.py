"""Replay a step of a run: as it was, with everything watched, in float32, and with one place widened at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge._torch import plain_name
from narrowgauge.analysis.diagnosis.replay_findings import EXACT, ReplayedStep
from narrowgauge.runs.schema import METRICS, Row
from narrowgauge.trainer.recovery import replay_last_step
from narrowgauge.trainer.replays.past_steps import Moment, PastStep, in_other_recipe, replaying, require_finite
from narrowgauge.trainer.replays.step_tensors import tensors_of_step
from narrowgauge.trainer.replays.variants_of_step import Passes, VariantsOfStep, difference
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.step import train_step

_TOLD = 5


def replay_step(
    folder: str | Path,
    step: int,
    *,
    prepared: Callable[[Session], Any] | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> ReplayedStep:
    """Compute a step of a run again: as it was, in float32, and with each place of its arithmetic widened alone.

    Invariant: nothing in the run folder changes. The step that is analysed is the recorded one to the last digit, or the result
    says where it parts from the record.

    Args:
        folder: the run folder of ``narrowgauge train``.
        step: number of the step, from 1.
        prepared: called with each session that is built, such as to put hooks on its model.
        say: called with a sentence before what takes a while.
    Returns:
        What it showed, to be given to :func:`narrowgauge.diagnose`.
    Raises:
        RecordError: no such run or step, or its data, model or checkpoint cannot be used.

    Cost: the steps since the nearest checkpoint, then about fifteen eager steps in float32; memory for three copies of the
        model's weights and states.
    Example: ``narrowgauge.diagnose("runs/first", replay=narrowgauge.replay_step("runs/first", 28)).text()``
    """
    with replaying(folder, step, prepared=prepared, say=say) as past:
        require_finite(past.session)
        before = Moment.of(past.session)
        say(f"Repeating step {step}.")
        row, tensors = tensors_of_step(past.session, past.advance)
        bad = _bad_value(past.session, row, say)
        scale = past.session.loss_scale if past.session.optimizer.loss_scaler is not None else 1.0
        before.put(past.session)
        session = _eager(past.session, before, prepared)
        watched = _watched(session)
        before.put(session)
        found = ReplayedStep(
            Path(folder).name,
            step,
            past.started,
            past.departure,
            row["loss"],
            row["grad_norm"],
            bad,
            watched=watched,
            is_compared=step not in past.not_compared,
            reasons=tuple(past.reasons),
            notes=tuple(_notes(past)),
        )
        if session.config.recipe.compute.transform:
            return found
        say("Computing it in float32, and with each place widened.")
        return _with_variants(found, session, scale, tensors, prepared)


def _with_variants(
    found: ReplayedStep,
    session: Session,
    scale: float,
    tensors: Mapping[str, Tensor],
    prepared: Callable[[Session], Any] | None,
) -> ReplayedStep:
    """The result with the variants of the table, and what the storage lost."""
    variants = VariantsOfStep(session, scale)
    if prepared is not None:
        prepared(variants.passes.plain)
    rows, run, wide, own = variants.results()
    found = dataclasses.replace(found, variants=rows)
    lost = {} if own is None else _lost(own, variants.update(run, in_storage=False) or {})
    return dataclasses.replace(found, unexplained=_unexplained(found, wide, tensors, scale), **lost)


def _eager(session: Session, before: Moment, prepared: Callable[[Session], Any] | None) -> Session:
    """The session itself, or one at the same moment whose model is not compiled, so that its operations can be seen."""
    if not session.config.compile:
        return session
    eager = in_other_recipe(session, session.config.recipe, compile=False)
    if prepared is not None:
        prepared(eager)
    before.put(eager)
    return eager


def _bad_value(session: Session, row: Row, say: Callable[[str], object]) -> str:
    """Which operation made the first value that is not finite, after a step that has one and changed nothing."""
    values = (row["loss"], row["grad_norm"])
    if all(value is None or math.isfinite(value) for value in values) or not row["skipped"]:
        return ""
    return replay_last_step(session, say)[1].message


def _watched(session: Session) -> dict[str, Any]:
    """What the gauges read of the next step; the session has then taken it."""
    given = session.config
    session.config = dataclasses.replace(given, gauges_every=1)
    try:
        with session.watched():
            train_step(session)
            read: Row = (session.gauges.last if session.gauges is not None else None) or {}
            return {
                table: {name: dict(zip(columns, values, strict=False)) for name, values in read.get(table, {}).items()}
                for table, columns in METRICS.items()
            }
    finally:
        session.config = given


def _lost(own: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the storage lost of the intended update: the share of elements by parameter and of all, and the EDQ."""
    shares: dict[str, float] = {}
    lost = moved = along = whole = 0.0
    for name, intended in exact.items():
        wanted = intended != 0
        gone = float((wanted & (own[name] == 0)).sum())
        shares[plain_name(name)] = gone / max(1.0, float(wanted.sum()))
        lost, moved = lost + gone, moved + float(wanted.sum())
        along += float((intended.double() * own[name].double()).sum())
        whole += float(intended.double().square().sum())
    most = sorted(shares, key=lambda name: -shares[name])[:_TOLD]
    return {
        "losses": {name: shares[name] for name in most if shares[name] > 0},
        "lost_share": lost / moved if moved else 0.0,
        "edq": along / whole if whole else None,
    }


def _unexplained(found: ReplayedStep, wide: Passes, tensors: Mapping[str, Tensor], scale: float) -> float | None:
    """The share of the run's own squared difference to float32 that the emulated step does not have."""
    if found.difference is None:
        return None
    own = {
        name: tensors[key].float() / scale for name in wide.gradients if (key := f"grad:{plain_name(name)}") in tensors
    }
    with torch.no_grad():
        whole = difference(own, wide.gradients)
    return max(0.0, 1.0 - (found.difference / whole) ** 2) if whole > EXACT else 0.0


def _notes(past: PastStep) -> list[str]:
    """What is not the same computation, in sentences."""
    recipe, notes = past.session.config.recipe, list(past.notes)
    if recipe.compute.transform:
        notes.append(
            f"'{recipe.compute.transform}' changes the model itself, so there is no plain model in float32 to compare with"
        )
    if past.session.config.compile:
        notes.append(
            "the run's model was compiled: the bits are those of its kernels, the variants are computed without them"
        )
    return notes
