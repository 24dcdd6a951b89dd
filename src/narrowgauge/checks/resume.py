"""Check that a resumed run is the same run, for any loop.

Compare the saved state with the state of fresh objects after the load. Then both take the steps
after the checkpoint. Tensors are compared by fingerprints of their bits, which do not depend on
sharding.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, Readings
from narrowgauge.distributed.sharding import fingerprints_whole_and_own
from narrowgauge.errors import RecipeError
from narrowgauge.measuring.passes import inner_name
from narrowgauge.numerics.dtensor import whole
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.runs.finding import counted
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.torch_hooks import members_of

Objects = Mapping[str, Any]
Step = Callable[[], Objects]
Entry = dict[str, Any]
PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LONG = 16
"""A list of more plain values than this is one state, by its hash."""
CAUSES = (
    "param_groups|lr|rate|sched", "step|epoch|position|iteration", "scale", "generator|rng",
    "batch|data|token|loader|sampler", r"state\.", "master",
)  # fmt: skip
"""Words in the names of states, causes first. Others, such as weights, are last."""


def check_resume(
    step: Step,
    save: Callable[[], Any],
    load: Callable[[Any], tuple[Any, ...]],
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
            Other objects are in ``unseen``.
        save: writes a checkpoint, and returns the argument of ``load``.
        load: rebuilds everything from the checkpoint. It returns the fresh objects by the same
            names, and their ``step``; for more than one resume also their ``save``. An object that
            is ``None`` until the next step is not compared.
        steps: repeated after each resume. Take enough to cross an epoch.
        resumes: 2 saves the resumed run too, and resumes it again: the place in an epoch is often
            lost then.
    Returns:
        A reading for each kind of state that differs, causes first: rate, counters, loss scale,
        generators, batch, states, weights. Notes name states that differ after the load in what
        ``step`` holds and does not return: variables around the function, attributes of the
        method's object.
    Raises:
        RecipeError: ``load`` returns no objects by name.

    Example:
        >>> import narrowgauge as ng
        >>> weight, fresh = torch.zeros(2), torch.zeros(2)
        >>> def step_of(weight):
        ...     return lambda: {"weight": weight.add_(1)}
        >>> result = ng.check_resume(step_of(weight), lambda: None, lambda saved: ({"weight": fresh}, step_of(fresh)))
        >>> print(result[0].tensor, result[0].advice)
        weight float32 of norm 1.41421 was saved, float32 of norm 0 is there after the load.
    """
    unseen = dict[str, str]()
    lines = list[str]()
    undrawn = generators()
    returned = step()
    before = snapshot(returned, unseen)
    not_returned = snapshot(_not_returned(step, returned), {})
    saved = save()
    states = generators()
    after = [snapshot(_last_of(step, steps), unseen) for _ in range(resumes)]
    # A generator that the steps do not draw from changes nothing.
    drawn = differing(undrawn, generators())
    before |= {name: states[name] for name in drawn}
    notes = []
    for number, expected in enumerate(after, 1):
        # The random generators of a new process differ, so a load must set them.
        torch.rand(7), np.random.rand(7), random.random()
        objects, fresh_step, *fresh_save = load(saved)
        if not isinstance(objects, dict):
            raise RecipeError(
                f"Cannot compare the resumed run because load returned {type(objects).__name__} "
                "first, not the objects by name.",
                "Return (objects, step), and save for resumes=2.",
            )
        for name in list(before):
            key = name.partition("|")[0]
            if key != "generators" and objects.get(key) is None:
                del before[name]
        when = "after the load" if number == 1 else f"after load {number}"
        fresh = snapshot(objects, unseen) | generators()
        readings = differences(before, fresh, when, "", lines)
        if readings:
            return Readings(readings, lines, unseen=unseen)
        if number == 1:
            fresh = snapshot(_not_returned(fresh_step, objects), {})
            not_returned = {name: entry for name, entry in not_returned.items() if name in fresh}
            for reading in differences(not_returned, fresh, when, " Return it too.", []):
                notes.append(replace(reading, severity="note"))
        now = snapshot(_last_of(fresh_step, steps), unseen)
        before = now
        if number < len(after):
            saved = fresh_save[0]()
            states = generators()
            before = now | {name: states[name] for name in drawn}
        hint = " The load restored all that is returned. Look at what is not: the next batch, a counter, a generator."
        readings = differences(expected, now, f"{counted(steps, 'step')} {when}", hint, lines)
        if readings:
            return Readings(readings + notes, lines, unseen=unseen)
    words = f"every state has the bits of the run that went on, for {counted(steps, 'step')}; steps= crosses an epoch"
    return Readings(notes, lines, words, unseen)


def _last_of(step: Step, steps: int) -> Objects:
    for _ in range(steps - 1):
        step()
    return step()


def _not_returned(step: Step, returned: Objects) -> Objects:
    """Return what a step holds and does not return: variables around a function, attributes of a
    method's object.

    Arrays are left out: they may be the data, mapped from a file.
    """
    attributes: dict[str, Any] = getattr(getattr(step, "__self__", step), "__dict__", {})
    if isinstance(step, FunctionType):
        attributes = {}
        for name, cell in zip(step.__code__.co_freevars, step.__closure__ or (), strict=True):
            if cell != CellType():
                attributes[name] = cell.cell_contents
    returned_objects = [x for x in returned.values() if not isinstance(x, PLAIN)]
    ids = set(map(id, [None, *returned_objects]))
    unknown = {}
    for name, x in attributes.items():
        if id(x) not in ids and not isinstance(x, np.ndarray):
            unknown[f"{name} (not returned)"] = x
    return unknown


def differing(before: Mapping[str, Entry], now: Mapping[str, Entry]) -> list[str]:
    """Return the names of states that have other bits now, or are missing."""
    return [name for name in before if before[name]["bits"] != now.get(name, _MISSING)["bits"]]


def differences(
    before: Mapping[str, Entry], now: Mapping[str, Entry], when: str, hint: str, lines: list[str]
) -> list[Reading]:
    """Return a reading for each kind of state that differs, causes first.

    Add a line with the number of equal states.
    """
    members = Counter(name.split("|")[1] for name in before)
    kinds = dict[str, list[str]]()
    names = differing(before, now)
    for name in sorted(names, key=_rank):
        kinds.setdefault(name.split("|")[1], []).append(name)
    readings = []
    for kind, group in kinds.items():
        entry = before[group[0]]
        loaded = now.get(group[0], _MISSING)
        first = group[0].split("|", 2)[2]
        label = f"{len(group)} of {members[kind]}: {first}: " if first else ""
        message = f"{label}{entry['shown']} was saved, {loaded['shown']} is there {when}.{hint}"
        readings.append(
            KINDS["not-restored"].reading(kind, loaded["number"], entry["number"], message=message)
        )
    equal = len(before) - len(names)
    lines.append(f"{when}: {equal} of {len(before)} states have the same bits")
    return readings


def _rank(name: str) -> int:
    _, kind, state = name.lower().split("|", 2)
    text = f"{state} {kind.rpartition('.')[2]}" if "." in kind else kind
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
    of_modules = set()
    for key, value in objects.items():
        for kind, name, x in _states_of(key, value):
            states[f"{key}|{kind}|{name}"] = x
        if isinstance(value, nn.Module):
            of_modules |= set(map(id, value.parameters()))
    for key, value in objects.items():
        if isinstance(value, torch.optim.Optimizer):
            number = sum(id(p) in of_modules for p in members_of(value))
            states[f"{key}|{key}.parameters in the modules|"] = number
    tensors = {}
    for key, x in states.items():
        if isinstance(x, Tensor) and x.layout is torch.strided:
            tensors[key] = x
    bits, _ = fingerprints_whole_and_own(tensors)
    entries = {}
    for key, value in states.items():
        if key in tensors:
            norm = math.sqrt(float(whole(value.detach().double().square().sum())))
            dtype = dtype_name(value.dtype)
            entries[key] = _entry(f"{dtype} {bits[key]}", norm, f"{dtype} of norm {norm:.6g}")
        elif isinstance(value, list):
            digest = hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
            entries[key] = _entry(digest, None, f"{len(value)} values of hash {digest[:8]}")
        elif isinstance(value, (int, float)):  # 1 and 1.0 are equal
            entries[key] = _entry(repr(float(value)), float(value), repr(value)[:60])
        elif isinstance(value, (*PLAIN, Tensor)):
            entries[key] = _entry(repr(value), None, repr(value)[:60])
        else:
            _, kind, name = key.split("|", 2)
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
            yield key, inner_name(name), item


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each tensor, plain value, long list of plain values, and
    unreadable object.
    """
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    value = _plain(value)
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":  # of strings or objects
        value = value.tolist()
    if isinstance(value, torch.Generator):
        yield name, value.get_state()
    elif isinstance(value, np.ndarray):
        yield name, torch.from_numpy(np.ascontiguousarray(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        items = list(map(_plain, items))
        if len(items) > _LONG and all(isinstance(item, PLAIN) for item in items):
            yield name, items
        else:
            yield from _leaves(dict(enumerate(items)), name)
    else:
        yield name, value


def _plain(value: Any) -> Any:
    """Return a number of numpy as one of Python."""
    return value.item() if isinstance(value, np.generic) else value


def generators() -> dict[str, Entry]:
    """Return entries for the random generators of this process."""
    numpy_state: Any = np.random.get_state()
    words = np.append(numpy_state[1].astype(np.int64), numpy_state[2])  # the position counts, too
    states = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(words)}
    for k in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        states[f"cuda {k}"] = torch.cuda.get_rng_state(k)
    states["python"] = torch.tensor(random.getstate()[1], dtype=torch.int64, device="cpu")
    entries = {}
    for name, state in states.items():
        bits = str(fingerprint(state))
        entries[f"generators|generators|{name}"] = _entry(bits, None, f"state {bits[:8]}")
    return entries
