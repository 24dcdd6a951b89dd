"""What a precision plugin of Lightning's does to gradients between the backward pass and the optimizer's step.

Sums of micro-batches, sums over ranks, and norms to clip to: each is done once, by us, or refused where somebody else does it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.reduction import GradientReduction, reduce_gradients_with
from narrowgauge.errors import RecipeError
from narrowgauge.optim.accumulation import GradientAccumulator
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.reductions import REDUCTIONS


class MicroBatchSums:
    """The gradients of a step's micro-batches on one rank, summed in a format of their own.

    Args:
        dtype: a row of ``ng.ACCUMULATIONS``; ``None`` for float32.
        seed: of stochastic sums.

    Attributes:
        index: how many micro-batches of the step came before.
    """

    def __init__(self, dtype: str | None, seed: int) -> None:
        self.dtype, self.seed, self.index = dtype, seed, 0
        self._sum: GradientAccumulator | None = None
        self._steps = 0

    @property
    def steps(self) -> int:
        """Steps whose micro-batches were summed: it seeds random bits."""
        return self._steps if self._sum is None else self._sum.step

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        if self._sum is not None:
            self._sum.step = steps

    def take_in(self, optimizers: Iterable[Optimizer]) -> None:
        """Take in the gradients of one micro-batch, on one rank.

        Raises:
            RecipeError: on several, where DDP and FSDP2 make the sums, a format was asked for.
        """
        if all_ranks().size > 1:
            self.require_unnamed("on several ranks, where DDP and FSDP2 sum micro-batches")
            return
        if self._sum is None:
            parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
            self._sum = GradientAccumulator(parameters, self.dtype or "float32", self.seed)
            self._sum.step = self._steps
        self._sum.accumulate()

    def finish(self) -> None:
        """Put the sums into ``p.grad``, if there are any."""
        if self._sum is not None:
            self._sum.finish()

    def free(self) -> None:
        """Free the sums, also of a step that was interrupted; the steps stay counted."""
        self._steps, self._sum, self.index = self.steps, None, 0

    def require_unnamed(self, where: str) -> None:
        """Refuse a format that was asked for where others make the sums.

        Raises:
            RecipeError: it was.
        """
        if self.dtype is not None:
            raise RecipeError(
                f"accumulation_dtype='{self.dtype}' was requested {where}.", "Leave accumulation_dtype out."
            )


class RankSums:
    """The sum of gradients over ranks by the recipe's reduction, where it is not DDP's or FSDP2's own.

    Args:
        name: a row of ``ng.REDUCTIONS``.
        seed: of reductions that take random bits.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self._reduction: GradientReduction | None = None
        self._fills_buckets = False

    def install(self, model: nn.Module, optimizer: Any, micro_batches: int) -> None:
        """Sum a model's gradients from now on.

        Args:
            model: as Lightning has wrapped it for its ranks.
            optimizer: gets the reduction.
            micro_batches: ``accumulate_grad_batches``.
        Raises:
            RecipeError: micro-batches, which Lightning sums before they are sent.
        """
        if self.name == "native":
            return
        self.require_whole_steps(micro_batches)
        self.close()
        self._fills_buckets = isinstance(model, nn.parallel.DistributedDataParallel)
        optimizer.reduction = self._reduction = reduce_gradients_with(model, self.name, seed=self.seed)

    def require_whole_steps(self, micro_batches: int) -> None:
        """Refuse micro-batches, which Lightning sums before they are sent.

        Raises:
            RecipeError: there are several, and the reduction is ours.
        """
        if self.name != "native" and micro_batches > 1:
            raise RecipeError(
                f"reduction '{self.name}' was requested of a recipe, and accumulate_grad_batches = {micro_batches} of the "
                "Trainer, which sends no gradients of single micro-batches.",
                "Accumulate none, or leave the reduction out of the recipe.",
            )

    @property
    def steps(self) -> int:
        """Steps that were summed: it seeds random bits."""
        return 0 if self._reduction is None else self._reduction.step

    @steps.setter
    def steps(self, steps: int) -> None:
        if self._reduction is not None:
            self._reduction.set_step(steps)
            if steps and self._fills_buckets and REDUCTIONS[self.name].scale_bits:
                warnings.warn(
                    f"a fit with reduction '{self.name}' is resumed under DDP, whose buckets, and so the scales of what is sent, "
                    "are others in the first step: its bits differ from those of a fit that was not stopped.",
                    stacklevel=2,
                )

    def close(self) -> None:
        """Leave the model's gradients alone; the steps stay counted."""
        if self._reduction is not None:
            self._reduction.close()


class StepNorms:
    """The norm that gradients are clipped to in one step, by the optimizer's kernel: no gradient is rounded for it."""

    def __init__(self) -> None:
        self._before: dict[Optimizer, float | None] = {}

    def set(self, optimizer: Optimizer, norm: float) -> None:
        """Let the next step clip.

        Raises:
            RecipeError: the optimizer has another ``max_grad_norm`` itself.
        """
        if optimizer.max_grad_norm not in (None, norm):
            refuse_second_clipping(f"gradient_clip_val = {norm}", optimizer)
        self._before.setdefault(optimizer, optimizer.max_grad_norm)
        optimizer.max_grad_norm = norm

    def end(self, optimizer: Any) -> None:
        """Give an optimizer its own norm again."""
        if optimizer in self._before:
            optimizer.max_grad_norm = self._before.pop(optimizer)


def refuse_second_clipping(what: str, optimizer: Any) -> None:
    """Refuse what would clip the gradients of an optimizer that clips them itself.

    Raises:
        RecipeError: it does.
    """
    norm = getattr(optimizer, "max_grad_norm", None)
    if norm is not None:
        raise RecipeError(
            f"{what} was requested of an optimizer that clips gradients to max_grad_norm = {norm} itself.",
            "Leave out one of the two.",
        )
