"""Casts of weights: made once while a weight stays what it is, never used for another, and never a change of bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from matmul.scenarios import NARROW, Result, gaussian, make_layer, names, passed, same
from narrowgauge.matmul import cast_cache, layer_matmuls
from narrowgauge.matmul.cast_cache import cached_weights, cast_weight
from narrowgauge.matmul.operand import Operand


class Counter:
    """A cast that says how often it was made."""

    def __init__(self) -> None:
        self.made = 0

    def of(self, weight: Tensor, key: str = "output") -> Tensor:
        def make() -> Operand:
            self.made += 1
            return Operand(weight.detach().clone(), None)

        return cast_weight(weight, (key,), make).data


@pytest.fixture
def counter() -> Iterator[Counter]:
    yield Counter()
    assert cast_cache._CACHE.depth == 0 and not cast_cache._CACHE.weights


def test_outside_of_the_scope_every_cast_is_made(counter: Counter) -> None:
    weight = gaussian(4, 4)
    counter.of(weight)
    counter.of(weight)
    assert counter.made == 2


def test_within_it_each_is_made_once_for_each_use(counter: Counter) -> None:
    one, other = gaussian(4, 4), gaussian(4, 4, seed=1)
    with cached_weights():
        for _ in range(3):
            assert torch.equal(counter.of(one), one) and torch.equal(counter.of(other), other)
            assert torch.equal(counter.of(one, "grad_input"), one)
        assert counter.made == 3
        with cached_weights():
            counter.of(one)
        counter.of(one)
        assert counter.made == 3
    counter.of(one)
    assert counter.made == 4


def test_the_scope_ends_with_an_exception_too(counter: Counter) -> None:
    with pytest.raises(ZeroDivisionError), cached_weights():
        counter.of(gaussian(2, 2))
        raise ZeroDivisionError


def changes() -> dict[str, object]:
    def add(w: Tensor) -> None:
        w.add_(1)

    def one_place(w: Tensor) -> None:
        w[0, 0] = 7

    def copy(w: Tensor) -> None:
        w.copy_(gaussian(4, 4, seed=5))

    def through_a_view(w: Tensor) -> None:
        w.view(-1)[3:5].zero_()

    return {f.__name__: f for f in (add, one_place, copy, through_a_view)}


@pytest.mark.parametrize("change", changes().values(), ids=changes().keys())
def test_a_change_in_place_is_seen(counter: Counter, change) -> None:  # type: ignore[no-untyped-def]
    parameter = nn.Parameter(gaussian(4, 4))
    with cached_weights():
        counter.of(parameter)
        with torch.no_grad():
            change(parameter)
        assert torch.equal(counter.of(parameter), parameter)
        counter.of(parameter)
        assert counter.made == 2


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_s_step_is_seen(counter: Counter, kind: type[torch.optim.Optimizer], foreach: bool) -> None:
    parameter = nn.Parameter(gaussian(4, 4, dtype=torch.float32))
    optimizer = kind([parameter], lr=0.1, foreach=foreach)  # type: ignore[call-arg]
    with cached_weights():
        counter.of(parameter)
        parameter.grad = torch.ones(4, 4)
        optimizer.step()
        assert torch.equal(counter.of(parameter), parameter)
    assert counter.made == 2


def test_a_step_that_writes_through_data_is_seen(counter: Counter) -> None:
    """Old optimizers do, and PyTorch counts no change then: only the end of a step tells."""

    class Plain(torch.optim.Optimizer):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])

    parameter = nn.Parameter(gaussian(4, 4))
    optimizer = Plain([parameter], {"lr": 1.0})
    with cached_weights():
        counter.of(parameter)
        parameter.grad = torch.ones(4, 4).bfloat16()
        optimizer.step()
        assert torch.equal(counter.of(parameter), parameter)


def test_a_weight_where_another_one_lay_is_not_taken_for_it(counter: Counter) -> None:
    """A freed weight's memory, and the address of what describes it, go to the next one of its size."""
    met = set()
    with cached_weights():
        for seed in range(50):
            weight = gaussian(64, 64, seed=seed)
            met.add(weight.data_ptr())
            assert torch.equal(counter.of(weight), weight)
            del weight
    assert counter.made == 50
    assert len(met) < 50, "no address was used twice, so nothing was tested"


def test_views_of_one_storage_are_distinguished(counter: Counter) -> None:
    """By place, shape, strides and dtype: a square weight and its transpose differ in nothing but strides."""
    storage = gaussian(8, 4)
    views = [storage[:4], storage[4:], storage[:4].t(), storage.view(4, 8), storage[:4].view(torch.float16)]
    with cached_weights():
        for view in views:
            assert torch.equal(counter.of(view), view)
        for view in views:
            assert torch.equal(counter.of(view), view)
        # A change of one is a change of all: they share the memory.
        storage[0, 0] = 3.0
        assert torch.equal(counter.of(views[1]), views[1])
    assert counter.made == len(views) + 1


def test_weights_of_inference_mode_are_cast_each_time(counter: Counter) -> None:
    """PyTorch counts none of their changes."""
    with torch.inference_mode():
        weight = gaussian(4, 4)
        with cached_weights():
            counter.of(weight)
            weight.add_(1)
            assert torch.equal(counter.of(weight), weight)


# ── in layers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def micro_batches(row: str, *, cached: bool) -> list[Result]:
    """Two steps of three micro-batches each, with a change of the weight within the scope."""
    layer, linears = make_layer(row)
    found = []
    for step in range(2):
        linears.step = step
        with cached_weights() if cached else contextlib.nullcontext():
            for seed in range(4):
                if seed == 3:
                    with torch.no_grad():
                        layer.weight.mul_(1.5)
                found.append(passed(layer, gaussian(33, 65, seed=seed), gaussian(33, 17, seed=seed + 9)))
    return found


@pytest.mark.parametrize("row", NARROW, **names)
def test_every_row_gives_the_same_bits_with_and_without(row) -> None:  # type: ignore[no-untyped-def]
    for one, other in zip(micro_batches(row.name, cached=True), micro_batches(row.name, cached=False), strict=True):
        assert same(one, other)


@pytest.mark.parametrize(
    ("row", "casts"),
    [
        *((name, 1) for name in ("int8-row", "float8-tensor", "float8-block", "float8-delayed")),
        *((name, 2) for name in ("float8-row", "mxfp8", "nvfp4", "int8-outlier")),
    ],
)
def test_micro_batches_cast_a_weight_once_for_each_of_its_uses(
    row: str, casts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in all where the codes of ``output`` serve ``grad_input``."""
    layer, _ = make_layer(row)
    seen = []
    real = layer_matmuls.cast_matrix

    def counted(x: Tensor, *arguments: object, **options: object) -> Operand:
        seen.append(x.data_ptr() == layer.weight.data_ptr())
        return real(x, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(layer_matmuls, "cast_matrix", counted)
    with cached_weights():
        for seed in range(4):
            passed(layer, gaussian(33, 65, seed=seed), gaussian(33, 17, seed=9))
    assert sum(seen) == casts
    passed(layer, gaussian(33, 65), gaussian(33, 17))
    assert sum(seen) == casts + 2
