"""One step in every variant of the table, against the same step in float32.

All variants begin at the same moment: the stored weights, moments and scales before the step. Gradients come from
:mod:`narrowgauge.trainer.replays.emulated_passes`; updates from the run's own optimizer, so that they are rounded as its storage
rounds, and in float32 from an optimizer that holds the same weights and moments unrounded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from narrowgauge._torch import plain_name
from narrowgauge.analysis.diagnosis.replay_findings import WIDENINGS, VariantResult
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES
from narrowgauge.trainer.replays.emulated_passes import EmulatedPasses, cut
from narrowgauge.trainer.replays.past_steps import Moment, in_other_recipe
from narrowgauge.trainer.session import Session

Tensors = dict[str, Tensor]
_TOLD = 5
_PASSES_NOT = ("storage",)
"""Widenings that leave the gradients as they are."""


@dataclass(frozen=True, eq=False)
class Passes:
    """The gradients of a step, of loss scale 1 and not clipped, and its mean loss."""

    loss: float
    gradients: Tensors

    @property
    def is_finite(self) -> bool:
        """Whether all of it is."""
        return self.loss - self.loss == 0 and all(bool(g.isfinite().all()) for g in self.gradients.values())


@dataclass(eq=False)
class VariantsOfStep:
    """Computes the variants of one step.

    Args:
        session: the run, before the step, not compiled.
        scale: the loss scale of the step.
    """

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
        """The passes of the step with some places widened.

        Args:
            wide: places of the table; with all of them the step is float32's.
            is_reversed: the sequences of the batch in reverse.
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
        """The gradients of a micro-batch as the parameters hold them, taken from the model."""
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

        Args:
            passes: the gradients.
            in_storage: in the run's own storage, else in float32.
        """
        if not passes.is_finite:
            return None
        session, before = (self.session, self._before) if in_storage else (self._plain, self._plain_before)
        scale = self.scale if in_storage else 1.0
        before.put(session)
        rate, optimizer = session.config.learning_rate(session.step + 1), session.optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)
        named: Tensors = dict(session.named_parameters())
        held = {name: optimizer.stored(named[name]) for name, _ in self._trained()}
        for name, gradient in passes.gradients.items():
            named[name].grad = (gradient * scale).to(named[name].dtype)
        if optimizer.loss_scaler is not None:
            optimizer.loss_scaler.scale(torch.ones((), dtype=torch.float32, device=session.device))
        optimizer.step()
        optimizer.settle()
        found = {name: optimizer.stored(named[name]) - before_it for name, before_it in held.items()}
        before.put(session)
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
        self._before.put(self.session)
        return tuple(rows), run, wide, own


def _result(name: str, found: Passes, wide: Passes, update: Tensors | None, exact: Tensors | None) -> VariantResult:
    if not (found.is_finite and wide.is_finite):
        return VariantResult(name, is_finite=found.is_finite)
    each = {key: difference({key: g}, {key: wide.gradients[key]}) for key, g in found.gradients.items()}
    most = sorted(each, key=lambda key: -each[key])[:_TOLD]
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
