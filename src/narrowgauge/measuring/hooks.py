"""The one set of hooks on a loop's model and optimizers, and the listeners that read them.

The meter of a watch, the fingerprints and the gauges are listeners. The hub hooks the module that the
loop calls, and the step of each optimizer. Outputs of single modules are hooked while a listener
wants them. A compiler and the transforms of ``torch.func`` skip all hooks.

An error in a listener ends this listener, and neither the others nor the loop. The ranks of a listener
that compares them wait for each other, so there an error ends the loop.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.distributed.ranks import Ranks, all_ranks
from narrowgauge.measuring.reading import failure_of
from narrowgauge.torch_support.torch_hooks import OwnHook
from narrowgauge.torch_support.torch_names import is_transformed, plain_name


class RunNotice(UserWarning):
    """Warn about a watched or recorded loop.

    A recorder writes the warning to ``events.jsonl`` too.
    """


class Listener:
    """Hear what happens in a loop. Each method does nothing here, and may only read.

    Attributes:
        title: names it where an error ends it.
        compares_ranks: it communicates, so that an error on one rank must reach the others.
    """

    title = "the listener"
    compares_ranks = False

    def before_pass(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Hear of a forward pass with gradients that begins."""

    def after_pass(self, output: Any) -> None:
        """Hear of a forward pass with gradients that ended."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear of a step that has its gradients."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear of a step that is done."""

    def end(self) -> None:
        """Release what the listener holds, after an error in it."""


class Hub:
    """Hook a loop once, for all its listeners.

    PyTorch hooks the step of each class, so a subclass that calls ``super().step()`` runs the hooks
    twice for one step. Only the outer pair counts. A step that raised has no end: the next forward
    pass forgets it.

    Args:
        model: without wrappers.
        optimizers: without wrappers; the last one steps at the end.
        called: the module whose forward pass the loop calls. ``None`` hooks no forward pass.
        here: the ranks. All of them make all calls.

    Attributes:
        listeners: called in their order.
        say: shows the error that ended a listener.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        called: nn.Module | None = None,
        here: Ranks | None = None,
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.here = here or all_ranks()
        self.listeners: list[Listener] = []
        self.say: Callable[[str], object] = _warn
        self.undo = ExitStack()
        self._depth: Counter[torch.optim.Optimizer] = Counter()
        if called is not None:
            before = OwnHook(self._before_pass)
            after = OwnHook(self._after_pass)
            self.undo.callback(called.register_forward_pre_hook(before, with_kwargs=True).remove)
            self.undo.callback(called.register_forward_hook(after).remove)
        # A compiler that traces the step skips the hooks.
        enter = torch.compiler.disable(self._enter)
        leave = torch.compiler.disable(self._leave)
        for optimizer in optimizers:
            self.undo.callback(optimizer.register_step_pre_hook(OwnHook(enter)).remove)
            self.undo.callback(optimizer.register_step_post_hook(OwnHook(leave)).remove)

    def guard(self, listener: Listener, call: Callable[..., object], *args: Any) -> None:
        """Call a method of a listener. An error ends the listener instead of the loop."""
        try:
            call(*args)
        except Exception as error:
            if isinstance(error, UserWarning) or (self.here.size > 1 and listener.compares_ranks):
                raise
            if listener in self.listeners:
                self.listeners.remove(listener)
                listener.end()
                self.say(failure_of(listener.title, error))

    @torch.no_grad()
    def _tell(self, event: str, *args: Any) -> None:
        for listener in [*self.listeners]:
            if listener in self.listeners:
                self.guard(listener, getattr(listener, event), *args)

    def _before_pass(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and _is_eager():
            self._depth.clear()
            self._tell("before_pass", module, (*args, *kwargs.values()))

    def _after_pass(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and _is_eager():
            self._tell("after_pass", output)

    def _enter(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Begin a step: at once, or after the first call of the closure that computes its gradients."""
        self._depth[optimizer] += 1
        if self._depth[optimizer] > 1:
            return None
        if not any(map(callable, [*args, *kwargs.values()])):
            return self._tell("before_step", optimizer)
        waiting = [optimizer]
        wrapped = partial(self._wrapped, waiting)
        return tuple(map(wrapped, args)), {name: wrapped(x) for name, x in kwargs.items()}

    def _wrapped(self, waiting: list[torch.optim.Optimizer], closure: Any) -> Any:
        """Return a closure that begins the step of the optimizer that waits for it."""
        if not callable(closure):
            return closure

        def call(*args: Any, **kwargs: Any) -> Any:
            depth = Counter(self._depth)
            loss = closure(*args, **kwargs)
            self._depth = depth
            while waiting:
                self._tell("before_step", waiting.pop())
            return loss

        return call

    def _leave(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth[optimizer] -= 1
        if self._depth[optimizer] <= 0:
            self._depth[optimizer] = 0
            self._tell("after_step", optimizer)

    def follow_outputs(
        self,
        listener: Listener,
        see: Callable[[str, Tensor], object],
        stack: ExitStack,
        names: Collection[str] = (),
    ) -> None:
        """Call a function with the first output of each module that has parameters, until the
        stack closes.

        Args:
            names: of the modules; without names, those with parameters of their own.
        """
        for name, module in self.model.named_modules():
            if names and name not in names:
                continue
            if next(module.parameters(recurse=bool(names)), None) is not None:
                hook = OwnHook(partial(self._see_output, listener, see, plain_name(name)))
                stack.callback(module.register_forward_hook(hook).remove)

    def _see_output(
        self,
        listener: Listener,
        see: Callable[[str, Tensor], object],
        name: str,
        module: nn.Module,
        args: Any,
        output: Any,
    ) -> None:
        if isinstance(output, (tuple, list)) and output:
            output = output[0]
        if type(output) is Tensor and output.is_floating_point() and _is_eager():
            self.guard(listener, see, name, output.detach())


def _is_eager() -> bool:
    return not torch.compiler.is_compiling() and not is_transformed()


def _warn(sentence: str) -> None:
    warnings.warn(sentence, RunNotice, stacklevel=5)
