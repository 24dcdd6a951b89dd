"""Fingerprints of a user's loop.

The trainer calls :class:`~narrowgauge.gauges.recording.fingerprints.Fingerprints` at each place of a step. Here hooks do it. A
forward pass with gradients is a micro-batch. The optimizer's step has the gradients before it and the states after it. On
several ranks, hooks on the parameters read this rank's gradients before ``DistributedDataParallel`` sums them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import torch_names
from narrowgauge.distributed.ranks import Ranks
from narrowgauge.gauges import hooks
from narrowgauge.gauges.recording.fingerprints import Fingerprints
from narrowgauge.gauges.recording.provenance import formats_of
from narrowgauge.runs.schema import Row
from narrowgauge.torch_hooks import follow_steps


class LoopFingerprints:
    """Follow the steps of a loop.

    Args:
        model: its tensors are recorded.
        called: the model as the loop calls it, or the called part.
        optimizer: the model's, without wrappers.
        every: steps between fingerprints. The start and the first step have fingerprints too. 0 for none.
        here: the ranks. All ranks make all calls.
        on_formats: called once, with :func:`formats_of` of the first forward pass.
        on_failure: called with a sentence if recording must end. On several ranks, which wait for each other, the
            error is raised instead.

    Attributes:
        prints: the last recorded fingerprints.
    """

    def __init__(
        self,
        model: nn.Module,
        called: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        here: Ranks,
        on_formats: Callable[[Row], object],
        on_failure: Callable[[str], object],
    ) -> None:
        self.here = here
        self.prints = Fingerprints(torch_names.unwrapped_model(model), optimizer, every, here, first=1)
        self._on_formats, self._on_failure = on_formats, on_failure
        self._has_formats = False
        self._has_begun, self._is_past_backward = True, False
        self._num_sequences = self._step = 0
        trained = [name for name, p in self.prints.model.named_parameters() if p.requires_grad]
        self._places = {torch_names.plain_name(name): place for place, name in enumerate(trained, 1)}
        self._pass, self._backward, self._hooks = ExitStack(), ExitStack(), ExitStack()
        self._hooks.callback(hooks.follow_passes(called, self._before_pass, self._after_pass))
        self._hooks.callback(follow_steps(optimizer, self._before_step, self._after_step).remove)

    def start(self, step: int) -> None:
        """Record the state after ``step`` steps: the first weights, or a checkpoint's."""
        self._guarded(lambda: self.prints.before_first(step))

    def begin(self, step: int) -> None:
        """Begin the step that ends as number ``step``. Changes by the loop before its first pass count as between steps."""
        self._pass.close()
        self._backward.close()
        self._step, self._num_sequences, self._is_past_backward, self._has_begun = step, 0, False, False

    def remove(self) -> None:
        """Remove every hook."""
        for stack in (self._pass, self._backward, self._hooks):
            stack.close()

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._guarded(lambda: self.prints.begin(self._step))
            if self.prints.is_on and self.here.size > 1:
                self._backward.callback(hooks.follow_gradients(self.prints.model, self._see_gradient))

    def _see_gradient(self, name: str, gradient: Tensor) -> None:
        self._guarded(lambda: self.prints.computed(gradient, self._places[name]))

    def _before_pass(self, args: Any, kwargs: Any) -> None:
        if self._is_past_backward:  # later computations are not passes of the step
            return
        self._begin()
        if self.prints.is_on:
            self._pass.close()  # one that raised
            self._guarded(lambda: self._begin_pass(_tokens_in([*args, *kwargs.values()])))

    def _begin_pass(self, tokens: Tensor | None) -> None:
        self.prints.sees_outputs = not torch_names.is_compiled_model(self.prints.model)
        self._pass.enter_context(self.prints.micro_batch(tokens, self._num_sequences))
        self._num_sequences += 0 if tokens is None else len(tokens)

    def _after_pass(self, output: Any) -> None:
        if self._is_past_backward:
            return
        self._pass.close()
        if not self._has_formats:
            self._guarded(lambda: self._tell_formats(formats_of(output)))

    def _tell_formats(self, formats: Row) -> None:
        if formats:
            self._has_formats = True
            self._on_formats(formats)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._begin()
        self._pass.close()
        self._backward.close()
        self._is_past_backward = True
        self._guarded(self.prints.gradients)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._guarded(lambda: self.prints.states(self._step))

    def _guarded(self, function: Callable[[], object]) -> None:
        try:
            with torch.no_grad():
                function()
        except Exception as error:
            if self.here.size > 1:
                raise
            self._pass.close()
            self.prints.every, self.prints.is_on, self.prints.last = 0, False, None
            self._has_formats = True
            self._on_failure(f"no more fingerprints are recorded: {type(error).__name__}: {error}"[:300])


def _tokens_in(inputs: list[Any]) -> Tensor | None:
    """Return the first integer input of a forward pass with two dims: batch, sequence."""
    return next((t for t in inputs if isinstance(t, Tensor) and t.ndim == 2 and not t.is_floating_point()), None)
