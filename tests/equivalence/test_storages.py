"""Every way to hold a model's tensors gives the bits of the plain loop, in every storage.

Gradients are given: what a forward pass would do with them is another question. A *way* changes who holds weights, gradients
and states, and nothing else.
"""

from __future__ import annotations

import copy
import functools
import io
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from equivalence.ways import HALF, STEPS, Training, fingerprint
from narrowgauge.spec.storages import STORAGES

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def start(storage: str, **options: Any) -> Training:
    """Return a small model with a matrix, a stack of filters and vectors, and its optimizer of two groups."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"filters": nn.Conv2d(3, 4, 3), "norm": nn.LayerNorm(10), "out": nn.Linear(10, 6)}
    ).to(getattr(torch, STORAGES[storage].visible))
    named = list(model.named_parameters())
    groups = [{"params": named[:3]}, {"params": named[3:], "weight_decay": 0.0}]
    options = {"max_grad_norm": 3.0, "audit_every": 2, "compile": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # control storages warn of lost updates
        return Training(
            model, ng.AdamW(groups, lr=1e-2, weight_decay=0.1, storage=storage, **options)
        )


def gradient(p: Tensor, step: int) -> Tensor:
    """Draw the gradient of a parameter, in its format."""
    generator = torch.Generator().manual_seed(1000 * step + p.numel())
    return torch.randn(p.shape, generator=generator).to(p.dtype)


def hand_over(p: Tensor, value: Tensor) -> None:
    """Give a parameter its gradient, as a backward pass does."""
    p.grad = value


def train(
    training: Training,
    steps: Iterable[int] = range(STEPS),
    give: Callable[[Tensor, Tensor], None] = hand_over,
) -> Training:
    """Take optimizer steps along given gradients, which ``give`` hands to the parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in steps:
            for p in training.model.parameters():
                give(p, gradient(p, step))
            training.optimizer.step()
            training.optimizer.zero_grad()
    return training


@functools.cache
def plain(storage: str) -> dict[str, str]:
    return fingerprint(train(start(storage)))


def moved(storage: str, move: Callable[[Training], Training]) -> dict[str, str]:
    """Go on with what ``move`` makes of a training after half of the steps."""
    return fingerprint(train(move(train(start(storage), range(HALF))), range(HALF, STEPS)))


def deep_copied(storage: str) -> dict[str, str]:
    return moved(storage, copy.deepcopy)


def pickled(storage: str) -> dict[str, str]:
    def move(training: Training) -> Training:
        file = io.BytesIO()
        torch.save(tuple(training), file)
        file.seek(0)
        return Training(*torch.load(file, weights_only=False))

    return moved(storage, move)


def copied_before_the_first_step(storage: str) -> dict[str, str]:
    return fingerprint(train(copy.deepcopy(start(storage))))


def in_float32(storage: str) -> dict[str, str]:
    """Let autograd's gradients be float32 for 16-bit weights."""
    training = start(storage)
    for p in training.model.parameters():
        p.grad_dtype = torch.float32

    def give(p: Tensor, value: Tensor) -> None:
        p.grad = value.float()

    return fingerprint(train(training, give=give))


def as_main_grad(storage: str) -> dict[str, str]:
    """Hand gradients over as Megatron does."""

    def give(p: Tensor, value: Tensor) -> None:
        p.main_grad = value.float()  # type: ignore[attr-defined]

    return fingerprint(train(start(storage), give=give))


def channels_last(storage: str) -> dict[str, str]:
    training = start(storage)
    training.model.to(memory_format=torch.channels_last)
    return fingerprint(train(training))


def moved_to_a_device(storage: str) -> dict[str, str]:
    """Find states of the second group made for another device, and those of the first one missing, in the first step."""
    training = start(storage)
    p = training.optimizer.param_groups[1]["params"][0]
    training.optimizer.make_missing(training.optimizer.param_groups[1], [p])
    state = training.optimizer.state_of(p)
    assert state is not None
    state.made_for = (*state.made_for[:2], torch.device("meta"))
    return fingerprint(train(training))


WAYS = [
    deep_copied, pickled, copied_before_the_first_step, in_float32, as_main_grad, channels_last, moved_to_a_device,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_storage(way: Callable[[str], dict[str, str]]) -> None:
    assert [storage for storage in STORAGES if way(storage) != plain(storage)] == []


@pytest.mark.parametrize("is_stepped", [False, True])
@pytest.mark.parametrize("how", ["keep_float32", "frozen until later"])
def test_a_copy_rounds_no_weight(how: str, is_stepped: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(how == "keep_float32")
    keeps = {"keep_float32": lambda name, p: p.ndim < 2} if how == "keep_float32" else {}
    with pytest.warns(UserWarning, match="Rounded"):
        optimizer = ng.AdamW(model.parameters(), lr=1e-3, **keeps)
    model.requires_grad_(True)
    if is_stepped:
        train(Training(model, optimizer), range(1))
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
    copied, _ = copy.deepcopy((model, optimizer))
    for p, q in zip(model.parameters(), copied.parameters(), strict=True):
        assert p.dtype is q.dtype and torch.equal(p, q)
