"""The watch of a training loop: the meter, the laws, and a sentence where a step is not well."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.measuring.hooks import Hub, RunNotice
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.laws import Laws
from narrowgauge.measuring.meter import Meter
from narrowgauge.measuring.reading import Reading
from narrowgauge.measuring.set_up import set_up_of
from narrowgauge.measuring.step import Step
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.finding import counted
from narrowgauge.torch_support.torch_names import is_compiled_model, unwrapped_model

SEEN_AT = 3
"""The step after which a watch prints what it measures, and what it does not."""


def hub_of(model: nn.Module, optimizer: Any, called: nn.Module | None = None) -> Hub:
    """Return the hooks on a loop.

    Args:
        called: the module whose forward pass the loop calls, if not the model itself.
    """
    optimizers = set_up_of(model, optimizer).optimizers
    inner = unwrapped_model(model)
    if called is None:
        # A compiler skips hooks inside the model that it compiles.
        called = model if is_compiled_model(model) else inner
    return Hub(inner, optimizers, called)


def require_kinds(names: Iterable[str]) -> None:
    """Refuse to ignore a kind of reading that there is not."""
    for name in names:
        if name not in KINDS:
            raise RecipeError(
                f"Cannot ignore '{name}' because no kind of reading has this name.",
                suggestion(name, KINDS) or "Try narrowgauge show checks, which lists them.",
            )


class Watch:
    """Hold the numbers of a watched loop; created by :func:`narrowgauge.watch`.

    Attributes:
        hub: the hooks on the loop.
        meter: measures each step.
        laws: read the steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        called: nn.Module | None = None,
        max_grad_norm: float | None = None,
        ignore: Collection[str] = (),
    ) -> None:
        require_kinds(ignore)
        self.hub = hub_of(model, optimizer, called)
        self.laws = Laws(ignore, say=self.hub.say)
        self.meter = Meter(self.hub, self._read, limit=max_grad_norm)

    def step(self, loss: float | Tensor | None = None, **numbers: Any) -> None:
        """Tell of the step that is done, after the optimizer's step.

        The call is optional. On several ranks, all of them make it.

        Args:
            loss: of this rank, in nats per token. Reading a tensor waits for its device.
            numbers: ``grad_norm`` before a clip, ``loss_scale``, ``tokens_per_second``.
        """
        told = {"loss": loss, **numbers}
        for name, x in told.items():
            if isinstance(x, Tensor):
                told[name] = x.item()
        self.meter.end_step(**told)

    def numbers(self) -> dict[str, float]:
        """Return the newest numbers by name, for Weights & Biases, TensorBoard or MLflow.

        ``lr/groupN`` is the group's rate of now, and ``effective_lr/groupN`` that times the share of
        the update that was stored in its last sample. ``grad_norm`` is of the gradients that reached
        the last step.
        """
        return numbers_of(self.meter)

    def remove(self) -> None:
        """Tell of the last step, and remove every hook."""
        if self.meter.has_stepped:
            self.meter.end_step()
        self.meter.end()
        self.hub.undo.close()

    def _read(self, step: Step) -> None:
        """Show what the laws read anew."""
        readings = self.laws.fresh(self.laws.read(step))
        if all_ranks().is_first:
            show(readings)
        if step.step == SEEN_AT and all_ranks().is_first:
            print(seen(self.meter), file=sys.stderr)


def numbers_of(meter: Meter) -> dict[str, float]:
    """Return the newest numbers of a loop by name."""
    numbers: dict[str, float] = {}
    shares = {**meter.shares, **_audited_shares(meter)}
    for index, group in groups_of(meter):
        if isinstance(group.get("lr"), (int, float)):
            rate = float(group["lr"])
            numbers[f"lr/group{index}"] = rate
            if index in shares:
                numbers[f"effective_lr/group{index}"] = rate * shares[index]
    if meter.last is not None and meter.last.arrived is not None:
        numbers["grad_norm"] = meter.last.arrived
    return numbers


def groups_of(meter: Meter) -> list[tuple[str, dict[str, Any]]]:
    """Return the number of each group, over all optimizers, with the group."""
    groups: list[tuple[str, dict[str, Any]]] = []
    for optimizer in meter.hub.optimizers:
        for group in optimizer.param_groups:
            groups.append((str(len(groups)), group))
    return groups


def _audited_shares(meter: Meter) -> dict[str, float]:
    """Return the share of each group of our optimizers in its window of audits."""
    shares = {}
    windows: dict[Tensor, Tensor] = {}
    for optimizer in meter.hub.optimizers:
        if isinstance(optimizer, Optimizer):
            windows |= optimizer.auditor.windows
    for index, group in groups_of(meter):
        meant = 0.0
        stored = 0.0
        for p in group["params"]:
            if p in windows:
                meant += float(windows[p][:, 0].sum())
                stored += float(windows[p][:, 1].sum())
        if meant > 0:
            shares[index] = stored / meant
    return shares


def seen(meter: Meter) -> str:
    """Return what is measured, and what is not, in one line."""
    line = f"watch: {counted(len(meter.names), 'tensor')}, rate, gradients"
    share = "stored share of the step"
    if meter.shares:
        line += f", {share}"
    elif isinstance(meter.hub.optimizers[-1], Optimizer):
        meter.unseen[share] = "the optimizer's audit has it"
    else:
        meter.unseen[share] = f"{type(meter.hub.optimizers[-1]).__name__} is not repeated"
    missing = []
    for area, reason in meter.unseen.items():
        missing.append(f"{area} ({reason})")
    if missing:
        line += f"; not: {', '.join(missing)}"
    return line


def show(readings: Iterable[Reading]) -> None:
    """Show the readings of one step in a sentence, notes left out. No line of the loop is at fault, so
    none is shown.
    """
    parts = []
    step = 0
    for reading in readings:
        if reading.severity == "note":
            continue
        step = max(step, reading.step)
        words = reading.text.rstrip(".")
        if reading.tensor:
            words = f"{reading.tensor}: {words}"
        parts.append(words)
    if parts:
        words = f"step {step}: {'; '.join(parts)}"
        warnings.warn_explicit(words, RunNotice, "narrowgauge.watch", step)
