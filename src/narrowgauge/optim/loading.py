"""States of ``torch.optim``: what of them a storage takes.

They hold each moment as a tensor like the parameter, under torch's names, and nothing of what a storage keeps beside the
weight. So moments are cut to the storage's codes, and said to be; the weight stays what it is. A state of another rule, or
of another library's codes, is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.optim.rules.elementwise import LION, PLAIN_SGD, SGD
from narrowgauge.optim.rules.matrix import MUON
from narrowgauge.optim.stores import Store

Entry = Mapping[str, Tensor]
_ADVICE = "ng.convert takes states of Adam and AdamW from other libraries and storages; any other begins anew."
# What these do does not depend on how many steps they have taken, and torch does not count them.
_COUNTLESS = {SGD.name, PLAIN_SGD.name, LION.name, MUON.name}
_MOMENTA = {name for rule in (SGD, LION) for name in rule.states}


@dataclass
class Losses:
    """What was cut of a state: storages and states, each with its bits.

    Args:
        seen: ``(storage, state, bits)`` of what did not fit its code.
    """

    seen: dict[tuple[str, str, int], None] = field(default_factory=dict)

    def tell(self) -> None:
        """Warn of it, in one sentence."""
        if self.seen:
            kept = ", ".join(f"{state} to {bits} bits in '{storage}'" for storage, state, bits in self.seen)
            warnings.warn(f"The state that was loaded is torch.optim's, and was cut: {kept}.", stacklevel=5)


def taken_steps(entry: Entry, rule: str) -> int:
    """How many steps a state has taken.

    Raises:
        RecipeError: it does not say, and the rule must know.
    """
    if "step" in entry:
        return int(entry["step"])
    if rule in _COUNTLESS and entry.keys() <= _MOMENTA:
        return int(bool(entry))
    raise RecipeError(f"the state to load holds {sorted(entry)}, and rule '{rule}' needs 'step'.", _ADVICE)


def take_plain(store: Store, entry: Entry, old: Store | None, seed: Tensor, losses: Losses) -> None:
    """Take a parameter's state of ``torch.optim``: moments are cut, stochastically where their code is.

    Args:
        store: a new one; it keeps the weight of ``old``, where that is still what the parameter shows.
        entry: moments by name.
        old: what kept the parameter before.
        seed: 0-d int32, of the cuts.
        losses: what is told of them.
    Raises:
        RecipeError: other names or shapes than the rule's.
    """
    given, wanted = entry.keys() - {"step"}, store.shapes_of_states
    if strange := sorted(given - wanted.keys()) or sorted(wanted.keys() - given):
        what = "which it does not keep" if strange[0] in given else "which is missing"
        raise RecipeError(
            f"the state to load holds {sorted(given)}, and rule '{store.kernel.rule.name}' keeps {sorted(wanted)}: "
            f"'{strange[0]}', {what}.",
            _ADVICE,
        )
    if old is not None:
        _keep_weight(store, old.stored("weight"))
    for name in wanted:
        value = entry[name].to(store.parameter.device)
        if value.shape != store.stored(name).shape or not value.is_floating_point():
            raise RecipeError(
                f"'{name}' to load is {value.dtype} of shape {tuple(value.shape)}, and a parameter's is a float of shape "
                f"{tuple(store.stored(name).shape)}.",
                _ADVICE,
            )
        store.put(name, value.float(), seed)
        if name not in store.extras and not torch.equal(store.stored(name), value.float()):
            losses.seen[store.storage.name, name, store.storage.code(name).bits] = None


def _keep_weight(store: Store, value: Tensor) -> None:
    """Keep a weight where the parameter shows it; elsewhere somebody else has set the parameter, and it stands."""
    shown = store.parameter.detach().clone()
    store.adopt(value)
    moved = store.parameter.detach() != shown
    if bool(moved.any()):
        store.adopt(torch.where(moved, shown.float(), value))


def without_none(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry without what is named and not there.

    ``None`` is torch's buffer of a momentum that is 0; an empty dict stands in a state that a distributed checkpoint had
    flattened for what it did not find.
    """
    return {
        name: torch.tensor(value, dtype=torch.float32) if isinstance(value, int | float) else value
        for name, value in entry.items()
        if value is not None and value != {}
    }
