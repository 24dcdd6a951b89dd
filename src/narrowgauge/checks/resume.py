"""Check that a resumed run is the same run, for any loop.

Compare the saved state with the state of fresh objects after the load. Then both take the step after the checkpoint.
Tensors are compared by fingerprints of their bits and of their values. Fingerprints do not depend on sharding, so
the second part may run on another number of ranks.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, Readings
from narrowgauge.checks.set_up import inner_name
from narrowgauge.checks.step_samples import stored_by
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import fingerprints_whole_and_own
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.optim.optimizer import Optimizer

Objects = Mapping[str, Any]
Step = Callable[[], Objects]
Entry = dict[str, Any]
BITS, VALUE, NOT_RESTORED = "same bits", "same value", "not restored"


def check_resume(
    step: Step | None,
    save: Callable[[], Any],
    load: Callable[[Any], tuple[Objects, Step]] | None,
    *,
    record: str | Path | None = None,
) -> Readings:
    """Prove that a resumed loop is the same run: restore in fresh objects, and repeat the step after the checkpoint.

    All ranks make the call. Another number of ranks takes two calls. One job passes ``load=None`` and a ``record`` to write.
    The other passes ``step=None`` and the same ``record``; its ``save()`` says where the checkpoint is.

    Args:
        step: takes the loop's next step and returns the loop's objects by name: modules, optimizers, tensors, numbers, and
            anything with a ``state_dict()``.
        save: writes a checkpoint, and returns the argument of ``load``.
        load: rebuilds everything from the checkpoint, and returns the fresh objects by the same names, and their ``step``.
        record: the file that carries the saved state to another job.
    Returns:
        A reading for each name that is not restored. Its lines say of each kind: same bits, same value, or not restored.
    Raises:
        RecipeError: two jobs without a record.

    Example:
        >>> import copy, narrowgauge as ng
        >>> def loop(saved=None):
        ...     torch.manual_seed(0)
        ...     model = nn.Linear(4, 4)
        ...     optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ...     objects = {"model": model, "optimizer": optimizer}
        ...     if saved is not None:
        ...         model.load_state_dict(saved)  # and not the optimizer
        ...     def step():
        ...         model(torch.ones(2, 4)).square().sum().backward()
        ...         optimizer.step(), optimizer.zero_grad()
        ...         return objects
        ...     return objects, step
        >>> objects, step = loop()
        >>> result = ng.check_resume(step, lambda: copy.deepcopy(objects["model"].state_dict()), loop)
        >>> [reading.tensor for reading in result][:3]
        ['optimizer.step', 'optimizer.exp_avg', 'optimizer.exp_avg_sq']
    """
    ranks = all_ranks()
    if record is None and (load is None or step is None):
        raise RecipeError("Cannot compare two jobs because no record was named.", "Pass record=PATH to both.")
    file = None if record is None else Path(record)
    if step is not None:
        before = snapshot(step())
        saved = save()
        generators = _generators()
        after = snapshot(step())
        if file is not None and ranks.is_first:
            file.write_text(json.dumps({"held": before | generators, "after": after}), encoding="utf-8")
        before |= generators
        if load is None:
            return Readings([], [f"{len(before)} tensors and numbers recorded in {record}"])
    else:
        assert file is not None
        recorded = ranks.of_first(lambda: json.loads(file.read_text(encoding="utf-8")))
        before, after, saved = recorded["held"], recorded["after"], save()
    # The random generators of a new process differ, so a load must set them.
    torch.rand(7), np.random.rand(7), random.random()
    assert load is not None
    objects, fresh_step = load(saved)
    loaded = snapshot(objects)
    restored = _generators()
    if step is not None:
        loaded |= restored
    else:  # each rank has its own
        before = {name: entry for name, entry in before.items() if name not in restored}
    kinds = {name: name.partition("|")[0].partition(".")[0].removesuffix(" buffers") for name in before}
    before = {name: entry for name, entry in before.items() if kinds[name] in {*objects, "generators"}}
    readings, lines = _differences(before, loaded, "after the load")
    again = snapshot(fresh_step())
    if not readings:
        readings, more = _differences(after, again, "after one step more")
        lines += more
    return Readings(readings, lines, "every state has the bits of the run that went on")


def _differences(before: Mapping[str, Entry], now: Mapping[str, Entry], when: str) -> tuple[list[Reading], list[str]]:
    """Return a reading for each kind of state that is not restored, and a line with the counts."""
    verdicts: dict[str, dict[str, list[str]]] = {}
    for name, entry in before.items():
        (kind, _, rest), loaded = name.partition("|"), now.get(name)
        verdict = NOT_RESTORED
        if loaded is not None and entry["value"] == loaded["value"]:
            verdict = BITS if entry["bits"] == loaded["bits"] else VALUE
        verdicts.setdefault(kind, {}).setdefault(verdict, []).append(rest)
    readings = []
    for kind, groups in verdicts.items():
        if names := groups.get(NOT_RESTORED):
            name = f"{kind}|{names[0]}"
            entry, loaded = before[name], now.get(name)
            value, expected = (loaded or {}).get("number"), entry.get("number")
            shown = f"{entry['shown']} was saved, {loaded['shown'] if loaded else 'nothing'} is there {when}"
            count = f"{len(names)} of {sum(map(len, groups.values()))}: " if names[0] else ""
            message = f"{count}{names[0]}{': ' if names[0] else ''}{shown}."
            readings.append(KINDS["not-restored"].reading(kind, value, expected, message=message))
    words = [
        f"{kind} {', '.join(f'{v} ({len(n)})' if n[0] else v for v, n in groups.items())}"
        for kind, groups in verdicts.items()
    ]
    return readings, [f"{when}: {'; '.join(words)}"]


# ── the state of a loop ─────────────────────────────────────────────────────────────────────────────────────────────────


def snapshot(objects: Objects) -> dict[str, Entry]:
    """Return an entry for each state of a loop's objects, as ``KIND|NAME``. All ranks make the call."""
    names = {
        id(p): inner_name(n) for o in objects.values() if isinstance(o, nn.Module) for n, p in o.named_parameters()
    }
    states = {f"{kind}|{name}": value for key, o in objects.items() for kind, name, value in _states_of(key, o, names)}
    tensors = {
        key: value for key, value in states.items() if isinstance(value, Tensor) and value.layout is torch.strided
    }
    bits, _ = fingerprints_whole_and_own(tensors)
    wide = {k: t.double() if t.is_floating_point() else t.long() for k, t in tensors.items()}
    values, _ = fingerprints_whole_and_own(wide)
    entries: dict[str, Entry] = {}
    for key, value in states.items():
        if key in tensors:
            total: Any = value.detach().double().square().sum()
            norm = math.sqrt(float(total.full_tensor() if is_sharded(total) else total))
            dtype = str(value.dtype).removeprefix("torch.")
            entries[key] = _entry(f"{dtype} {bits[key]}", str(values[key]), norm, f"{dtype} of norm {norm:.6g}")
        else:
            number = float(value) if isinstance(value, (int, float)) else None
            entries[key] = _entry(repr(value), repr(value if number is None else number), number, repr(value)[:60])
    return entries


def _entry(bits: str, value: str, number: float | None, shown: str) -> Entry:
    return {"bits": bits, "value": value, "number": number, "shown": shown}


def _states_of(key: str, value: Any, names: Mapping[int, str]) -> Iterator[tuple[str, str, Any]]:
    """Yield kind, name and value of each state of an object."""
    if isinstance(value, nn.Module):
        yield from ((key, inner_name(name), p.detach()) for name, p in value.named_parameters())
        yield from ((f"{key} buffers", inner_name(name), b) for name, b in value.named_buffers())
    elif isinstance(value, torch.optim.Optimizer):
        yield from _optimizer_states(key, value, names)
    elif isinstance(value, Tensor):
        yield key, "", value.detach()
    elif hasattr(value, "state_dict"):
        yield from ((key, name, item) for name, item in _leaves(value.state_dict()))
    else:
        yield from ((key, name, item) for name, item in _leaves(value))


def _optimizer_states(
    key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[str, str, Any]]:
    for index, group in enumerate(optimizer.param_groups):
        for option in ("lr", "weight_decay"):
            if option in group:
                yield f"{key}.{option}", f"group {index}", float(group[option])
        for place, p in enumerate(group["params"]):
            name = names.get(id(p), f"group {index}, parameter {place}")
            if isinstance(optimizer, Optimizer):
                yield f"{key}.step", name, optimizer.num_steps(p)
            for state_name, state in stored_by(optimizer, p).items():
                if isinstance(state, Tensor) and state.numel() == 1:
                    state = float(state)
                if isinstance(state, (Tensor, int, float)):
                    yield f"{key}.{state_name}", name, state
    if isinstance(optimizer, Optimizer) and optimizer.loss_scaler is not None:
        yield f"{key}.loss scale", "", float(optimizer.loss_scaler.scale_tensor)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)) and len(value) <= 16:
        for place, item in enumerate(value):
            yield from _leaves(item, f"{name}.{place}" if name else str(place))
    elif isinstance(value, np.ndarray):
        yield name, torch.from_numpy(np.ascontiguousarray(value))
    elif value is None or isinstance(value, (Tensor, int, float, str, bool)):
        yield name, value


def _generators() -> dict[str, Entry]:
    """Return entries for the random generators of this process."""
    numpy_state: Any = np.random.get_state()
    numpy_words = np.append(numpy_state[1].astype(np.int64), numpy_state[2])  # the position counts, too
    states = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(numpy_words)}
    states |= {f"cuda {k}": torch.cuda.get_rng_state(k) for k in range(torch.cuda.device_count())}
    states["python"] = torch.tensor(random.getstate()[1], dtype=torch.int64)
    prints = {name: str(fingerprint(state)) for name, state in states.items()}
    return {f"generators|{name}": _entry(p, p, None, f"state {p[:8]}") for name, p in prints.items()}
