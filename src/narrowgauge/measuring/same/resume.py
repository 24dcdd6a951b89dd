"""Check that a resumed run is the same run, for any loop.

Compare the saved state with the state of fresh objects after the load. Then both take the steps
after the checkpoint. Tensors are compared by fingerprints of their bits, which do not depend on
sharding.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from narrowgauge.measuring.reading import Readings, measured
from narrowgauge.numerics.dtensor import whole
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.runs.text import plural
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.preserve import generator_states
from narrowgauge.torch_support.torch_names import bare_name

Objects = Mapping[str, Any]
StepFunction = Callable[[], Any]
StateTexts = dict[str, str]
"""The text of each state by its path, such as ``optimizer.state.0.exp_avg``."""
PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LONG = 16
"""A list of more plain values than this is one state, by its hash."""


def check_resume(
    step: StepFunction, save: Callable[[], Any], load: Callable[[Any], Any], *, steps: int = 1
) -> Readings:
    """Prove that a resumed loop is the same run: restore in fresh objects, and repeat the steps
    after the checkpoint.

    All ranks make the call. The place in an epoch is often lost at the second resume: check the
    ``step`` and ``save`` of a loop that was resumed, too.

    Args:
        step: takes the loop's next step and returns the loop's objects by name: modules,
            optimizers, tensors, numbers, and anything with a ``state_dict()``, in dicts and lists.
            Other objects are in ``unseen``. A step that returns something else, such as its loss,
            is compared by what it holds: variables around the function, attributes of the method's
            object.
        save: writes a checkpoint, and returns the argument of ``load``.
        load: rebuilds everything from the checkpoint. It returns the fresh objects by the same
            names (``None`` if the step returns none), and their ``step``. An object that is
            ``None`` until the next step is not compared.
        steps: repeated after the resume. Take enough to cross an epoch.
    Returns:
        A reading for each kind of state that differs, in the order in which the loop names them. What
        ``step`` does not return is not compared.

    Example:
        >>> import narrowgauge as ng
        >>> weight, fresh = torch.zeros(2), torch.zeros(2)
        >>> def step_of(weight):
        ...     return lambda: {"weight": weight.add_(1)}
        >>> result = ng.check_resume(step_of(weight), lambda: None, lambda saved: ({"weight": fresh}, step_of(fresh)))
        >>> result[0].what, result[0].tensor
        ('not-restored', 'weight')
    """
    unseen = dict[str, str]()

    def states_of(step: StepFunction, returned: Any) -> StateTexts:
        objects = {**_objects_of(step, returned), "generators": generator_states()}
        return snapshot(objects, unseen)

    def states_after(step: StepFunction) -> StateTexts:
        for _ in range(steps - 1):
            step()
        return states_of(step, step())

    undrawn = snapshot({"generators": generator_states()}, unseen)
    before = states_of(step, step())
    saved = save()
    later = states_after(step)
    for path, text in undrawn.items():
        if later[path] == text:  # a generator that the steps do not draw from changes nothing
            del before[path], later[path]
    # The random generators of a new process differ, so a load must set them.
    torch.rand(7), np.random.rand(7), random.random()
    returned, fresh_step = load(saved)
    lost, lines = compare(before, states_of(fresh_step, returned), "after the load")
    when = f"{plural(steps, 'step')} after the load"
    differing_later, lines_later = compare(later, states_after(fresh_step), when)
    if not lost or not differing_later:
        lines += lines_later
    what = "not-restored" if lost else "lost-elsewhere"
    # A state that the next step computes anew, such as a stored loss, changes nothing.
    kinds = [kind for kind in lost if kind in differing_later]
    if differing_later and not kinds:
        kinds = lost or differing_later
    words = "every state has the bits of the run that went on; steps= crosses an epoch"
    return Readings([measured(what, kind) for kind in kinds], lines, words, unseen)


def _objects_of(step: StepFunction, returned: Any) -> Objects:
    """Return the objects that a step returned, or what it holds beside its loss: variables around a
    function, attributes of a method's object.
    """
    if isinstance(returned, Mapping):
        return returned
    contents = vars(getattr(step, "__self__", step))
    if isinstance(step, FunctionType):
        contents = {}
        for name, cell in zip(step.__code__.co_freevars, step.__closure__ or (), strict=True):
            with suppress(ValueError):  # of a variable that has no value yet
                contents[name] = cell.cell_contents
    return {**contents, "loss": returned}


# ── two states ────────────────────────────────────────────────────────────────────────────────────


def compare(before: StateTexts, now: StateTexts, when: str) -> tuple[list[str], list[str]]:
    """Return the kinds of states that differ or are missing, of objects that are there, and lines of what
    was saved and what is there.
    """
    kinds = dict[str, list[str]]()
    number = len(before)
    there = {path.partition(".")[0] for path in now}
    for path, text in before.items():
        if path.partition(".")[0] in there and text != now.get(path):
            kinds.setdefault(_kind_of(path)[0], []).append(path)
            number -= 1
    lines = [f"{when}: {number} of {len(before)} states have the same bits"]
    for kind, (path, *others) in kinds.items():
        name = _kind_of(path)[1]
        text = f"{before[path]} was saved, {now.get(path, 'nothing')} is there {when}"
        if name:
            text = f"{plural(1 + len(others), 'state')}, {name}: {text}"
        lines.append(f"{kind}: {text}")
    return list(kinds), lines


def _kind_of(path: str) -> tuple[str, str]:
    """Return the kind of a state and its name there. An optimizer's states are kinds of their own."""
    owner, _, name = path.partition(".")
    match = re.fullmatch(r"((?:state|param_groups)\.[^.]+)\.([^.]+)(.*)", name)
    if match is None:
        return owner, name
    place, state, rest = match.groups()
    return f"{owner}.{state}", place + rest


# ── the state of a loop ───────────────────────────────────────────────────────────────────────────


def snapshot(objects: Objects, unseen: dict[str, str]) -> StateTexts:
    """Return each state of a loop's objects as a text. All ranks make the call.

    Fill ``unseen`` with the kinds of states that cannot be read. An object that is ``None`` has none.
    """
    states = {}
    for owner, root in objects.items():
        leaves = [] if root is None else _leaves(root, owner)
        for path, value in leaves:
            text = _text_of(value)
            if text:
                states[path] = text
            else:
                kind, name = _kind_of(path)
                reason = f"{name} {type(value).__name__} has no state_dict()".lstrip()
                unseen.setdefault(kind, reason)
    return states


def _text_of(value: Any) -> str:
    """Return a text that says the value; empty if it cannot be read."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        x = whole(value.detach())
        return f"{dtype_name(x.dtype)} of norm {x.double().norm():.6g} #{fingerprint(x):x}"
    if isinstance(value, (int, float)):  # 1 and 1.0 are equal
        return f"{float(value)!r}".removesuffix(".0")
    if isinstance(value, (*PLAIN, Tensor, list, tuple, dict)):
        digest = hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
        return f"{str(value)[:40]} #{digest}"
    return ""


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each tensor, plain value, long list of plain values, and
    unreadable object.
    """
    if isinstance(value, nn.Module):  # its state_dict lacks buffers that are not persistent
        value = {**dict(value.named_buffers()), **value.state_dict()}
    elif hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.tensor(value)
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    items: Mapping[Any, Any] = {}
    if isinstance(value, Mapping):
        items = value
    elif isinstance(value, (list, tuple)):
        is_long = len(value) > _LONG and all(isinstance(x, PLAIN) for x in value)
        if not is_long:
            items = dict(enumerate(value))
    for key, item in items.items():
        yield from _leaves(item, f"{path}.{bare_name(str(key))}")
    if not items:
        yield path, value
