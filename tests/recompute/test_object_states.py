"""What tells whether Python objects changed: equal while nothing does, another once something does."""

from __future__ import annotations

import array
import itertools
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from narrowgauge.recompute.object_states import StatePrinter, living, values_of_functions


class Slots:
    """Two attributes without a dict, one of them private."""

    __slots__ = ("__hidden", "unset", "value")

    def __init__(self) -> None:
        self.value, self.__hidden = 1, [1]

    def change(self) -> None:
        self.__hidden.append(2)


class More(Slots):
    """With a dict of its own."""


def numbers() -> Iterator[int]:
    seen = 0
    while True:
        seen += 1
        yield seen


def set_in(value: Any) -> Callable[[], Any]:
    return lambda: value.__setitem__(0, 5)


def advanced(iterator: Any) -> tuple[Any, Callable[[], Any]]:
    return iterator, lambda: next(iterator)


def changing() -> dict[str, tuple[Any, Callable[[], Any]]]:
    """Values, each with what changes it."""
    slots, more, names, counts = Slots(), More(), SimpleNamespace(inner=[{"a": 1}]), Counter("ab")
    generator, rng, state = torch.Generator(), np.random.default_rng(0), random.Random(0)
    weights, floats, tensor = np.zeros(3), array.array("d", [1, 2]), torch.zeros(2)
    queue, chosen, data = deque([1]), {1}, bytearray(b"ab")
    return {
        "slots": (slots, slots.change),
        "slots of a parent": (more, more.change),
        "nested": (names, lambda: names.inner[0].update(a=2)),
        "counter": (counts, lambda: counts.update("a")),
        "torch generator": (generator, lambda: torch.rand(1, generator=generator)),
        "numpy generator": (rng, rng.random),
        "random": (state, state.random),
        "numpy array": (weights, set_in(weights)),
        "array": (floats, set_in(floats)),
        "tensor": (tensor, lambda: tensor.add_(1)),
        "deque": (queue, lambda: queue.append(2)),
        "set": (chosen, lambda: chosen.add(2)),
        "bytes": (data, set_in(data)),
        "range": advanced(iter(range(9))),
        "list": advanced(iter([1, 2])),
        "dict": advanced(iter({1: 2, 3: 4})),
        "enumerate": advanced(enumerate("abc")),
        "zip": advanced(zip([1, 2], [3, 4], strict=True)),
        "map": advanced(map(str, [1, 2])),
        "count": advanced(itertools.count(3)),
        "cycle": advanced(itertools.cycle([1, 2, 3])),
        "chain": advanced(itertools.chain([1, 2], [3])),
        "generator": advanced(numbers()),
        "generator of another": advanced(2 * each for each in numbers()),
    }


@pytest.mark.parametrize("name", changing())
def test_a_change_is_seen_and_asking_changes_nothing(name: str) -> None:
    value, change = changing()[name]
    first, again = StatePrinter()(value), StatePrinter()(value)
    assert first == again
    change()
    assert StatePrinter()(value) != first


@pytest.mark.parametrize("name", [name for name, (value, _) in changing().items() if isinstance(value, Iterator)])
def test_asking_moves_no_iterator(name: str) -> None:
    asked, other = changing()[name][0], changing()[name][0]
    assert next(asked) == next(other)
    StatePrinter()(asked)
    assert next(asked) == next(other)


def test_what_functions_hold_is_followed_through_functions_and_not_into_packages() -> None:
    kept: list[int] = []
    layer = nn.Linear(1, 1)

    def inner(x: Tensor, seen: list[int] = [3]) -> Any:  # noqa: B006
        return kept, layer(x), torch.relu(x), np.sum(seen)

    def outer(x: Tensor) -> Any:
        return [inner(each) for each in x]

    held = list(values_of_functions([outer]))
    assert any(value is kept for _, value in held) and any(value == ([3],) for _, value in held)
    assert not any(place.startswith(("torch", "numpy")) for place, _ in held)
    assert not list(values_of_functions([outer], {id(outer)}))


def test_installed_packages_are_not_followed_unless_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(values_of_functions([pytest.importorskip]))
    assert list(values_of_functions([pytest.importorskip], packages={"_pytest"}))
    # A module of one's own, beside an installed package of the same name.
    installed = ModuleType(__name__.partition(".")[0])
    installed.__file__ = "/lib/site-packages/tests/__init__.py"
    monkeypatch.setitem(sys.modules, installed.__name__, installed)
    assert list(values_of_functions([changing]))


def test_living_objects_are_found_by_their_class_and_its_subclasses() -> None:
    class Kind:
        pass

    class Sub(Kind):
        pass

    one, two = Kind(), Sub()
    assert {id(each) for each in living(Kind)} == {id(one), id(two)}
