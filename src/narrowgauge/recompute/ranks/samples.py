"""What ranks tell each other of an audited step: samples of the gradients that each of them computed, and of those it steps with.

A rank alone cannot tell the mean from its own gradient. So the samples of all ranks are averaged once more, by one call of
``all_reduce``, and of a few elements each rank's own are gathered, by which it shows whose part is missing in a sum
(:mod:`narrowgauge.recompute.ranks.gradient_sums`). That needs all ranks to audit the same steps: each says so in the process
group's store when its watcher is made, and as long as one of them has not, nothing is exchanged and nothing is judged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge import _torch
from narrowgauge.recompute.capture import ParameterSample, StepCapture, gradient_of, spread
from narrowgauge.recompute.computed_gradients import LeftByBackward, is_nearer
from narrowgauge.recompute.fitting import fitted

FEW = 1 << 7
"""Elements of a tensor that are gathered from all ranks."""
GATHERED_BYTES = 1 << 26
"""Bytes of all ranks' elements together; of more tensors some are left out, evenly."""
_MADE = itertools.count()
_SUMS_OF_PARTS = ("post_localSGD_hook",)
"""Communication hooks that by design sum over some of the ranks alone."""


def num_ranks() -> int:
    """The number of processes that train together, as far as the process group of this one says; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@dataclass(frozen=True)
class Exchanged:
    """What ranks told each other of the gradients of a step, by the parameters' names; all on the CPU.

    Args:
        own: samples of what this rank's backward passes computed; ``None`` where it has none.
        means: of what those of all ranks did; ``None`` where one of them has none.
        by_rank: for some of the parameters ``[2, ranks, elements]``, float64: what each rank's passes computed, and what it is
            about to step with.
    """

    own: dict[str, Tensor | None]
    means: dict[str, Tensor | None]
    by_rank: dict[str, Tensor]


class RankSamples:
    """What ranks exchange of their audited steps.

    Args:
        model: as the loop calls it.
        plan: what must be the same on all ranks, such as which steps are audited.

    Attributes:
        is_parallel: gradients are means over several ranks, by ``DistributedDataParallel``.
    """

    def __init__(self, model: nn.Module, plan: str) -> None:
        self._parallel = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        self._key, self._plan, self._is_agreed = f"narrowgauge audit {next(_MADE)}", plan, False
        self._group = self._parallel[0].process_group if self._parallel else None
        self.is_parallel = self._group is not None and self._group.size() > 1
        if self.ranks > 1:
            _torch.default_store().set(f"{self._key} {dist.get_rank()}", plan)

    @property
    def ranks(self) -> int:
        return num_ranks()

    @property
    def num_summed(self) -> int:
        """The ranks whose gradients are summed, as far as it is known; all of them otherwise."""
        return dist.get_world_size(self._group) if self.is_parallel else self.ranks

    @property
    def has_hook(self) -> bool:
        """Whether gradients travel by a communication hook, which may round them."""
        return any(map(_torch.communication_hooks, self._parallel))

    @property
    def is_averaging(self) -> bool:
        """Whether the backward pass of the forward pass that begins now will leave means over ranks."""
        return self.is_parallel and any(each.require_backward_grad_sync for each in self._parallel)

    def why_not(self, step: int, *, is_cut: bool = False) -> str:
        """Why nothing is exchanged in a step, or empty; all ranks say the same.

        Args:
            is_cut: parameters are sharded over ranks.
        """
        if self.ranks == 1:
            return "there is one rank"
        if is_cut:
            return (
                ""
                if self._all_audit(step)
                else "parameters are sharded over ranks, and not all of them audit this step"
            )
        if not self.is_parallel:
            return "gradients are sums over several ranks, and the model is in no DistributedDataParallel"
        if len({each.process_group for each in self._parallel}) > 1:
            return "gradients are means over ranks, and parts of the model over other ranks each"
        if any(map(_torch.is_joining, self._parallel)):
            return "gradients are means over several ranks, some of which may have no more data (join)"
        hooks = [name for each in self._parallel for name in _torch.communication_hooks(each)]
        if found := [name for name in hooks if name in _SUMS_OF_PARTS]:
            return f"gradients are means over some of the ranks ({found[0]})"
        return (
            ""
            if self._all_audit(step)
            else "gradients are means over several ranks, and not all of them audit this step"
        )

    def _all_audit(self, step: int) -> bool:
        """Whether every rank audits the same steps.

        The rank that asks first answers for all: another one may have said so in between, and must not wait for this one.
        """
        if not self._is_agreed:
            store, ranks = _torch.default_store(), dist.get_process_group_ranks(self._group)
            keys = [f"{self._key} {rank}" for rank in ranks]
            is_so = store.check(keys) and all(store.get(key).decode() == self._plan for key in keys)
            answer = store.compare_set(f"{self._key} {ranks[0]} at {step}", "", "all" if is_so else "some")
            self._is_agreed = answer == b"all"
        return self._is_agreed

    def exchange(self, held: Mapping[str, Tensor], computed: Mapping[int, LeftByBackward]) -> Exchanged:
        """Tell all ranks of the gradients of a step; every one of them calls it, also one that found nothing.

        Args:
            held: the optimizer's parameters by name.
            computed: what this rank's backward passes left, by the id of a parameter.
        Cost: a mean over ranks of 4,096 elements of each tensor, and all ranks' :data:`FEW`, twice.
        """
        left = [computed.get(id(p)) for p in held.values()]
        shapes = [spread(p) for p in held.values()]
        received = [None if (g := gradient_of(p)) is None else spread(g) for p in held.values()]
        own = [None if each is None else each.total for each in left]
        means = self._means(shapes, own)
        if self._is_on_any(shapes, any(each is not None and each.taken is not None for each in left)):
            last = [None if each is None else each.last for each in left]
            for place, mean in enumerate(self._means(shapes, last)):
                if _is_last(received[place], means[place], mean):
                    own[place], means[place] = last[place], mean
        gathered = self._gathered(shapes, own, received)
        names = list(held)
        return Exchanged(
            dict(zip(names, map(_on_cpu, own), strict=True)),
            dict(zip(names, map(_on_cpu, means), strict=True)),
            {names[place]: each for place, each in gathered.items() if bool(each.isfinite().all())},
        )

    def _is_on_any(self, shapes: Sequence[Tensor], value: bool) -> bool:
        found = torch.full((1,), float(value), dtype=torch.float32, device=shapes[0].device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return bool(found)

    def _means(self, shapes: Sequence[Tensor], samples: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The mean over ranks of samples of each parameter's gradient; ``None`` where a rank has none."""
        whole = torch.cat([_given(own, s) for own, s in zip(shapes, samples, strict=True)])
        dist.all_reduce(whole, group=self._group)
        found = (whole / dist.get_world_size(self._group)).split([own.numel() for own in shapes])
        return [None if bool(each.isnan().any()) else each for each in found]

    def _gathered(
        self, shapes: Sequence[Tensor], own: Sequence[Tensor | None], received: Sequence[Tensor | None]
    ) -> dict[int, Tensor]:
        """A few elements from all ranks, as :class:`Exchanged` has them, by the place of some of the parameters."""
        size = dist.get_world_size(self._group)
        stride = max(1, math.ceil(2 * 4 * FEW * size * len(shapes) / GATHERED_BYTES))
        places = range(0, len(shapes), stride)
        rows = [_few(_given(shapes[k], t)) for samples in (own, received) for k in places for t in [samples[k]]]
        mine = torch.cat(rows)
        parts = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(parts, mine, group=self._group)
        columns = torch.stack(parts).double().cpu().split([len(row) for row in rows], dim=1)
        return {k: torch.stack([columns[i], columns[i + len(places)]]) for i, k in enumerate(places)}


def _on_cpu(sample: Tensor | None) -> Tensor | None:
    return None if sample is None else sample.cpu()


def _given(own: Tensor, sample: Tensor | None) -> Tensor:
    """A sample in float32, shaped like a parameter's; not a number where there is none."""
    if sample is None or sample.shape != own.shape:
        return torch.full_like(own, math.nan, dtype=torch.float32)
    return sample.float()


def _few(sample: Tensor) -> Tensor:
    return sample[:: max(1, -(-len(sample) // FEW))]


def _is_last(received: Tensor | None, total: Tensor | None, last: Tensor | None) -> bool:
    """Whether a step's gradient is the last pass's alone, and not the sum over all; every rank says the same."""
    if received is None or total is None or last is None:
        return False
    return not is_nearer(received.double(), total.double(), last.double())


def with_means(
    step: StepCapture, means: Mapping[str, Tensor | None], squares: Mapping[str, Tensor], eps: float = 0.0
) -> StepCapture:
    """A step whose gradients after the backward passes are means over ranks.

    Args:
        means: samples, by parameter.
        squares: the sums of squares of the gradients that the optimizer receives.
        eps: the spacing at 1 of the narrowest format that they may have been sent in.
    """

    def of(name: str, sample: ParameterSample) -> ParameterSample:
        mean = means.get(name)
        if mean is None or sample.gradient is None:
            return replace(sample, computed=None, computed_squares=None)
        (factor,), _ = fitted(sample.gradient.double(), [mean.double()])
        whole = squares[name] / factor**2 if factor else None
        return replace(sample, computed=mean, computed_squares=whole, gradient_eps=max(eps, sample.gradient_eps))

    return replace(step, parameters={name: of(name, sample) for name, sample in step.parameters.items()})
