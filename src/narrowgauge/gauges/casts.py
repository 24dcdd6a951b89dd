"""By which cast a watched tensor enters its matmul, and by which scale where that comes from earlier steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from narrowgauge.computes import Cast
from narrowgauge.gauges.board import Board, Watched
from narrowgauge.matmul.delayed import delayed_amax
from narrowgauge.matmul.linear import Linear
from narrowgauge.matmul.randomness import STEP

_ITS_OPERAND = {
    "input": ("output", "left", 0),
    "weight": ("output", "right", 1),
    "output_grad": ("grad_input", "left", 2),
}
"""Of each kind, the product and side whose cast it enters, and its number in a delayed scale's history."""


class Casts:
    """The casts of a model's narrow layers, as the step that runs makes them.

    Args:
        layers: the watched linear layers by name, narrow or not.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = layers
        self._delayed: dict[Watched, Tensor] = {}

    def note(self, board: Board) -> None:
        """Note the delayed scales of the step that has just run, before the layers are told of the next one."""
        self._delayed.clear()
        for index, watched in enumerate(board.watched):
            used = self._used(watched)
            if used is None or used[0].amax_history is None:
                continue
            layer, cast, operand = used
            # Where no earlier step saw anything it is the tensor's own.
            mark = board.marks.get(index)
            own = torch.ones(1, device=layer.weight.device) if mark is None else mark[0].reshape(1)
            amax = delayed_amax(own, cast, layer.amax_history, operand, layer.state[STEP], record=False)
            if amax is not None:
                self._delayed[watched] = amax

    def of(self, watched: Watched) -> tuple[Cast | None, Tensor | None]:
        """The cast of a tensor, and its delayed scale's magnitude; nothing where it enters as it is."""
        used = self._used(watched)
        if used is None:
            return None, None
        layer, cast, _ = used
        if cast.is_wide and cast.format == str(layer.weight.dtype).removeprefix("torch."):
            return None, None
        return cast, self._delayed.get(watched)

    def _used(self, watched: Watched) -> tuple[Linear, Cast, int] | None:
        """The narrow layer that takes a tensor, by which cast, and as which operand."""
        name = watched.name.removesuffix(".weight") if watched.kind == "weight" else watched.name
        layer = self.layers.get(name)
        if watched.kind not in _ITS_OPERAND or not isinstance(layer, Linear):
            return None
        product, side, operand = _ITS_OPERAND[watched.kind]
        cast: Cast = getattr(layer.compute.products[product], side)
        return layer, cast, operand
