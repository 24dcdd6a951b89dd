"""The random generators that a model's forward pass may draw from: PyTorch's on the CPU and on GPUs, Python's, and NumPy's.

Stochastic depth and LayerDrop often draw from :mod:`random`, once for each layer.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_OTHER_SEED = 0x5EED


@dataclass(frozen=True)
class RandomStates:
    """What all generators will draw next.

    Args:
        cpu: of PyTorch's generator on the CPU.
        cuda: of its generators on all GPUs; empty where the run uses none.
        python: of :mod:`random`.
        numpy: of NumPy's legacy generator, if NumPy is loaded.
    """

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> RandomStates:
        """Those that the run is in."""
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        numpy = _numpy_random()
        return cls(torch.get_rng_state(), cuda, random.getstate(), None if numpy is None else numpy.get_state())

    @classmethod
    def others(cls) -> RandomStates:
        """States of the same generators, which no run is in."""
        with kept():
            torch.manual_seed(_OTHER_SEED)
            random.seed(_OTHER_SEED)
            if (numpy := _numpy_random()) is not None:
                numpy.seed(_OTHER_SEED)
            return cls.now()

    def restore(self) -> None:
        """Put all generators into these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        random.setstate(self.python)
        if self.numpy is not None and (numpy := _numpy_random()) is not None:
            numpy.set_state(self.numpy)

    def equals(self, other: RandomStates) -> bool:
        """Whether PyTorch's generators draw the same next."""
        own, others = (self.cpu, *self.cuda), (other.cpu, *other.cuda)
        return len(own) == len(others) and all(map(torch.equal, own, others))


def _numpy_random() -> Any:
    """NumPy's module of random numbers; ``None`` where the process has not loaded it."""
    return sys.modules.get("numpy.random")


@contextmanager
def kept(states: RandomStates | None = None) -> Iterator[None]:
    """Leave all generators as they were.

    Args:
        states: in which they are meanwhile; without, they stay where they are.
    """
    before = RandomStates.now()
    try:
        if states is not None:
            states.restore()
        yield
    finally:
        before.restore()
