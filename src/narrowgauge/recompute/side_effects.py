"""What a forward pass leaves behind besides its outputs, by which a pass that is taken again would change the run.

Attributes that a pass binds anew, such as counters and auxiliary losses, and buffers that it writes to are kept as they were
before it: another pass begins with them, and the run gets its own back. What else a pass leaves behind is found while the run
takes one of its own, and then none is taken again. These are objects that it changes, such as lists and generators of the model's
own, and tensors of the autograd graph that something keeps, such as a list of auxiliary losses or what a hook collects: the loop
would add those of another pass to its loss.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from narrowgauge._torch import plain_name
from narrowgauge.recompute.inputs_and_outputs import not_copied
from narrowgauge.recompute.object_states import (
    MODULE_ATTRIBUTES,
    StatePrinter,
    inner_values,
    is_code,
    living,
    values_of_functions,
)

BUFFER_BYTES = 1 << 26
"""Bytes that are kept of the buffers before a pass; of more none are."""
ABSENT = object()
"""The value of an attribute that is not there."""
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_MOST = 1 << 16


@dataclass(frozen=True)
class Before:
    """What a forward pass changed, as it was before.

    Args:
        buffers: those that it wrote to, by name.
        attributes: those of modules that it bound anew, with the module and the name; :data:`ABSENT` where there was none.
        keeps_graph: one of them became a tensor of the graph, from which the loop may take a term of its loss.
    """

    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    attributes: Sequence[tuple[nn.Module, str, Any]] = ()
    keeps_graph: bool = False


class PassWatch:
    """Watches one forward pass of the run.

    Args:
        model: unwrapped, before the pass.
        given: what it is given, of which another pass takes copies of the tensors, and the rest as it is.
        is_first: of its step; what one pass leaves behind, the others do too, and it is looked for in that one.
        asks_collector: which tensors something keeps is asked, too.

    Attributes:
        keeps: why no pass can be taken again, if something keeps a tensor of its graph; once it is asked.

    Cost: a copy of the buffers; of the first pass a walk over the modules' attributes, twice; with ``asks_collector`` that
        of :func:`~narrowgauge.recompute.object_states.living`, twice.
    """

    def __init__(self, model: nn.Module, given: Any, is_first: bool, asks_collector: bool) -> None:
        self._model, self._is_first = model, is_first
        self._bound = _attributes_of(model)
        self._own = _states_of(self._bound) if is_first else []
        self._given = [*not_copied(given)] if is_first else []
        self._elsewhere = _states_elsewhere(model, self._given) if is_first else {}
        self._graph = {id(t) for t in _graph_tensors()} if asks_collector else None
        held = dict(model.named_buffers())
        self._held = {name: (buffer, buffer._version) for name, buffer in held.items()}
        size = sum(buffer.numel() * buffer.element_size() for buffer in held.values())
        self._buffers = {name: b.detach().clone() for name, b in held.items()} if size <= BUFFER_BYTES else {}
        self.keeps = ""

    def end(self, output: Any) -> tuple[Before, str]:
        """What the pass changed; and why it cannot be taken again, or empty."""
        made = [] if self._graph is None else _graph_tensors()
        now = dict(self._model.named_buffers())
        written = [
            name
            for name, (old, version) in self._held.items()
            if now.get(name) is not old or old._version != version or not self._is_as_before(name, old)
        ]
        buffers = {name: self._buffers[name] for name in written if name in self._buffers}
        if len(buffers) < len(written):
            return Before(), f"the forward pass writes to buffers of more than {BUFFER_BYTES >> 20} MiB"
        bound = [*self._bound_anew()]
        before = Before(buffers, bound, any(_is_of_graph(vars(module).get(name)) for module, name, _ in bound))
        self.keeps = self._kept(made, output)
        return before, self.keeps or (self._changed() if self._is_first else "")

    def _is_as_before(self, name: str, buffer: Tensor) -> bool:
        """By its values, since a write through ``.data`` does not count as a version."""
        before = self._buffers.get(name)
        return before is None or before.layout is not torch.strided or torch.equal(before, buffer)

    def _bound_anew(self) -> Iterator[tuple[nn.Module, str, Any]]:
        for (module, before), (_, now) in zip(self._bound, _attributes_of(self._model), strict=True):
            for name in before.keys() | now.keys():
                if before.get(name, ABSENT) is not now.get(name, ABSENT):
                    yield module, name, before.get(name, ABSENT)

    def _changed(self) -> str:
        if _has_backward_hooks(self._model):
            return "modules have hooks on their backward passes, which another pass would call"
        names = {module: name for name, module in self._model.named_modules()}
        for (module, _), before, now in zip(self._bound, self._own, _states_of(self._bound), strict=True):
            for name, value in now.items():
                if before[name] != value:
                    place = plain_name(f"{names[module]}.{name}".removeprefix("."))
                    return f"the forward pass changes the model's {place}, as would another"
        for place, value in _states_elsewhere(self._model, self._given).items():
            if self._elsewhere.get(place) != value:
                return f"the forward pass changes {place}, as would another"
        return ""

    def _kept(self, made: list[Tensor], output: Any) -> str:
        given = {id(t) for t in _held_by(output)} | (self._graph or set())
        kept = [t for t in made if id(t) not in given]
        made.clear()  # a list that holds them, too
        holders = gc.get_referrers(*kept) if kept else []
        # Attributes of modules are put back, and what functions of autograd keep for the backward pass ends with the graph.
        contexts = living(BackwardCFunction) if kept else []
        own = {id(kept), *(id(vars(module)) for module in self._model.modules())}
        own |= {id(each) for context in contexts for each in (context, vars(context), *vars(context).values())}
        if any(id(each) not in own and type(each) is not FrameType for each in holders):
            return "the forward pass leaves tensors of its graph elsewhere than in its outputs, as would another"
        return ""


def _has_backward_hooks(model: nn.Module) -> bool:
    """Whether a user's hook is called in the backward pass: what it changes is not to be seen when the forward pass ends."""
    hooks = (hook for module in model.modules() for name in _BACKWARD for hook in vars(module).get(name, {}).values())
    return any(str(hook.__module__).partition(".")[0] not in ("torch", "narrowgauge") for hook in hooks)


def _graph_tensors() -> list[Tensor]:
    """Every tensor with a gradient function that Python knows, also those that the graph alone holds."""
    return [each for each in living(Tensor) if _is_of_graph(each)]


def _is_of_graph(value: Any) -> bool:
    # isinstance would ask proxies, which may compute.
    try:
        return issubclass(type(value), Tensor) and value.grad_fn is not None
    except RuntimeError:  # a view whose base was written to
        return True


def _held_by(output: Any) -> Iterator[Tensor]:
    """Every tensor in an output, also in objects such as a cache of keys and values."""
    left, seen = [output], set[int]()
    while left and len(seen) < _MOST:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        else:
            left += [each for _, each in inner_values(value)]
            left += list(getattr(value, "__dict__", {}).values())


def _attributes_of(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """The attributes of every module that are neither parameters, buffers, modules nor hooks."""
    return [(each, {k: v for k, v in vars(each).items() if k not in MODULE_ATTRIBUTES}) for each in model.modules()]


@contextmanager
def attributes_as(before: Before, model: nn.Module) -> Iterator[None]:
    """Bind attributes as they were before a pass, and then give every module its own back, whatever was bound in between."""
    own = _attributes_of(model)
    for module, name, value in before.attributes:
        if value is not ABSENT:
            vars(module)[name] = value
        else:
            vars(module).pop(name, None)
    try:
        yield
    finally:
        for module, attributes in own:
            held = vars(module)
            for name in [name for name in held if name not in MODULE_ATTRIBUTES and name not in attributes]:
                del held[name]
            held.update(attributes)


def _states_of(bound: Sequence[tuple[nn.Module, dict[str, Any]]]) -> list[dict[str, object]]:
    """The states of the attributes of modules."""
    state_of = StatePrinter()
    return [{name: state_of(value) for name, value in of.items()} for _, of in bound]


def _states_elsewhere(model: nn.Module, given: Sequence[Any]) -> dict[str, object]:
    """The states of what a pass may change beside the model: objects that it is given, and what its code names or keeps."""
    state_of, functions = StatePrinter(), list[Any]()
    found: dict[str, object] = {f"a {type(each).__name__} that it is given": state_of(each) for each in given}
    for kind in dict.fromkeys(each for module in model.modules() for each in type(module).__mro__):
        if kind.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing"):
            continue
        for name, value in vars(kind).items():
            if is_code(value):
                functions.append(value)
            elif not name.startswith("__"):
                found[f"{kind.__name__}.{name}"] = state_of(value)
    for module in model.modules():
        functions += [hook for name in _HOOKS for hook in vars(module).get(name, {}).values()]
        functions += [
            value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES and callable(value)
        ]
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()}
    kept: dict[str, list[object]] = {}
    for place, value in values_of_functions(functions, {id(module) for module in model.modules()}, packages):
        kept.setdefault(place, []).append(state_of(value))
    return found | kept
