"""Hooks on modules and optimizers of other libraries, which copy and pickle their hooks.

PyTorch's own hooks on an optimizer's step break a loop in two ways, which a :class:`Follower`
avoids:

* PyTorch hooks ``step`` of each class. A subclass that calls ``super().step()`` runs its hooks twice for one step, the inner
  pair within the outer one. Only the outer pair counts here.
* PyTorch iterates over its hooks while it calls them. A hook that removes another raises ``RuntimeError: OrderedDict mutated
  during iteration``. A follower that is removed within a step only falls silent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowgauge.torch_support.torch_names import calls_of_step

after_every_step = cache(register_optimizer_step_post_hook)
"""Have a function called after the steps of every optimizer; once, however often this is asked."""


def members_of(*optimizers: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters of optimizers, as often as a group lists them."""
    members = list[Any]()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            members += group["params"]
    return members


def has_own_hooks(p: Any) -> bool:
    """Return whether a loop's own hooks see the gradient of a parameter, and may change it."""
    hooks = [*(p._backward_hooks or {}).values()]
    hooks += [*(getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()]
    return not all(isinstance(hook, OwnHook) for hook in hooks)


class OwnHook:
    """Hook a module or optimizer without entering its copies and pickles.

    Example:
        >>> import copy
        >>> OwnHook(lambda module: "seen")(None), copy.deepcopy(OwnHook(lambda module: "seen"))(None)
        ('seen', None)
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> tuple[type[OwnHook], tuple[Any]]:
        return OwnHook, (_ignore,)


def _ignore(*_: Any) -> None:
    pass


Listener = Callable[[torch.optim.Optimizer], object]


class Follower:
    """Call a function before and one after each step of an optimizer, until :meth:`remove`, in the
    order of adding.

    Args:
        optimizer: without wrappers. All its followers share one pair of hooks.
        before: called once the step has its gradients. In a step with a closure, called after the
            closure's first call.
        after: called when the step is done.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, before: Listener, after: Listener) -> None:
        self.before = before
        self.after = after
        self._steps = (_STEPS.get(optimizer) or (lambda: None))() or _Steps(optimizer)
        self._steps.followers.append(self)

    def remove(self) -> None:
        """Stop the calls, also within a step."""
        if self in self._steps.followers:
            self._steps.followers.remove(self)
            self._steps.end_if_unused()


class _Steps:
    """The hooks on one optimizer's step, and who follows it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.followers: list[Follower] = []
        self._has_begun = False
        _STEPS[optimizer] = weakref.ref(self)
        # A compiler that traces the step skips the hooks.
        self._handles = [
            optimizer.register_step_pre_hook(OwnHook(torch.compiler.disable(self._enter))),
            optimizer.register_step_post_hook(OwnHook(torch.compiler.disable(self._leave))),
        ]

    def end_if_unused(self) -> None:
        optimizer = self._optimizer()
        # Within a step PyTorch iterates over the hooks. They stay, and do nothing.
        if optimizer is not None and not self.followers and not calls_of_step(optimizer):
            del _STEPS[optimizer]
            for handle in self._handles:
                handle.remove()

    def _enter(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        if calls_of_step(optimizer) > 1:
            return None
        self._has_begun = False
        if any(
            map(callable, [*args, *kwargs.values()])
        ):  # a closure computes the gradients within the step
            return tuple(self._then_begin(optimizer, a) for a in args), {
                name: self._then_begin(optimizer, value) for name, value in kwargs.items()
            }
        self._begin(optimizer)
        return None

    def _then_begin(self, optimizer: torch.optim.Optimizer, closure: Any) -> Any:
        if not callable(closure):
            return closure

        def call(*args: Any, **kwargs: Any) -> Any:
            loss = closure(*args, **kwargs)
            self._begin(optimizer)
            return loss

        return call

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._has_begun:
            self._has_begun = True
            for follower in [*self.followers]:
                if follower in self.followers:
                    follower.before(optimizer)

    def _leave(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if calls_of_step(optimizer) == 1:
            for follower in [*self.followers]:
                if follower in self.followers:
                    follower.after(optimizer)


_STEPS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[_Steps]] = (
    weakref.WeakKeyDictionary()
)
"""The hooks of each optimizer, which keeps them alive."""
