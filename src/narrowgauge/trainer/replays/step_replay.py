"""Replay a step of a run: as it was, with everything watched, piece by piece, in float32, and with one place widened at a time.

All variants begin at the same moment: the stored weights, moments and scales before the step. Gradients come from
:mod:`narrowgauge.trainer.replays.emulated_passes`; updates from the run's own optimizer, so that they are rounded as its storage
rounds, and in float32 from an optimizer that holds the same weights and moments unrounded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge._torch import plain_name
from narrowgauge.analysis.diagnosis.replay_findings import EXACT, WIDENINGS, ReplayedStep, VariantResult
from narrowgauge.gauges.recording.fingerprints import MOMENTS
from narrowgauge.matmul.scopes import compute_scope
from narrowgauge.recompute.departures import findings_of, outcomes
from narrowgauge.recompute.piece_results import PieceResult
from narrowgauge.recompute.step_watcher import StepWatcher
from narrowgauge.recompute.task import task
from narrowgauge.runs.schema import METRICS, Row
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES
from narrowgauge.trainer.language_model import loss_sum
from narrowgauge.trainer.recovery import replay_last_step
from narrowgauge.trainer.replays.emulated_passes import EmulatedPasses, cut
from narrowgauge.trainer.replays.past_steps import (
    Moment,
    PastStep,
    Say,
    StepsDone,
    in_other_recipe,
    nothing,
    replaying,
    require_finite,
)
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.step import train_step

_MOST_TENSORS = 5


def replay_step(
    folder: str | Path,
    step: int,
    *,
    prepared: Callable[[Session], Any] | None = None,
    say: Say = nothing,
    progress: StepsDone = nothing,
) -> ReplayedStep:
    """Compute a step of a run again: as it was, in float32, and with each place of its arithmetic widened alone.

    Invariant: nothing in the run folder changes. The step that is analysed is the recorded one to the last digit, or the result
    says where it differs from the record.

    Args:
        folder: the run folder of ``narrowgauge train``.
        step: number of the step, from 1.
        prepared: called with each session that is built, such as to put hooks on its model.
        say: called with a sentence before what takes a while.
        progress: called after each step on the way with the number of those done and of all.
    Returns:
        What it showed, to be given to :func:`narrowgauge.diagnose`.
    Raises:
        RecordError: no such run or step, or its data, model or checkpoint cannot be used.

    Cost: the steps since the nearest checkpoint, then about twenty eager steps in float32; memory for three copies of the
        model's weights and states.
    Example: ``narrowgauge.diagnose("runs/first", replay=narrowgauge.replay_step("runs/first", 28)).text()``
    """
    with replaying(folder, step, prepared=prepared, say=say, progress=progress) as past:
        require_finite(past.session)
        before = Moment.of(past.session)
        say(f"Repeating step {step}.")
        row, tensors = tensors_of_step(past.session, past.advance)
        bad = _bad_value(past.session, row, say)
        scale = past.session.loss_scale if past.session.optimizer.loss_scaler is not None else 1.0
        before.restore(past.session)
        session = _eager(past.session, before, prepared)
        watched = _watched(session)
        before.restore(session)
        say("Computing its pieces again.")
        pieces = _pieces(session)
        shown = outcomes(pieces)
        before.restore(session)
        found = ReplayedStep(
            Path(folder).name,
            step,
            past.started,
            past.mismatch,
            row["loss"],
            row["grad_norm"],
            bad,
            watched=watched,
            checked=tuple(shown["equal"]),
            departed=tuple(shown["departs"]),
            unchecked=shown["unchecked"],
            departures=tuple(findings_of(pieces)),
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
    before.restore(eager)
    return eager


def _bad_value(session: Session, row: Row, say: Callable[[str], object]) -> str:
    """Which operation made the first value that is not finite, after a step that has one and changed nothing."""
    values = (row["loss"], row["grad_norm"])
    if all(value is None or math.isfinite(value) for value in values) or not row["skipped"]:
        return ""
    return replay_last_step(session, say)[1].message


def _watched(session: Session) -> dict[str, Any]:
    """Take the next step, and return what the gauges read of it."""
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


def _pieces(session: Session) -> list[PieceResult]:
    """Take the next step, and compute its loss, passes, gradients, clipping and update again in float32 or wider."""
    config = session.config
    results: list[PieceResult] = []
    limit = config.max_grad_norm if math.isfinite(config.max_grad_norm) else None
    declared = task(max_grad_norm=limit, micro_batches=config.gradient_accumulation_steps)
    watcher = StepWatcher(
        session.model, session.optimizer, 1, lambda _, found: results.extend(found), declared, first=1
    )
    loss, number = session.loss, session.step + 1

    def whole(tokens: Tensor) -> Tensor:
        """A loss in chunks does not call the model's head."""
        with compute_scope(config.recipe, tokens.device):
            return loss_sum(session.model, tokens, chunked=False)

    session.loss = whole
    try:
        train_step(session)
    finally:
        session.loss = loss
        watcher.remove()
    return [replace(each, step=number) for each in results]


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
    most = sorted(shares, key=lambda name: -shares[name])[:_MOST_TENSORS]
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
    """Sentences on what differs from the run's own computation."""
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


# ── the tensors of a step by name ───────────────────────────────────────────────────────────────────────────────────


def tensors_of_step(session: Session, advance: Callable[[], Row]) -> tuple[Row, dict[str, Tensor]]:
    """Take a step and copy its tensors.

    Args:
        session: before the step; its model is not compiled, or the outputs of its modules are missing.
        advance: takes the step: ``past.advance``, or ``partial(train_step, session)``.
    Returns:
        Its row, and copies under the names of fingerprints (:mod:`narrowgauge.gauges.recording.fingerprints`): ``tokens:batch``,
        ``output:MODULE`` in the order of the forward pass, micro-batches along the first dim, ``grad:PARAMETER`` from
        the last to the first and not clipped, then ``weight:``, ``exp_avg:`` and ``exp_avg_sq:`` after the update, in float32.

    Cost: memory for all of them.
    """
    batches: list[Tensor] = []
    outputs: dict[str, list[Tensor]] = {}
    gradients: dict[str, Tensor] = {}
    loss, find = session.loss, session.fingerprints.gradients

    def seen(tokens: Tensor) -> Tensor:
        batches.append(tokens)
        with _outputs(session.model if not session.config.compile else nn.Module(), outputs):
            return loss(tokens)

    def found() -> None:
        find()
        named = {n: p.grad.detach().clone() for n, p in session.named_parameters() if p.grad is not None}
        gradients.update({f"grad:{plain_name(name)}": grad for name, grad in reversed(named.items())})

    session.loss, session.fingerprints.gradients = seen, found  # type: ignore[method-assign]
    try:
        row = advance()
    finally:
        session.loss = loss
        del session.fingerprints.gradients
    joined = {key: torch.cat(parts) for key, parts in outputs.items()}
    return row, {"tokens:batch": torch.cat(batches), **joined, **gradients, **stored_tensors(session)}


@contextmanager
def _outputs(model: nn.Module, into: dict[str, list[Tensor]]) -> Iterator[None]:
    """Copy the output of each module with parameters."""

    def take(key: str, module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if torch.is_grad_enabled() and type(first) is Tensor and first.is_floating_point():
            into.setdefault(key, []).append(first.detach().clone())

    handles = [
        module.register_forward_hook(partial(take, f"output:{plain_name(name)}"))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def stored_tensors(session: Session) -> dict[str, Tensor]:
    """The stored weights and moments by the names of fingerprints, float32 copies."""
    trained = session.optimizer.parameter_names()
    found: dict[str, Tensor] = {}
    for what in ("weight", *MOMENTS):
        for name, parameter in session.named_parameters():
            if parameter in trained:
                with suppress(KeyError):  # another rule has other states
                    found[f"{what}:{plain_name(name)}"] = session.optimizer.stored(parameter, what)
    return found


# ── the variants of a step ──────────────────────────────────────────────────────────────────────────────────────────

Tensors = dict[str, Tensor]
_PASSES_NOT = ("storage",)
"""Widenings that leave the gradients as they are."""


@dataclass(frozen=True, eq=False)
class Passes:
    """The gradients of a step, of loss scale 1 and not clipped, and its mean loss."""

    loss: float
    gradients: Tensors

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and all(bool(g.isfinite().all()) for g in self.gradients.values())


@dataclass(eq=False)
class VariantsOfStep:
    """Computes the variants of one step, from an uncompiled session before it; ``scale`` is the loss scale of the step."""

    session: Session
    scale: float = 1.0
    passes: EmulatedPasses = field(init=False)

    def __post_init__(self) -> None:
        wide = {"compile": False, "activation_checkpointing": False, "gauges_every": 0, "audit_every": 0}
        self._plain = in_other_recipe(self.session, Recipe(COMPUTES["float32"], STORAGES["float32"]), **wide)
        self.passes = EmulatedPasses(self._plain, self.session)
        self._before, self._plain_before = Moment.of(self.session), Moment.of(self._plain)
        self._named: Tensors = dict(self.session.named_parameters())
        self._stored = {name: self.session.optimizer.stored(p) for name, p in self._trained()}
        self._visible = {name: p.detach().float().clone() for name, p in self._named.items()}

    def _trained(self) -> list[tuple[str, Tensor]]:
        names = self.session.optimizer.parameter_names()
        return [(name, p) for name, p in self._named.items() if p in names]

    # ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def gradients(self, wide: Collection[str], *, is_reversed: bool = False) -> Passes:
        """The passes of the step with some places of the table widened; with all of them the step is float32's.

        With ``is_reversed`` the sequences of the batch are taken in reverse.
        """
        self._set_weights("weights" in wide)
        passes, config = self.passes, self.session.config
        passes.wide = frozenset(wide)
        batch = torch.cat(self.session.batch())
        batches = (batch.flip(0) if is_reversed else batch).split(config.micro_batch_size)
        total: Tensors = {}
        loss = 0.0
        for number, tokens in enumerate(batches):
            if self.session.linears is not None:
                self.session.set_compute()
                self.session.linears.step = self.session.step
                self.session.linears.set_first_sequence(number * config.micro_batch_size)
            share = passes.loss(tokens) / config.tokens_per_step
            (share * self.scale).backward()
            loss += float(share.detach())
            for name, gradient in self._taken(wide).items():
                total[name] = self._sum(total[name], gradient, name, wide) if name in total else gradient
        return Passes(loss, {name: self._visible_gradient(g, name, wide) / self.scale for name, g in total.items()})

    def _set_weights(self, is_stored: bool) -> None:
        """Let the float32 model see the weights that the run's model sees, or those that its storage holds."""
        values = self._visible | (self._stored if is_stored else {})
        with torch.no_grad():
            for name, parameter in self._plain.named_parameters():
                parameter.copy_(values[name])
                parameter.grad = None
        if any(bool((self._visible[name] != self._stored[name]).any()) for name in self._stored):
            self.passes.seen.add("weights")

    def _taken(self, wide: Collection[str]) -> Tensors:
        """The gradients of a micro-batch as the parameters hold them; the model's are then None."""
        found: Tensors = {}
        for name, parameter in self._plain.named_parameters():
            if parameter.grad is not None:
                found[name], parameter.grad = self._visible_gradient(parameter.grad, name, wide), None
        return found

    def _visible_gradient(self, gradient: Tensor, name: str, wide: Collection[str]) -> Tensor:
        dtype = self._named[name].dtype
        if dtype is torch.float32:
            return gradient
        self.passes.seen.add("weight-gradients")
        return gradient if "weight-gradients" in wide else cut(gradient, dtype)

    def _sum(self, total: Tensor, gradient: Tensor, name: str, wide: Collection[str]) -> Tensor:
        """The sum of two micro-batches' gradients as the run adds them."""
        is_narrow = self.session.config.accumulation_dtype == "bfloat16" and self._named[name].element_size() == 2
        if is_narrow:
            self.passes.seen.add("accumulation")
        return cut(total + gradient, torch.bfloat16 if is_narrow and "accumulation" not in wide else None)

    # ── updates ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def update(self, passes: Passes, *, in_storage: bool = True) -> Tensors | None:
        """What a step with these gradients changes of each stored weight; ``None`` where the optimizer would leave it out.

        With ``in_storage`` it is rounded as the run's storage rounds, else it is float32.
        """
        if not passes.is_finite:
            return None
        session, before = (self.session, self._before) if in_storage else (self._plain, self._plain_before)
        scale = self.scale if in_storage else 1.0
        before.restore(session)
        session.set_learning_rate()
        optimizer = session.optimizer
        named: Tensors = dict(session.named_parameters())
        held = {name: optimizer.stored(named[name]) for name, _ in self._trained()}
        for name, gradient in passes.gradients.items():
            named[name].grad = (gradient * scale).to(named[name].dtype)
        if optimizer.loss_scaler is not None:
            optimizer.loss_scaler.scale(torch.ones((), dtype=torch.float32, device=session.device))
        optimizer.step()
        optimizer.settle()
        found = {name: optimizer.stored(named[name]) - before_it for name, before_it in held.items()}
        before.restore(session)
        return found

    # ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def results(self) -> tuple[tuple[VariantResult, ...], Passes, Passes, Tensors | None]:
        """All variants, the passes as run and in float32, and the update as run."""
        run, wide = self.gradients(()), self.gradients(WIDENINGS)
        own, exact = self.update(run), self.update(wide, in_storage=False)
        first = _result("as-run", run, wide, own, exact)
        rows = [first, VariantResult("float32", 0.0, 0.0, 0.0, is_finite=wide.is_finite)]
        for name in WIDENINGS:
            if name not in self.passes.seen and name not in _PASSES_NOT:
                continue
            found = run if name in _PASSES_NOT else self.gradients((name,))
            update = self.update(found, in_storage=name not in _PASSES_NOT)
            rows.append(_shared(_result(name, found, wide, update, exact), first, name in _PASSES_NOT))
        if self.session.config.batch_size > 1:
            rows.append(_result("other-order", self.gradients((), is_reversed=True), run, None, None))
            rows.append(_result("other-order-float32", self.gradients(WIDENINGS, is_reversed=True), wide, None, None))
        self._before.restore(self.session)
        return tuple(rows), run, wide, own


def _result(name: str, found: Passes, wide: Passes, update: Tensors | None, exact: Tensors | None) -> VariantResult:
    if not (found.is_finite and wide.is_finite):
        return VariantResult(name, is_finite=found.is_finite)
    each = {key: difference({key: g}, {key: wide.gradients[key]}) for key, g in found.gradients.items()}
    most = sorted(each, key=lambda key: -each[key])[:_MOST_TENSORS]
    return VariantResult(
        name,
        abs(found.loss - wide.loss) / max(abs(wide.loss), 1e-30),
        difference(found.gradients, wide.gradients),
        None if update is None or exact is None else difference(update, exact),
        tensors={plain_name(key): each[key] for key in most if each[key] > 0},
    )


def _shared(row: VariantResult, first: VariantResult, leaves_gradients: bool) -> VariantResult:
    """A widening's result, with the shares of the run's own differences that it removes."""
    of_gradient = None if leaves_gradients else _share(row.gradient, first.gradient)
    return replace(row, gradient_share=of_gradient, update_share=_share(row.update, first.update))


def _share(left: float | None, whole: float | None) -> float | None:
    """The share of a squared difference that is gone; roundings of different places add up in squares."""
    return None if left is None or not whole else 1.0 - (left / whole) ** 2


def difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The norm of the difference of two sets of tensors over the norm of the second, in float64; 0 where both are zero."""
    off = sum(float((found[key].double() - x.double()).square().sum()) for key, x in wanted.items() if key in found)
    whole = sum(float(x.double().square().sum()) for x in wanted.values())
    return (off / whole) ** 0.5 if whole else float(off > 0)
