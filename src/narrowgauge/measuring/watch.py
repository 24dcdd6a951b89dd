"""The watch of a training loop: the meter, the laws, and a sentence where a step is not well."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
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
from narrowgauge.runs.schema import Row
from narrowgauge.runs.writer import plain
from narrowgauge.torch_support.torch_names import is_compiled_model, unwrapped_model

SEEN_AT = 3
"""The step after which a watch prints what it measures, and what it does not."""


class Watch:
    """Watch a loop; created by :func:`narrowgauge.watch`, and a part of each recorder.

    Args:
        listen: called with the row of each step, in place of the laws.

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
        listen: Callable[[Row], object] | None = None,
    ) -> None:
        for name in ignore:
            if name not in KINDS:
                raise RecipeError(
                    f"Cannot ignore '{name}' because no kind of reading has this name.",
                    suggestion(name, KINDS) or "Try narrowgauge show checks, which lists them.",
                )
        inner = unwrapped_model(model)
        if called is None:
            # A compiler skips hooks inside the model that it compiles.
            called = model if is_compiled_model(model) else inner
        self.hub = Hub(inner, set_up_of(model, optimizer).optimizers, called)
        self.laws = Laws(ignore, say=self.hub.say)
        self.meter = Meter(self.hub, listen or self._read, limit=max_grad_norm)

    def step(self, loss: float | Tensor | None = None, **numbers: Any) -> None:
        """Tell of the step that is done, after the optimizer's step.

        The call is optional. On several ranks, all of them make it.

        Args:
            loss: of this rank, in nats per token. Reading a tensor waits for its device.
            numbers: ``grad_norm`` before a clip, ``loss_scale``, ``tokens_per_second``.
        """
        self.meter.end_step(plain({"loss": loss, **numbers}))

    def numbers(self) -> dict[str, float]:
        """Return the newest numbers by name, for Weights & Biases, TensorBoard or MLflow.

        ``lr`` is the rate of the first group of the last optimizer, ``stored_share`` the share of the
        update that its formats stored in the last sample, and ``grad_norm`` is of the gradients that
        reached the last step.
        """
        row = self.meter.last
        share = self.meter.share
        last = self.hub.optimizers[-1]
        if isinstance(last, Optimizer) and last.auditor.total:
            meant, stored = torch.stack([*last.auditor.total]).sum(0).tolist()[:2]
            share = stored / meant if meant else None
        numbers = {"lr": row.get("lr"), "stored_share": share, "grad_norm": row.get("arrived")}
        return {name: x for name, x in numbers.items() if x is not None}

    def unseen(self) -> dict[str, str]:
        """Return what is not measured, each with its reason."""
        unseen = {**self.meter.unseen}
        last = self.hub.optimizers[-1]
        if isinstance(last, Optimizer):
            unseen["stored share of the step"] = "the optimizer's audit has it"
        elif self.meter.share is None:
            unseen["stored share of the step"] = f"{type(last).__name__} is not repeated"
        return unseen

    def remove(self) -> None:
        """Tell of the last step, and remove every hook."""
        if self.meter.has_stepped:
            self.meter.end_step({})
        self.meter.end()
        self.hub.undo.close()

    def _read(self, row: Row) -> None:
        """Show what the laws read anew."""
        readings = self.laws.fresh(Step.of(row))
        if all_ranks().is_first:
            show(readings)
            if self.meter.number == SEEN_AT:
                missing = [f"{area} ({reason})" for area, reason in self.unseen().items()]
                words = f"watch: {counted(len(self.meter.names), 'tensor')}"
                print(f"{words}; not: {', '.join(missing) or 'nothing'}", file=sys.stderr)


def show(readings: Iterable[Reading]) -> None:
    """Show readings of one step in a sentence, notes left out. No line of the loop is at fault, so
    none is shown.
    """
    parts = []
    step = 0
    for reading in readings:
        if reading.severity != "note":
            step = max(step, reading.step)
            parts.append(reading.words)
    if parts:
        words = f"step {step}: {'; '.join(parts)}"
        warnings.warn_explicit(words, RunNotice, "narrowgauge.watch", step)
