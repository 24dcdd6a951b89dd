"""Traffic: what each step sends between ranks, how long that takes, and which rank the others wait for.

A :class:`Traffic` counts every collective that goes through ``torch.distributed``: FSDP2's, the gradient reductions' and the
gradient norm's. A count is two readings of a clock; on CUDA two events on the stream, which are read when the step has ended, so
nothing waits for the device.

**Waiting.** Collectives end on all ranks at about the same time, so a rank that arrives late spends less time in them than the
others: the others' time includes waiting for it. The rank with the least time in collectives is thus the last to arrive, and
what another rank spends beyond that is its wait. No clocks are compared, so the ranks may be on any number of hosts. Where a
different rank is late at each collective of one step, these waits are in the least time of every rank and are not seen: the
wait is a lower bound, exact for a rank that is slower than the others throughout the step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge import _torch
from narrowgauge.distributed.ranks import all_ranks

Columns = dict[str, Any]
"""Columns of a row of ``steps.jsonl``."""

WINDOW = 10
"""Steps that are joined into one table of ranks; with more ranks as many steps as ranks, which bounds the record."""

# What a rank sends, as a multiple of an argument's bytes, by the size of the group: what a ring sends, the least that is possible
# for large messages by any algorithm of the backend.
_FACTORS: dict[str, Callable[[int], float]] = {
    "nothing": lambda size: 0.0,
    "once": lambda size: 1.0,
    "share": lambda size: (size - 1) / size,
    "both ways": lambda size: 2 * (size - 1) / size,
    "to each": lambda size: size - 1,
}

COLLECTIVES: dict[str, tuple[str, str]] = {
    "all_reduce": ("tensor", "both ways"),
    "reduce": ("tensor", "share"),
    "broadcast": ("tensor", "share"),
    "all_gather": ("tensor", "to each"),
    "all_gather_single": ("input_tensor", "to each"),
    "all_gather_into_tensor": ("input_tensor", "to each"),
    "gather": ("tensor", "share"),
    "scatter": ("tensor", "share"),
    "reduce_scatter": ("input_list", "share"),
    "reduce_scatter_single": ("input", "share"),
    "reduce_scatter_tensor": ("input", "share"),
    "all_to_all": ("input_tensor_list", "share"),
    "all_to_all_single": ("input", "share"),
    "send": ("tensor", "once"),
    "isend": ("tensor", "once"),
    "recv": ("tensor", "nothing"),
    "barrier": ("group", "nothing"),
}
"""The functions of ``torch.distributed`` that are counted: the argument that is sent, and how much of it (``share`` is
``(n - 1) / n``). Gathers and broadcasts of objects are made of these.
"""


class Traffic:
    """Counts what is sent between ranks, from its creation until :meth:`close`; one at a time.

    Invariant: it changes no value and no order of what is sent. What Python threads send in the background is not counted.

    Args:
        window: steps that are joined into one table of ranks; ``None`` for :data:`WINDOW`, or more with more ranks.
    Cost: 2 µs for a collective, and one exchange of 16 bytes in :meth:`end_step`.
    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with Traffic() as traffic:
        ...     dist.all_reduce(torch.ones(1000))
        ...     traffic.end_step()  # one rank sends nothing and never waits
        {}
        >>> dist.destroy_process_group()
    """

    def __init__(self, window: int | None = None) -> None:
        ranks = all_ranks()
        self.size, self._device = ranks.size, ranks.device
        self.window = max(WINDOW, self.size) if window is None else window
        self._inside = threading.local()
        # Lists, because a collective may end on a thread of the backend: appending is atomic, adding is not.
        self._bytes: list[float] = []
        self._seconds: list[float] = []
        self._events: list[tuple[Any, Any]] = []
        self._steps: list[Tensor] = []
        self._restore = _torch.replace_collectives(self._counted, COLLECTIVES) if self.size > 1 else lambda: None

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop counting."""
        self._restore()

    def begin_step(self) -> None:
        """Discard what was sent since the last step: evaluations and checkpoints do not count."""
        self._elapsed()
        self._bytes.clear()

    def end_step(self) -> Columns:
        """The columns of this step, for all ranks together. Every rank calls it once a step, at the same place.

        Returns:
            ``communication_bytes``, ``communication_seconds``, ``wait_seconds``, and at the end of a window ``ranks``; the same
            on every rank. Nothing with one rank.
        Cost: one exchange of 16 bytes for each rank. On CUDA it waits until this step's collectives have ended.
        """
        if self.size == 1:
            return {}
        mine = torch.tensor([sum(self._bytes), self._elapsed()], dtype=torch.float64, device=self._device)
        self._bytes.clear()
        self._inside.is_ours = True
        of_all = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(of_all, mine)
        finally:
            self._inside.is_ours = False
        self._steps.append(torch.stack(of_all).cpu())
        row = columns_of(self._steps[-1])
        if len(self._steps) == self.window:
            row["ranks"] = table_of(self._steps)
            self._steps.clear()
        return row

    def _elapsed(self) -> float:
        for began, ended in self._events:
            ended.synchronize()
            self._seconds.append(began.elapsed_time(ended) / 1000)
        self._events.clear()
        taken = len(self._seconds)  # what ends from here on is the next step's
        seconds = sum(self._seconds[:taken])
        del self._seconds[:taken]
        return seconds

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        argument, how = COLLECTIVES[name]
        places = list(inspect.signature(function).parameters)
        factor, sent_at, group_at = _FACTORS[how], places.index(argument), places.index("group")

        @functools.wraps(function)
        def counted(*arguments: Any, **named: Any) -> Any:
            if getattr(self._inside, "is_ours", False) or _in_background():
                return function(*arguments, **named)
            sent = arguments[sent_at] if len(arguments) > sent_at else named.get(argument)
            group = arguments[group_at] if len(arguments) > group_at else named.get("group")
            self._bytes.append(num_bytes(sent) * factor(max(1, dist.get_world_size(group))))
            self._inside.is_ours = True  # some are made of others
            try:
                return self._timed(function, sent, arguments, named)
            finally:
                self._inside.is_ours = False

        return counted

    def _timed(self, function: Callable[..., Any], sent: Any, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        if isinstance(sent, Tensor) and sent.is_cuda:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            result = function(*arguments, **named)
            ended.record()
            self._events.append((began, ended))
            return result
        start = time.perf_counter()
        result = function(*arguments, **named)
        future = None
        if isinstance(result, dist.Work):
            # What gloo sends from one rank to another has none: only its start counts.
            with contextlib.suppress(RuntimeError):
                future = result.get_future()
        if future is None:
            self._seconds.append(time.perf_counter() - start)
        else:
            future.add_done_callback(lambda _: self._seconds.append(time.perf_counter() - start))
        return result


def _in_background() -> bool:
    """Whether a Python thread calls, such as one that writes a checkpoint while steps go on; autograd's threads do not count."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not thread.name.startswith("Dummy-")


def num_bytes(sent: Any) -> int:
    """Bytes of a tensor, or of all tensors in a list; 0 of anything else."""
    if isinstance(sent, Tensor):
        return sent.nbytes
    return sum(tensor.nbytes for tensor in sent) if isinstance(sent, (list, tuple)) else 0


def columns_of(step: Tensor) -> Columns:
    """The columns of ``steps.jsonl`` for a step, shape [R, 2]: the bytes and seconds of each rank.

    Example:
        >>> columns_of(torch.tensor([[80.0, 0.75], [80.0, 0.25]], dtype=torch.float64))
        {'communication_bytes': 80.0, 'communication_seconds': 0.5, 'wait_seconds': 0.5}
    """
    sent, seconds = step.mean(0).tolist()
    return {"communication_bytes": sent, "communication_seconds": seconds, "wait_seconds": float(_lead(step))}


def _lead(step: Tensor) -> Tensor:
    """How long the others waited for the last to arrive, on average: seconds, 0-d."""
    seconds = step[:, 1]
    return (seconds - seconds.min()).sum() / (len(seconds) - 1)


def table_of(steps: Sequence[Tensor]) -> Columns:
    """What each rank did in a window of steps, each of shape [R, 2]: the bytes and seconds of each rank.

    Returns:
        ``num_steps``, and lists with a number for each rank: ``communication_bytes``, ``communication_seconds`` and
        ``wait_seconds`` of a step on average, ``num_last``, the steps in which the others waited for it, and ``late_seconds``,
        how long they waited in one of those.
    Example:
        >>> late = torch.tensor([[80.0, 0.75], [80.0, 0.25]], dtype=torch.float64)
        >>> table_of([late, late])["num_last"], table_of([late, late])["late_seconds"]
        ([0, 2], [0.0, 0.5])
    """
    window = torch.stack(list(steps))  # [steps, R, 2]
    seconds = window[:, :, 1]
    last = seconds.argmin(1, keepdim=True)
    is_last = torch.zeros_like(seconds).scatter_(1, last, 1.0)
    leads = torch.stack([_lead(step) for step in steps])
    num_last = is_last.sum(0)
    return {
        "num_steps": len(window),
        "communication_bytes": window[:, :, 0].mean(0).tolist(),
        "communication_seconds": _short(seconds.mean(0)),
        "wait_seconds": _short((seconds - seconds.gather(1, last)).mean(0)),
        "num_last": num_last.int().tolist(),
        "late_seconds": _short((is_last * leads[:, None]).sum(0) / num_last.clamp(min=1)),
    }


def _short(values: Tensor) -> list[float]:
    """To a microsecond: the table of many ranks should not be mostly digits."""
    return [round(value, 6) for value in values.tolist()]
