"""What is kept of outputs that are too large: some positions, from which the loss is read, and what makes the rest again.

Logits of 8 × 2,048 tokens over 128,000 words take 4 GB in bfloat16, and their gradient as much. The loss is read from a few
positions of both. The gradient of a cross entropy is ``w · (p − q)`` at every position: with the targets ``q`` of all positions,
which are where the gradient is lowest, and the weight ``w`` that the sample tells, the whole of it is computed again from logits
that are computed again. Smoothed targets and a penalty push a token down of which the model is sure, so its target cannot be read
off, and the gradient is not computed again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

POSITIONS = 1 << 9
"""Positions of an output that are kept, at most."""
SAMPLE_BYTES = 1 << 24
"""Bytes of the positions of one output and of its gradient."""
_SHARE_OF_ROOM = 8


@dataclass
class OutputSample:
    """Some positions of an output of dims (batch, sequence, features), and of the gradient that arrived at it.

    Args:
        shape: of the whole output; of another number of dims nothing else is kept.
        chosen: the places of the positions in (batch · sequence), int64 ``[positions]``.
        values, gradients: at these, ``[positions, features]``; gradients are there after the backward pass.
        lowest: at every position the feature with the lowest gradient, int64 ``[batch, sequence]``.
        counts: at every position whether any gradient is not zero, bool ``[batch, sequence]``.
        is_settled: what arrived is of a backward pass that left gradients in parameters.
    """

    shape: torch.Size
    chosen: Tensor
    values: Tensor
    gradients: Tensor | None = None
    lowest: Tensor | None = None
    counts: Tensor | None = None
    has_gradient: bool = False
    is_settled: bool = False

    @classmethod
    def of(cls, output: Tensor, room: int) -> OutputSample:
        """Positions of an output that together take at most a part of the ``room`` in bytes, but at least one."""
        if output.ndim != 3:
            nothing = output.new_empty(0)
            return cls(output.shape, nothing.long(), nothing)
        of_one = 2 * output.shape[2] * output.element_size()
        most = min(SAMPLE_BYTES, max(room, 0) // _SHARE_OF_ROOM) // max(1, of_one)
        chosen = _evenly(output, max(1, min(POSITIONS, most)))
        return cls(output.shape, chosen, _at(output, chosen))

    @classmethod
    def of_whole(cls, output: Tensor, gradient: Tensor) -> OutputSample:
        """Positions of an output of three dims that is kept whole."""
        chosen = _evenly(output, POSITIONS)
        sample = cls(output.shape, chosen, _at(output, chosen))
        sample.arrived(gradient)
        return sample

    def arrived(self, gradient: Tensor) -> None:
        """A hook on the output: keep what is needed of its gradient."""
        self.has_gradient = True
        if len(self.shape) != 3:
            return
        lowest, now = gradient.detach().min(-1), self.at(gradient)
        # Where the model is certain of the target, the others' gradients are all that is left.
        counts = (lowest.values < 0) | (gradient.detach().amax(-1) > 0)
        if self.gradients is None or self.lowest is None or self.counts is None or not self.is_settled:
            self.gradients, self.lowest, self.counts = now, lowest.indices, counts
            return
        # Parts of the loss went back one by one, each of other positions.
        self.gradients, self.counts = self.gradients + now, self.counts | counts
        self.lowest = torch.where(counts, lowest.indices, self.lowest)

    def at(self, tensor: Tensor) -> Tensor:
        """The same positions of another tensor of this shape, ``[positions, features]``."""
        return _at(tensor, self.chosen)

    @property
    def number(self) -> int:
        """Positions of the whole output."""
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        """With the gradients that may still come."""
        of_targets = 9 * self.number if len(self.shape) == 3 else 0
        return 2 * self.values.numel() * self.values.element_size() + of_targets


def _evenly(output: Tensor, most: int) -> Tensor:
    """Evenly spread positions, whose stride has no divisor in common with the length, so that every place of a row is met."""
    number, length = output.shape[0] * output.shape[1], output.shape[1]
    stride = max(1, -(-number // most))
    while stride > 1 and math.gcd(stride, length) > 1:
        stride += 1
    return torch.arange(0, number, stride, dtype=torch.int64, device=output.device)


def _at(tensor: Tensor, chosen: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, tensor.shape[-1])[chosen]


@dataclass(frozen=True)
class CrossEntropy:
    """A cross entropy of logits in which all positions that count do so alike, without smoothing or a penalty.

    Args:
        targets, counts: at every position its target, and whether it counts, ``[batch, sequence]``.
        weight: of each position that counts, with whatever the loss was multiplied by.
        error: of the gradient, relative.
    """

    targets: Tensor
    counts: Tensor
    weight: float
    error: float

    def gradient(self, logits: Tensor) -> Tensor:
        """What arrives at the logits in the backward pass.

        Cost: the logits once in float32, as the loss itself takes.
        """
        found = logits.detach().float().softmax(-1)
        found.scatter_add_(-1, self.targets[..., None], torch.full_like(found[..., :1], -1.0))
        return found.mul_(self.weight * self.counts[..., None]).to(logits.dtype)
