"""Gradients that are means over ranks: samples of what each rank computed, averaged over all of them.

A rank alone cannot tell the mean from its own gradient. So the samples of all ranks are averaged once more, by one call of
``all_reduce`` in every audited step. That needs all ranks to audit the same steps: each says so in the process group's store
when its watcher is made, and as long as one of them has not, nothing is exchanged and nothing is judged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge import _torch
from narrowgauge.recompute.capture import ParameterSample, StepCapture, spread
from narrowgauge.recompute.fitting import fitted

_MADE = itertools.count()


def num_ranks() -> int:
    """The number of processes that train together, as far as the process group of this one says; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class RankSamples:
    """What ranks exchange of their audited steps.

    Args:
        model: as the loop calls it.
        plan: what must be the same on all ranks, such as which steps are audited.
    """

    def __init__(self, model: nn.Module, plan: str) -> None:
        self.is_parallel = any(isinstance(m, DistributedDataParallel) for m in model.modules())
        self._key, self._plan = f"narrowgauge audit {next(_MADE)}", plan
        if self.ranks > 1:
            _torch.default_store().set(f"{self._key} {dist.get_rank()}", plan)

    @property
    def ranks(self) -> int:
        return num_ranks()

    def why_not(self) -> str:
        """Why nothing is exchanged, or empty. After a backward pass whose gradients have arrived, all ranks say the same."""
        if self.ranks == 1:
            return "there is one rank"
        if not self.is_parallel:
            return "gradients are sums over several ranks, and the model is in no DistributedDataParallel"
        store = _torch.default_store()
        keys = [f"{self._key} {rank}" for rank in range(self.ranks)]
        if not store.check(keys) or any(store.get(key).decode() != self._plan for key in keys):
            return "gradients are means over several ranks, and not all of them audit this step"
        return ""

    def means(self, parameters: Iterable[Tensor], samples: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The mean over ranks of samples of each parameter's gradient; ``None`` where a rank has none.

        All ranks call it, also one that found nothing.
        """
        shaped = [spread(p) for p in parameters]
        given = [
            torch.full_like(own, math.nan, dtype=torch.float32) if s is None or s.shape != own.shape else s.float()
            for own, s in zip(shaped, samples, strict=True)
        ]
        if not given:
            return []
        whole = torch.cat(given)
        dist.all_reduce(whole)
        found = (whole / self.ranks).split([own.numel() for own in shaped])
        return [None if bool(each.isnan().any()) else each for each in found]


def with_means(step: StepCapture, means: dict[str, Tensor | None], squares: dict[str, Tensor]) -> StepCapture:
    """A step whose gradients after the backward passes are means over ranks.

    Args:
        means: samples, by parameter.
        squares: the sums of squares of the gradients that the optimizer receives.
    """

    def of(name: str, sample: ParameterSample) -> ParameterSample:
        mean = means.get(name)
        if mean is None or sample.gradient is None:
            return replace(sample, computed=None, computed_squares=None)
        (factor,), _ = fitted(sample.gradient.double(), [mean.double()])
        whole = squares[name] / factor**2 if factor else None
        return replace(sample, computed=mean, computed_squares=whole)

    return replace(step, parameters={name: of(name, sample) for name, sample in step.parameters.items()})
