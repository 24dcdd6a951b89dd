"""The board: where a sampled step's tensors leave their marks, and how these are read at its end.

While the step runs, each watched tensor costs two reductions (largest magnitude, sum of squares) and a copy of some of its
rows, written to a place of its own. All that is worth more than that, histograms, outliers, what casts lose, is computed at
the end of the step from the copied rows, for all tensors together. Then everything goes to the host in one transfer.

Compiled code marks tensors through an operator with a side effect that its compiler must keep. The operator only reads
tensors that are in memory anyway, because a matmul reads them, so nothing around it is compiled differently; and it is in
the graph only on sampled steps, which are a second version of the compiled code. So an unsampled step costs nothing, and
a run that is watched has the bits of one that is not.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowgauge import _torch
from narrowgauge.numerics.tensor_stats import amax, attention_statistics, nonfinite_count, rms
from narrowgauge.transforms.scaled_tensor import Scaled

SAMPLE = 1 << 13
"""Values of each tensor that are copied: whole rows, evenly spaced."""

QUERIES = 8
"""Query places whose attention is looked at."""


class Switch:
    """Whether the step that runs is sampled by anyone. Compiled code is guarded by ``is_on``, and so has two versions."""

    is_on = False


SWITCH = Switch()


def is_sampled(module: torch.nn.Module) -> bool:
    """Whether what a module does now is looked at."""
    # In this order, so that code compiled for evaluation is not guarded by the switch.
    return torch.is_grad_enabled() and module.training and SWITCH.is_on


@dataclass(frozen=True)
class Watched:
    """A tensor that has a place on the board.

    Args:
        kind: a key of ``runs.schema.TENSOR_KINDS``, or ``attention``.
        name: of the module or parameter.
    """

    kind: str
    name: str

    @property
    def key(self) -> str:
        """As rows of ``gauges.jsonl`` name it."""
        return f"{self.kind}:{self.name}"


@dataclass(eq=False)
class Board:
    """The marks of one model's watched tensors.

    Args:
        watched: the tensors, by place.
        device: where marks are kept.
        is_open: whether marks are taken; compiled code may run a sampled version for another board.
    """

    watched: list[Watched]
    device: torch.device
    is_open: bool = False
    marks: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    samples: dict[int, Tensor] = field(default_factory=dict)
    places: dict[int, Tensor] = field(default_factory=dict)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = len(_BOARDS)
        _BOARDS.append(weakref.ref(self))

    def place(self, index: int) -> Tensor:
        """What names a place in a graph: a tensor, so that layers share a graph; on the CPU, so that nothing waits."""
        place = self.places[index] = torch.tensor([self.number, index], dtype=torch.int64)
        return place

    def clear(self) -> None:
        """Forget the marks of the last sampled step."""
        self.samples.clear()
        self.marks.clear()

    @property
    def marked_on(self) -> torch.device:
        """Where the marks are."""
        return next((mark[0].device for mark in self.marks.values()), self.device)

    def figures(self) -> Tensor:
        """Largest magnitude, rms and count of bad values of every place, float32 ``[places, 3]``; NaN where none was marked.

        Of an attention it is the largest logit and the entropy.
        """
        device = self.marked_on
        none = torch.full((3,), torch.nan, dtype=torch.float32, device=device)
        rows = [torch.stack(self.marks[k]) if k in self.marks else none for k in range(len(self.watched))]
        return torch.stack([row.to(device) for row in rows])

    def mark(self, index: int, x: Tensor) -> None:
        """Note a tensor; later marks of the same place replace earlier ones."""
        if not self.is_open or not x.numel():
            return
        if x.layout is not torch.strided:
            return
        x = x.detach()
        largest = amax(x)
        # Counting costs more than both others; on the CPU it is known for free that there is nothing to count.
        bad = (
            torch.zeros_like(largest) if not x.is_cuda and math.isfinite(largest.item()) else nonfinite_count(x).float()
        )
        self.marks[index] = largest, rms(x), bad
        self.samples[index] = sample_rows(x)

    def mark_attention(self, index: int, query: Tensor, key: Tensor, scale: float, is_causal: bool) -> None:
        """Note the logits of the first sequence of a batch: ``[(batch,) heads, tokens, width]``."""
        if not self.is_open or not query.numel() or not key.numel():
            return
        query, key = (x[(0,) * max(0, x.ndim - 3)] for x in (query, key))
        if query.ndim != 3 or query.shape[0] % key.shape[0]:
            return
        with torch.autocast(query.device.type, enabled=False):
            if is_causal:
                numbers = torch.arange(1, QUERIES + 1, dtype=torch.int64, device=query.device)
                places = numbers * query.shape[1] // QUERIES - 1
                largest, entropy = attention_statistics(query, key, scale, places.clamp(min=0))
            else:
                largest, entropy = _of_all_keys(query, key, scale)
        self.marks[index] = (largest, entropy, torch.zeros_like(largest))


def sample_rows(x: Tensor) -> Tensor:
    """Evenly spaced rows of a tensor, about ``SAMPLE`` values, float32 ``[rows, columns]``; a copy.

    Example:
        >>> sample_rows(torch.arange(6).reshape(3, 2)).shape
        torch.Size([3, 2])
    """
    matrix = x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, -1)
    rows, columns = matrix.shape
    if columns > SAMPLE:  # a long vector
        matrix, columns = matrix[:, :SAMPLE], SAMPLE
    count = max(1, min(rows, SAMPLE // columns))
    return matrix[:: rows // count][:count].to(torch.float32, copy=True)


def _of_all_keys(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Largest logit and mean entropy of some queries, each of which sees all keys, as the last of causal ones does."""
    last = torch.full((1,), key.shape[1] - 1, dtype=torch.int64, device=key.device)
    places = [max(0, k * query.shape[1] // QUERIES - 1) for k in range(1, QUERIES + 1)]
    queries = (query[:, place, None].expand(-1, key.shape[1], -1) for place in places)
    each = torch.stack([attention_statistics(one, key, scale, last) for one in queries])
    return each[:, 0].amax(), each[:, 1].mean()


# Weakly held: a board ends with the gauges that made it. Places are never used again, since compiled code may hold one.
_BOARDS: list[weakref.ref[Board]] = []


def board_of(place: Tensor) -> tuple[Board | None, int]:
    """The board that a place is on, where it is still there, and the place's number.

    The place of a copied model is a copy, and on no board.
    """
    number, index = place.tolist()
    board = _BOARDS[number]() if number < len(_BOARDS) else None
    own = board.places.get(index) if board is not None else None
    return (board, index) if own is not None and own.data_ptr() == place.data_ptr() else (None, index)


@torch.library.custom_op("narrowgauge::mark", mutates_args=())
def mark(x: Tensor, place: Tensor) -> None:
    """Note a tensor at a place of a board."""
    board, index = board_of(place)
    if board is not None:
        board.mark(index, x)


@torch.library.custom_op("narrowgauge::mark_attention", mutates_args=())
def mark_attention(query: Tensor, key: Tensor, scale: float, place: Tensor, is_causal: bool) -> None:
    """Note an attention's logits at a place of a board."""
    board, index = board_of(place)
    if board is not None:
        board.mark_attention(index, query, key, scale, is_causal)


@mark.register_fake
def _(x: Tensor, place: Tensor) -> None:
    return None


@mark_attention.register_fake
def _(query: Tensor, key: Tensor, scale: float, place: Tensor, is_causal: bool) -> None:
    return None


_torch.keep_effect(mark)
_torch.keep_effect(mark_attention)


class _MarkGradient(torch.autograd.Function):
    """The identity, whose gradient is marked: what compiled code takes in place of a hook on the tensor."""

    @staticmethod
    def forward(ctx: object, y: Tensor, place: Tensor) -> Tensor:
        ctx.place = place  # type: ignore[attr-defined]
        # Not a view of it, which compiled code could not change in place; the compiler drops the copy where nobody does.
        return y.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient as it came."""
        mark(grads[0], ctx.place)  # type: ignore[attr-defined]
        return grads[0], None


def mark_tensor(x: Tensor, place: Tensor | None) -> None:
    """Mark a tensor of any kind: of one that carries its scale its data, which is what a cast without looking takes."""
    if place is None:
        return
    data = x._data if isinstance(x, Scaled) else x
    if type(data) in (Tensor, torch.nn.Parameter):
        mark(data.detach(), place)


def mark_gradient(y: Tensor, place: Tensor | None) -> Tensor:
    """``y``, whose gradient will be marked."""
    if place is None:
        return y
    if torch.compiler.is_compiling():
        if isinstance(y, Scaled):  # one that carries its scale is not followed into a graph
            return y
        marked: Tensor = _MarkGradient.apply(y, place)  # type: ignore[no-untyped-call]
        return marked
    # A hook leaves the tensor itself as it is, so that it may still be changed in place.
    if y.requires_grad:
        y.register_hook(lambda grad: mark_tensor(grad, place))
    return y
