"""Ranks agree before each exchange, so that none waits in an exchange that another does not enter.

FSDP2 gathers a group of weights when a rank calls its layer, and reduce-scatters the gradients when the rank has differentiated
it. Ranks whose micro-batches call different layers thus enter different exchanges, or a different number of them: one layer's
weights are taken for another's, or a rank waits until the group's timeout. So each rank first says what it is about to do, in one
message of 16 bytes; where they differ, nothing is exchanged and every rank gets the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from narrowgauge import _torch
from narrowgauge.distributed.exchanges import SAME_PARAMETERS, RankGrid
from narrowgauge.errors import RecipeError

_WATCHED = 32
"""Backward passes whose every exchange is agreed upon; of later ones, those at powers of two."""
_SIZE_BITS = 40
_ENDS = ("end a micro-batch", "end a step")


class Lockstep:
    """What the ranks that sum gradients together are about to do, compared.

    Args:
        grid: these ranks. Those of a row gather weights together; all of them sum.
        device: where messages are.
        names: of FSDP2's groups of parameters, by number; the same on all ranks.
        is_inside: whether the caller of the current backward pass calls :meth:`end` itself.
        is_forward: whether a forward pass is under way that will be differentiated; a rank may evaluate alone.
    Cost: in the watched passes a message of 16 bytes before each exchange, for whose answer the host waits; afterwards almost
        nothing.
    """

    def __init__(
        self,
        grid: RankGrid,
        device: str,
        names: Mapping[int, str],
        is_inside: Callable[[], bool],
        is_forward: Callable[[], bool],
    ) -> None:
        self._row = grid.shard_group
        self._groups = [grid.shard_group, *([grid.group] if grid.replicas > 1 else [])]
        self._device, self._names = device, dict(names)
        self._is_inside, self._is_forward = is_inside, is_forward
        self._num_passes = 0
        self._ends: set[int] = set()

    def before_gather(self, number: int, num_bytes: int) -> None:
        """Agree to gather a group's weights, in a step.

        Raises:
            RecipeError: on all ranks, where one is about to do something else.
        """
        if self._is_forward():
            self._agree(2 * number + 1, num_bytes, [self._row])
        elif _torch.runs_backward():  # replicas that have evaluated alone gather in a different order
            self._exchange(2 * number + 1, num_bytes, [self._row])

    def before_sum(self, number: int, numel: int) -> None:
        """Agree to sum ``numel`` gradients of a group; like :meth:`before_gather`."""
        self._exchange(2 * number + 2, numel, self._groups)

    def end(self, *, is_last: bool) -> None:
        """Agree that a backward pass has ended, and whether it was the step's last; like :meth:`before_gather`."""
        self._agree(0, int(is_last), self._groups)
        self._num_passes += 1

    def discard(self) -> None:
        """Forget a backward pass that has failed, on all ranks."""
        self._ends.clear()

    @property
    def _is_watched(self) -> bool:
        count = self._num_passes
        return count < _WATCHED or not count & (count - 1)

    def _exchange(self, what: int, size: int, groups: Sequence[Any]) -> None:
        if _torch.runs_backward() and not self._is_inside() and (number := _torch.current_backward()) not in self._ends:
            self._ends.add(number)
            _torch.queue_after_backward(lambda: self._end_of(number))
        self._agree(what, size, groups)

    def _end_of(self, number: int) -> None:
        self._ends.discard(number)
        self.end(is_last=True)

    def _agree(self, what: int, size: int, groups: Sequence[Any]) -> None:
        code = what << _SIZE_BITS | size
        for group in groups if self._is_watched else ():
            ends = torch.tensor([code, -code], dtype=torch.int64, device=self._device)
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
            high, low = ends.tolist()
            if high != -low:
                self._refuse(code, group)

    def _refuse(self, code: int, group: Any) -> None:
        own = torch.tensor([code], dtype=torch.int64, device=self._device)
        codes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(codes, own, group=group)
        said = [self._said(int(each)) for each in codes]
        place = next(place for place, each in enumerate(said) if each != said[0])
        first, other = (dist.get_process_group_ranks(group)[each] for each in (0, place))
        raise RecipeError(
            f"rank {other} was about to {said[place]} while rank {first} was about to {said[0]}: their micro-batches use "
            "different layers that FSDP2 shards, or are not equally many, and each would wait for the other.",
            SAME_PARAMETERS,
        )

    def _said(self, code: int) -> str:
        what, size = code >> _SIZE_BITS, code & ((1 << _SIZE_BITS) - 1)
        if what == 0:
            return _ENDS[size]
        number, is_sum = divmod(what - 1, 2)
        name = self._names[number]
        return f"sum {size} gradients of '{name}'" if is_sum else f"gather '{name}'"
