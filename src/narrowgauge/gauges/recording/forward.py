"""The forward passes of a watched loop: their modes, and the sums of the outputs of blocks."""

from __future__ import annotations

import hashlib
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from narrowgauge.analysis.reading import of_all
from narrowgauge.checks.float32_copy import is_called_from
from narrowgauge.distributed.order_invariance import generator_state
from narrowgauge.gauges.hub import Listener
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.torch_support.torch_names import plain_name

if TYPE_CHECKING:
    from narrowgauge.gauges.recording.watch import Watch

_BLOCK = re.compile(r"\D*(\d+(\.[^.]+)?)?")
"""Names of the modules whose outputs are summed: blocks and their parts, not the layers in these
parts.
"""


class ForwardPasses(Listener):
    """Follow the blocks, and the modules that a mode changes.

    Attributes:
        number: passes with gradients so far.
    """

    title = "the watch of forward passes"

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._undo = ExitStack()
        self.number = 0
        self._dropouts: list[nn.modules.dropout._DropoutNd] = []
        self._modal: list[nn.Module] = []
        blocks: set[str] = set()
        for name, module in watch.watched_model.named_modules():
            if name and _BLOCK.fullmatch(plain_name(name)):
                blocks.add(name)
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                self._dropouts.append(module)
                self._modal.append(module)
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                self._modal.append(module)
        watch.hub.follow_outputs(self, self.add_sum, self._undo, blocks)

    def end(self) -> None:
        """Remove the hooks."""
        self._undo.close()

    @property
    def mode_dependent(self) -> str:
        """Return what acts in training mode alone, in words; empty if nothing does."""
        things = of_all(f"dropout {dropout.p:g}" for dropout in self._dropouts)
        if self._modal and not things:
            return "batch statistics"
        return things

    def drops_out(self) -> bool:
        """Return whether a dropout is in training mode."""
        return any(dropout.training for dropout in self._dropouts)

    def before_evaluation(self) -> None:
        """Note the mode of a pass without gradients. One in training mode may be part of a step."""
        if is_called_from(swa_utils.__file__, "update_bn"):
            return  # which must run in training mode
        now = self._watch.now
        _add(now.evaluations, self.drops_out())
        now.is_evaluated |= not self._watch.watched_model.training

    def before_pass(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note the mode of a pass."""
        self.number += 1
        now = self._watch.now
        if not now.modes:
            now.generator = _hash_of_generator(module)
        is_training = module.training or any(part.training for part in self._modal)
        _add(now.modes, is_training)
        now.num_dropping = sum(dropout.training for dropout in self._dropouts)

    def add_sum(self, name: str, x: Tensor) -> None:
        """Add the sum of an output of a block."""
        if torch.is_grad_enabled() and x.element_size() > 1:
            self._watch.numbers_of_step.add("output", x.sum(dtype=torch.float32), name)


def _hash_of_generator(model: nn.Module) -> str:
    """Return a hash of the state of the random generator that a model draws from."""
    device = torch.device("cpu")
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.is_cuda:
        device = parameter.device
    states = generator_state(device)
    if not states:  # CUDA captures a graph
        return ""
    return hashlib.blake2b(states[-1], digest_size=8).hexdigest()


def _add(modes: list[bool], mode: bool) -> None:
    if mode not in modes:
        modes.append(mode)


def nonfinite_weight(model: nn.Module, name: str) -> str:
    """Return the first weight of a module that is not finite; empty if all are.

    It waits for the device.
    """
    for inner, module in model.named_modules():
        if plain_name(inner) == name:
            for parameter, p in module.named_parameters():
                if not bool(local_of(p).isfinite().all()):
                    return str(parameter)
    return ""
