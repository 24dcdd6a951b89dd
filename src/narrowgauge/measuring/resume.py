"""Check that a resumed run is the same run, for any loop.

Compare the saved state with the state of fresh objects after the load. Then both take the steps
after the checkpoint. Tensors are compared by fingerprints of their bits, which do not depend on
sharding. A certificate holds the fingerprints of a checkpoint, for a resume in another process.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import fingerprints_whole_and_own
from narrowgauge.errors import RecipeError
from narrowgauge.measuring.adapters import name_without_adapters
from narrowgauge.measuring.reading import Reading, Readings, measured
from narrowgauge.numerics.dtensor import whole
from narrowgauge.runs.atomic_io import load_json, read_bytes, write_whole
from narrowgauge.runs.finding import counted
from narrowgauge.spec.formats import dtype_name

Objects = Mapping[str, Any]
Step = Callable[[], Any]
Entry = dict[str, Any]
"""``bits``, ``number`` and ``shown`` of a state."""
PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LONG = 16
"""A list of more plain values than this is one state, by its hash."""
CAUSES = (
    "param_groups|lr|rate|sched", "step|epoch|position|iteration", "scale", "generator|rng",
    "batch|data|token|loader|sampler", r"state\.", "master",
)  # fmt: skip
"""Words in the names of states, causes first. Others, such as weights, are last."""


class Difference(NamedTuple):
    """A kind of state that differs.

    Args:
        kind: an object's name, with the state's for an optimizer.
        value, expected: number there and number saved, of the first state; ``None`` if it has none.
        text: what was saved, and what is there.
        there: whether anything is there.
    """

    kind: str
    value: float | None
    expected: float | None
    text: str
    there: bool = True


def check_resume(
    step: Step,
    save: Callable[[], Any],
    load: Callable[[Any], Any],
    *,
    steps: int = 1,
    resumes: int = 1,
) -> Readings:
    """Prove that a resumed loop is the same run: restore in fresh objects, and repeat the steps
    after the checkpoint.

    All ranks make the call. For a resume in another job, or on other ranks, use
    ``recorder.saved(path)``.

    Args:
        step: takes the loop's next step and returns the loop's objects by name: modules,
            optimizers, tensors, numbers, and anything with a ``state_dict()``, in dicts and lists.
            Other objects are in ``unseen``. A step that returns something else, such as its loss,
            is compared by what it holds: variables around the function, attributes of the method's
            object.
        save: writes a checkpoint, and returns the argument of ``load``.
        load: rebuilds everything from the checkpoint. It returns the fresh objects by the same
            names (``None`` if the step returns none), and their ``step``; for more than one resume
            also their ``save``. An object that is ``None`` until the next step is not compared.
        steps: repeated after each resume. Take enough to cross an epoch.
        resumes: 2 saves the resumed run too, and resumes it again: the place in an epoch is often
            lost then.
    Returns:
        A reading for each kind of state that differs, causes first: rate, counters, loss scale,
        generators, batch, states, weights. ``unseen`` names states that differ after the load in
        what ``step`` holds and does not return.
    Raises:
        RecipeError: ``load`` returns no step.

    Example:
        >>> import narrowgauge as ng
        >>> weight, fresh = torch.zeros(2), torch.zeros(2)
        >>> def step_of(weight):
        ...     return lambda: {"weight": weight.add_(1)}
        >>> result = ng.check_resume(step_of(weight), lambda: None, lambda saved: ({"weight": fresh}, step_of(fresh)))
        >>> result.lines[-1]
        'weight: float32 of norm 1.41421 was saved, float32 of norm 0 is there after the load'
    """
    unseen = dict[str, str]()
    lines = list[str]()
    undrawn = generators()
    returned = _objects_of(step, step())
    before = snapshot(returned, unseen)
    held = snapshot(_not_returned(step, returned), {})
    saved = save()
    states = generators()
    after = [snapshot(_last_of(step, steps), unseen) for _ in range(resumes)]
    # A generator that the steps do not draw from changes nothing.
    drawn = differing(undrawn, generators())
    before |= _some_of(states, drawn)
    found = list[Difference]()
    for number, expected in enumerate(after, 1):
        # The random generators of a new process differ, so a load must set them.
        torch.rand(7), np.random.rand(7), random.random()
        objects, fresh_step, *fresh_save = _loaded(load(saved))
        before = _set_in(objects, before)
        when = ("after the load", f"after load {number}")[number > 1]
        found = differences(before, snapshot(objects, unseen) | generators(), when, lines)
        if not found:
            if number == 1:
                unseen |= _differing_held(held, _not_returned(fresh_step, objects))
            now = snapshot(_last_of(fresh_step, steps), unseen)
            before = now
            if number < len(after):
                saved = fresh_save[0]()
                states = generators()
                before = now | _some_of(states, drawn)
            found = differences(expected, now, f"{counted(steps, 'step')} {when}", lines)
            if found:
                lines.append("The load restored all that is returned. Look at what is not.")
        if found:
            break
    words = "every state has the bits of the run that went on; steps= crosses an epoch"
    return Readings(_readings(found), lines, words, unseen)


def _readings(found: list[Difference]) -> Iterator[Reading]:
    for difference in found:
        yield measured("not-restored", difference.kind, difference.value, difference.expected)


def _some_of(entries: Mapping[str, Entry], names: list[str]) -> dict[str, Entry]:
    return {name: entries[name] for name in names}


def _loaded(result: Any) -> tuple[Any, ...]:
    """Return what a load returned: objects by name, a step, and perhaps a save."""
    if not isinstance(result, tuple) or len(result) < 2 or not callable(result[1]):
        raise RecipeError(
            "Cannot compare the resumed run because load returned no step.",
            "Return (objects, step), and save for resumes=2.",
        )
    return _objects_of(result[1], result[0]), *result[1:]


def _differing_held(held: Mapping[str, Entry], fresh: Objects) -> dict[str, str]:
    """Return why states differ that a step holds and does not return, by kind."""
    reasons = {}
    for difference in differences(held, snapshot(fresh, {}), "after the load", []):
        if difference.there:
            reasons[difference.kind] = f"not returned by the step, and {difference.text}"
    return reasons


def _last_of(step: Step, steps: int) -> Objects:
    for _ in range(steps - 1):
        step()
    return _objects_of(step, step())


def _objects_of(step: Step, returned: Any) -> Objects:
    """Return the objects that a step returned, or what it holds beside its loss."""
    if isinstance(returned, Mapping):
        return returned
    held = _held(step)
    if returned is not None:
        held["loss"] = returned
    return held


def _set_in(objects: Objects, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries of objects that are there, and of the generators."""
    there = {}
    for key, entry in entries.items():
        name = key.partition("|")[0]
        if name == "generators" or objects.get(name) is not None:
            there[key] = entry
    return there


def _held(step: Step) -> dict[str, Any]:
    """Return what a step holds: variables around a function, attributes of a method's object.

    Arrays are left out: they may be the data, mapped from a file.
    """
    attributes: dict[str, Any] = getattr(getattr(step, "__self__", step), "__dict__", {})
    if isinstance(step, FunctionType):
        attributes = {}
        for name, cell in zip(step.__code__.co_freevars, step.__closure__ or (), strict=True):
            if cell != CellType():
                attributes[name] = cell.cell_contents
    held = {}
    for name, x in attributes.items():
        if not isinstance(x, np.ndarray):
            held[name] = x
    return held


def _not_returned(step: Step, returned: Objects) -> Objects:
    """Return what a step holds and does not return."""
    ids = set(map(id, returned.values()))
    unknown = {}
    for name, x in _held(step).items():
        is_returned = name in returned or (id(x) in ids and not isinstance(x, PLAIN))
        if x is not None and not is_returned:
            unknown[name] = x
    return unknown


def differing(before: Mapping[str, Entry], now: Mapping[str, Entry]) -> list[str]:
    """Return the names of states that have other bits now, or are missing."""
    return [name for name in before if before[name]["bits"] != now.get(name, _MISSING)["bits"]]


def differences(
    before: Mapping[str, Entry], now: Mapping[str, Entry], when: str, lines: list[str]
) -> list[Difference]:
    """Return a difference for each kind of state, causes first.

    Add lines: the number of equal states, and the differences.
    """
    kinds = dict[str, list[str]]()
    names = differing(before, now)
    for name in sorted(names, key=_rank):
        kinds.setdefault(name.split("|")[1], []).append(name)
    equal = len(before) - len(names)
    lines.append(f"{when}: {equal} of {len(before)} states have the same bits")
    results = []
    for kind, group in kinds.items():
        entry = before[group[0]]
        loaded = now.get(group[0], _MISSING)
        first = group[0].split("|", 2)[2]
        text = f"{entry['shown']} was saved, {loaded['shown']} is there {when}"
        if first:
            text = f"{counted(len(group), 'state')}, {first}: {text}"
        lines.append(f"{kind}: {text}")
        is_there = loaded is not _MISSING
        results.append(Difference(kind, loaded["number"], entry["number"], text, is_there))
    return results


def _rank(name: str) -> int:
    _, kind, state = name.lower().split("|", 2)
    text = kind
    if "." in kind:
        text = f"{state} {kind.rpartition('.')[2]}"
    for place, words in enumerate(CAUSES):
        if re.search(words, text):
            return place
    return len(CAUSES)


# ── the state of a loop ───────────────────────────────────────────────────────────────────────────


def snapshot(objects: Objects, unseen: dict[str, str]) -> dict[str, Entry]:
    """Return an entry for each state of a loop's objects, as ``OBJECT|KIND|NAME``.

    All ranks make the call.

    Fill ``unseen`` with the kinds of states that cannot be read.
    """
    states = {}
    for key, value in objects.items():
        for kind, name, x in _states_of(key, value):
            states[f"{key}|{kind}|{name}"] = x
    tensors = {}
    for key, x in states.items():
        if isinstance(x, Tensor) and x.layout is torch.strided:
            tensors[key] = x
    bits, _ = fingerprints_whole_and_own(tensors)
    entries = {}
    for key, value in states.items():
        _, kind, name = key.split("|", 2)
        if key in tensors:
            norm = math.sqrt(float(whole(value.detach().double().square().sum())))
            dtype = dtype_name(value.dtype)
            entries[key] = _entry(f"{dtype} {bits[key]}", norm, f"{dtype} of norm {norm:.6g}")
        elif isinstance(value, (int, float)):  # 1 and 1.0 are equal
            entries[key] = _entry(repr(float(value)), float(value), repr(value))
        elif isinstance(value, (*PLAIN, Tensor, list)):
            digest = hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
            entries[key] = _entry(digest, None, repr(value)[:60])
        else:
            unseen.setdefault(kind, f"{name} {type(value).__name__} has no state_dict()".lstrip())
    return entries


def _entry(bits: str, number: float | None, shown: str) -> Entry:
    return {"bits": bits, "number": number, "shown": shown}


_MISSING = _entry("", None, "nothing")


def _states_of(key: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield kind, name and value of each state of an object.

    An optimizer's states are kinds of their own.
    """
    is_optimizer = isinstance(value, torch.optim.Optimizer)
    for name, item in _leaves(value):
        place = name.split(".")
        if is_optimizer and len(place) > 2:  # state.0.exp_avg, param_groups.0.lr
            yield f"{key}.{place[2]}", ".".join((*place[:2], *place[3:])), item
        else:
            yield key, name_without_adapters(name), item


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each tensor, plain value, long list of plain values, and
    unreadable object.
    """
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        value = value.tolist() if value.dtype.kind not in "biuf" else torch.tensor(value)
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, torch.Generator):
        yield name, value.get_state()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        kinds = set(map(type, value))
        if len(value) > _LONG and kinds <= {*PLAIN, bool}:
            yield name, list(value)
        else:
            yield from _leaves(dict(enumerate(value)), name)
    else:
        yield name, value


def generators() -> dict[str, Entry]:
    """Return entries for the random generators of this process."""
    states: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes()}
    numpy_state: Any = np.random.get_state()
    states["numpy"] = numpy_state[1:3]
    states["python"] = random.getstate()[1]
    if torch.cuda.is_initialized():
        states["cuda"] = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    entries = {}
    for name, state in states.items():
        digest = hashlib.blake2b(pickle.dumps(state), digest_size=8).hexdigest()
        entries[f"generators|generators|{name}"] = _entry(digest, None, f"state {digest}")
    return entries


# ── the certificate of a checkpoint ───────────────────────────────────────────────────────────────


class Certificate:
    """Write hashes of a loop's states beside a checkpoint, and compare the loop with them after the
    load. All ranks make each call.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._objects = {"weights": model, "optimizer": optimizer}
        self._undrawn = generators()

    def write(self, path: str | Path, objects: Objects) -> None:
        """Write ``PATH.certificate.json``."""
        entries = snapshot({**self._objects, **objects}, {})
        now = generators()
        # A generator that the loop does not draw from changes nothing.
        entries |= _some_of(now, differing(self._undrawn, now))
        if all_ranks().is_first:
            write_whole(_file(path), json.dumps(entries).encode())

    def differences(self, path: str | Path, objects: Objects) -> list[Difference]:
        """Return the kinds of state that are not as they were saved, causes first."""
        file = _file(path)
        written = all_ranks().of_first(lambda: read_bytes(file))
        if written is None:
            return [Difference("", None, None, f"nothing was compared, because {file} is gone")]
        objects = {**self._objects, **objects}
        saved = load_json(written)
        before = _set_in(objects, saved)
        return differences(before, snapshot(objects, {}) | generators(), "after the load", [])


def _file(path: str | Path) -> Path:
    return Path(f"{Path(path)}.certificate.json")
