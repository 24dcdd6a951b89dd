"""The one set of hooks on a loop's model and optimizers, and the listeners that read them.

The meter of a watch and the fingerprints are listeners. :class:`LoopHooks` hooks the module that
the loop calls, and the step of each optimizer. A compiler and the transforms of ``torch.func`` skip all
hooks.

A listener is an object with ``before_pass(inputs)`` for a forward pass with gradients,
``before_step(optimizer)`` for a step that has its gradients, ``after_step(optimizer)``, and ``end()``, which
releases what it holds. It may only read. An error in a listener ends this listener, and neither the others
nor the loop; ``title`` names it. If it ``compares_ranks``, they wait for each other, so there an error ends
the loop.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.measuring.reading import failure_of
from narrowgauge.torch_support.torch_hooks import OwnHook
from narrowgauge.torch_support.torch_names import is_transformed


class RunNotice(UserWarning):
    """Warn about a watched or recorded loop.

    A recorder writes the warning to ``events.jsonl`` too.
    """


class LoopHooks:
    """Hook a loop once, for all its listeners.

    PyTorch hooks the step of each class, so a subclass that calls ``super().step()`` runs the hooks
    twice for one step. Only the outer pair counts. A step that raised has no end: the next forward
    pass forgets it.

    Args:
        model: without wrappers.
        optimizers: without wrappers; the last one steps at the end.
        called: the module whose forward pass the loop calls.
        say: shows the error that ended a listener, or its measure of an area.

    Attributes:
        ranks: all of them make all calls.
        listeners: called in their order.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        called: nn.Module,
        say: Callable[..., object],
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.say = say
        self.ranks = all_ranks()
        self.listeners: list[Any] = []
        self._depth: Counter[Optimizer] = Counter()
        before = OwnHook(self._before_pass)
        self._handles = [called.register_forward_pre_hook(before, with_kwargs=True)]
        # A compiler that traces the step skips the hooks.
        enter = OwnHook(torch.compiler.disable(self._enter))
        leave = OwnHook(torch.compiler.disable(self._leave))
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(enter))
            self._handles.append(optimizer.register_step_post_hook(leave))

    def close(self) -> None:
        """End all listeners, and remove every hook."""
        while self.listeners:
            self.listeners.pop().end()
        for handle in self._handles:
            handle.remove()

    def guard(self, listener: Any, call: Callable[..., object], *args: Any) -> None:
        """Call a method of a listener. An error ends the listener instead of the loop."""
        try:
            call(*args)
        except Exception as error:
            if isinstance(error, UserWarning) or (self.ranks.size > 1 and listener.compares_ranks):
                raise
            if listener in self.listeners:
                self.listeners.remove(listener)
                listener.end()
                self.say(failure_of(listener.title, error))

    @torch.no_grad()
    def _tell(self, event: str, *args: Any) -> None:
        for listener in [*self.listeners]:
            self.guard(listener, getattr(listener, event), *args)

    def _before_pass(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and is_eager():
            self._depth.clear()
            self._tell("before_pass", (*args, *kwargs.values()))

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Begin a step: at once, or after the first call of the closure that computes its gradients."""
        self._depth[optimizer] += 1
        if self._depth[optimizer] > 1:
            return None
        waiting = [optimizer]

        def wrapped(closure: Any) -> Any:
            return partial(self._call, waiting, closure) if callable(closure) else closure

        if any(map(callable, [*args, *kwargs.values()])):
            return tree_map(wrapped, (args, kwargs))
        return self._tell("before_step", optimizer)

    def _call(self, waiting: list[Any], closure: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a closure, whose forward pass forgets no step, and begin the step that waits for it."""
        depth = Counter(self._depth)
        loss = closure(*args, **kwargs)
        self._depth = depth
        while waiting:
            self._tell("before_step", waiting.pop())
        return loss

    def _leave(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth[optimizer] -= 1
        if self._depth[optimizer] <= 0:
            self._depth[optimizer] = 0
            self._tell("after_step", optimizer)


def is_eager() -> bool:
    """Return whether hooks run: neither a compiler traces them nor a transform of ``torch.func``."""
    return not torch.compiler.is_compiling() and not is_transformed()
