"""Which parameters had gradients: in every micro-batch of a step, on every rank, the same ones.

FSDP2 sends the gradients of a group as one flat vector of those parameters that have one. Two experts of equal size, one used by
one micro-batch and one by another, thus lie at the same place of vectors of the same length. A sum that takes in vectors, and is
handed out once a step, would add the gradients of both; so it is refused. FSDP2 itself does the same between ranks.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed.addends import refuse_second
from narrowgauge.distributed.exchanges import SAME_PARAMETERS
from narrowgauge.errors import RecipeError

_NOBODY, _MIXED = -(1 << 40), 1 << 40
"""What ranks send that took no part, or whose own micro-batches differ; others send a checksum of 32 bits."""


class Arrivals:
    """The parameters whose gradients have arrived since the last :meth:`end_micro_batch`.

    Args:
        sharded: those whose gradients are taken in as one vector of a group, in the same order on all ranks.
        group: of the ranks that sum them; ``None`` for one rank.

    Attributes:
        summed: parameters to whose sum of this step no gradient may be added.
    """

    def __init__(self, sharded: Sequence[Any], group: Any) -> None:
        self._sharded, self._group = list(sharded), group
        self.summed: set[Any] = set()
        self._counts: Counter[Tensor] = Counter()
        self._used: bytes | None = None
        self._is_mixed = False

    def install(self, parameters: Iterable[Tensor]) -> list[Callable[[], None]]:
        """Attach to parameters; returns what detaches."""
        return [p.register_post_accumulate_grad_hook(self._note).remove for p in parameters]

    def __iter__(self) -> Any:
        return iter(self._counts)

    def begin_micro_batch(self) -> None:
        """Forget what came in between."""
        self._counts.clear()
        self.summed.clear()

    def end_micro_batch(self, *, is_absent: bool) -> None:
        """Note which parameters were used.

        Args:
            is_absent: the micro-batch does not count.
        Raises:
            RecipeError: a gradient came twice.
        """
        used = bytes(min(self._counts[p], 2) for p in self._sharded)
        self._counts.clear()
        if 2 in used:
            raise RecipeError(
                "two backward passes were met in one micro-batch, whose gradients are one addend of an exact sum.",
                "Add the losses, and call backward() once.",
            )
        if not is_absent:
            self._is_mixed |= self._used not in (None, used)
            self._used = used

    def end_step(self) -> None:
        """Compare the micro-batches of all ranks.

        Raises:
            RecipeError: on all ranks, where other parameters had gradients in one than in another.
        Cost: one message of 16 bytes, where anything is sharded.
        """
        used, is_mixed = self._used, self._is_mixed
        self.discard()
        if not self._sharded or self._group is None:
            return
        number = zlib.crc32(used) if used is not None else _NOBODY
        ends = [_MIXED] * 2 if is_mixed else [number, -number if used is not None else _NOBODY]
        device = self._sharded[0].device_mesh.device_type
        largest = torch.tensor(ends, dtype=torch.int64, device=device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        high, low = largest.tolist()
        if high != -low:
            raise RecipeError(
                "some parameters had gradients in one micro-batch of this step and not in another, and FSDP2 leaves those "
                "without one out of the vectors that are summed exactly.",
                SAME_PARAMETERS,
            )

    def discard(self) -> None:
        """Forget the step."""
        self._counts.clear()
        self.summed.clear()
        self._used, self._is_mixed = None, False

    def _note(self, parameter: Tensor) -> None:
        if parameter in self.summed:
            refuse_second()
        self._counts[parameter] += 1
