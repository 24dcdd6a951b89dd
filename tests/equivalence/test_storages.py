"""Every way to hold a model's tensors gives the bits of the plain loop, in every storage.

Gradients are given: what a forward pass would do with them is another question. A *way* changes who
holds weights, gradients and states, and nothing else.
"""

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
from narrowgauge.spec.storages import STATE_NAMES, STORAGES
from tensors import gaussian

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def start(storage: str, **options: Any) -> Training:
    """Return a small model with a matrix, a stack of filters and vectors, and its optimizer of two
    groups.
    """
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
    return gaussian(*p.shape, seed=1000 * step + p.numel(), dtype=p.dtype)


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
            take_step(training, step, give)
    return training


def take_step(
    training: Training, step: int, give: Callable[[Tensor, Tensor], None] = hand_over
) -> None:
    for p in training.model.parameters():
        give(p, gradient(p, step))
    training.optimizer.step()
    training.optimizer.zero_grad()


@functools.cache
def plain(storage: str) -> dict[str, str]:
    return fingerprint(train(start(storage)))


def moved(storage: str, move: Callable[[Training], Training]) -> dict[str, str]:
    """Go on with what ``move`` makes of a training before its last step."""
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


def channels_last(storage: str) -> dict[str, str]:
    training = start(storage)
    training.model.to(memory_format=torch.channels_last)
    return fingerprint(train(training))


WAYS = [
    deep_copied, pickled, copied_before_the_first_step, in_float32, channels_last,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_storage(way):
    different = []
    for storage in STORAGES:
        result = way(storage)
        if not result or any(plain(storage)[name] != value for name, value in result.items()):
            different.append(storage)
    assert different == []


def test_exact_is_master_to_the_bit():
    """In each step, and from the random low bits that both begin with."""
    histories = []
    for storage in ("exact", "master"):
        training = start(storage)
        values = []
        for step in range(STEPS):
            train(training, [step])
            for p in training.model.parameters():
                for name in ("weight", *STATE_NAMES):
                    values.append(training.optimizer.stored(p, name))
        histories.append(values)
    assert all(map(torch.equal, *histories))


def mask_of(p: Tensor) -> Tensor:
    return torch.arange(p.numel()).view(p.shape) % 3 > 0


def test_a_mask_in_each_step_leaves_the_other_weights():
    different = []
    for storage in STORAGES:
        training = start(storage)
        unmasked = train(start(storage))
        for step in range(STEPS):
            train(training, [step])
            for p in training.model.parameters():
                p.data.mul_(mask_of(p))
        pairs = zip(training.model.parameters(), unmasked.model.parameters(), strict=True)
        for p, q in pairs:
            mask = mask_of(p)
            values = training.optimizer.stored(p)
            is_same = torch.equal(values[mask], unmasked.optimizer.stored(q)[mask])
            is_zero = not values.to(p.dtype)[~mask].any()  # a tail stays within half an ulp
            if p[~mask].any() or not is_zero or not is_same:
                different.append(storage)
    assert different == []


@pytest.mark.parametrize("decay", [0.9, None])
def test_an_average_is_of_what_is_stored(decay):
    """Without a decay each step counts alike."""
    different = []
    for storage in STORAGES:
        training = start(storage)
        average = ng.AveragedModel(training.model, training.optimizer, decay=decay)
        expected = {}
        for step in range(STEPS):
            train(training, [step])
            average.update_parameters(training.model)
            share = 1 / (step + 1) if decay is None or step == 0 else 1 - decay
            for p in training.model.parameters():
                value = training.optimizer.stored(p).float()
                expected[p] = torch.lerp(expected.get(p, value), value, share)
        pairs = zip(average.module.parameters(), expected.values(), strict=True)
        if fingerprint(training) != plain(storage) or not all(torch.equal(*pair) for pair in pairs):
            different.append(storage)
    assert different == []


@pytest.mark.filterwarnings("ignore:Rounded")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_copy_rounds_no_weight(is_frozen):
    """Of a group in float32, or frozen until the optimizer was made."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    first, second = ({"params": layer.parameters()} for layer in model)
    if is_frozen:
        model[0].requires_grad_(False)
    else:
        first["storage"] = "float32"
    optimizer = ng.AdamW([first, second], lr=1e-3)
    model.requires_grad_(True)
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}
    copied, _ = copy.deepcopy((model, optimizer))
    for p, q in zip(model.parameters(), copied.parameters(), strict=True):
        assert p.dtype is q.dtype and torch.equal(p, q)
