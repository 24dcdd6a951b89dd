"""Forward passes that leave more behind than their outputs: none is taken again, and the run keeps its bits."""

from __future__ import annotations

import functools
import itertools
import queue
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from narrowgauge.recompute.departures import unchecked
from narrowgauge.recompute.piece_results import EQUAL
from narrowgauge.recompute.side_effects import ABSENT, Before, attributes_as
from narrowgauge.recompute.step_watcher import StepWatcher
from narrowgauge.recompute.task import task
from recompute import audited_loop
from recompute.audited_loop import WIDTH, Loop, next_token


class Around(nn.Module):
    """A block with something done around it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Any:
        return self.block(x)


class Counter(Around):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.block(x) * (1 + 1 / self.calls)


class OwnGenerator(Around):
    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Any:
        return self.block(x) + 0.1 * torch.randn(x.shape, generator=self.generator)


class OwnRandom(OwnGenerator):
    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.generator = random.Random(0)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        return self.block(x) * (1 + self.generator.random())  # type: ignore[attr-defined]


class OwnNumpy(OwnRandom):
    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.generator = np.random.default_rng(0)  # type: ignore[assignment]


class Balance(Around):
    """A bias that is a tensor and no buffer, moved by every pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.bias = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Any:
        self.bias += 0.1 * x.detach().mean((0, 1)).sign()
        return self.block(x) + self.bias


class BalanceData(Balance):
    """The same through ``.data``."""

    def forward(self, x: Tensor) -> Any:
        self.bias.data += 0.1 * x.detach().mean((0, 1)).sign()
        return self.block(x) + self.bias


class Large(Around):
    """A large array."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.counts = np.zeros(50_257)

    def forward(self, x: Tensor) -> Any:
        self.counts[0] += 1
        return self.block(x) * float(1 + 1 / self.counts[0])


class OfNumpy(Around):
    """A bias in an array, which each pass moves."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.bias = np.zeros(WIDTH, np.float32)

    def forward(self, x: Tensor) -> Any:
        self.bias += 0.1
        return self.block(x) + torch.from_numpy(self.bias)


class Deep(Around):
    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.state = {"stats": {"layer": {"seen": [1.0]}}}

    def forward(self, x: Tensor) -> Any:
        self.state["stats"]["layer"]["seen"][0] += 1
        return self.block(x) * (1 + 1 / self.state["stats"]["layer"]["seen"][0])


class History(Around):
    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.seen: dict[str, list[float]] = {"means": []}

    def forward(self, x: Tensor) -> Any:
        self.seen["means"].append(float(x.mean()))
        return self.block(x) * len(self.seen["means"]) ** 0.1


class Slotted:
    """A count in a slot."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Given(Around):
    """Counts in an object that it holds, or that it is given."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.counts = Slotted()

    def forward(self, x: Tensor) -> Any:
        self.counts.calls += 1
        return self.block(x) * (1 + 1 / self.counts.calls)


class Cycling(Around):
    """Takes the next of a few factors in each pass."""

    factors: Callable[[], Any] = staticmethod(lambda: itertools.cycle([1.0, 1.1, 1.2, 1.3, 1.4]))

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.factor = type(self).factors()

    def forward(self, x: Tensor) -> Any:
        return self.block(x) * next(self.factor)


class Counting(Cycling):
    factors = staticmethod(lambda: map(float, itertools.count(1)))


class Generating(Cycling):
    factors = staticmethod(lambda: (1 + 1 / count for count in range(1, 1000)))


class OfList(Cycling):
    factors = staticmethod(lambda: iter([1 + 1 / count for count in range(1, 1000)]))


SEEN = {"passes": 0}


def count_passes() -> int:
    SEEN["passes"] += 1
    return SEEN["passes"]


def through_another() -> float:
    return sum(1 + 1 / count_passes() for _ in range(1))


class Helped(Around):
    """A function that a function calls keeps a count."""

    def forward(self, x: Tensor) -> Any:
        return self.block(x) * through_another()


class Meter:
    """An object that is called, and counts how often."""

    calls_of_all = 0

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1

    def hook(self, module: nn.Module, args: Any) -> Any:
        self.calls += 1
        return (args[0] * (1 + 1 / self.calls),)

    @classmethod
    def count(cls) -> int:
        cls.calls_of_all += 1
        return cls.calls_of_all


class OfClass(Around):
    def forward(self, x: Tensor) -> Any:
        return self.block(x) * (1 + 1 / Meter.count())


class OfModule(Around):
    """A name of another module."""

    def forward(self, x: Tensor) -> Any:
        audited_loop.PASSES = getattr(audited_loop, "PASSES", 0) + 1  # type: ignore[attr-defined]
        return self.block(x) * (1 + 1 / audited_loop.PASSES)  # type: ignore[attr-defined]


def noted(x: Tensor) -> Tensor:
    noted.calls = getattr(noted, "calls", 0) + 1  # type: ignore[attr-defined]
    return x * (1 + 1 / noted.calls)  # type: ignore[attr-defined]


class OfFunction(Around):
    def forward(self, x: Tensor) -> Any:
        return noted(self.block(x))


class OfPartial(Around):
    """What a partial function was given."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.scale = functools.partial(scaled_by, [1.0])

    def forward(self, x: Tensor) -> Any:
        return self.scale(self.block(x))


def scaled_by(factors: list[float], x: Tensor) -> Tensor:
    factors.append(1.1 * factors[-1])
    return x * factors[-1]


def hooked(hook: Callable[[], Callable[..., Any]]) -> Callable[[Loop], None]:
    def plant(loop: Loop) -> None:
        loop.model.blocks[0].register_forward_pre_hook(hook())

    return plant


def in_a_closure() -> Callable[..., Any]:
    counts = [0]

    def hook(module: nn.Module, args: Any) -> Any:
        counts[0] += 1
        return (args[0] * (1 + 1 / counts[0]),)

    return hook


def in_the_backward_pass(loop: Loop) -> None:
    counts = [0]

    def hook(module: nn.Module, arrived: Any, sent: Any) -> Any:
        counts[0] += 1
        return tuple(each * (1 + 1 / counts[0]) for each in arrived)

    loop.model.blocks[0].norm1.register_full_backward_hook(hook)


def given_an_object(loop: Loop) -> None:
    """The model of a loop counts in an object that the loop hands to it."""
    counts, forward = Slotted(), loop.model.forward

    def counted(tokens: Tensor, given: Slotted) -> Tensor:
        given.calls += 1
        return forward(tokens) * (1 + 1 / given.calls)

    loop.model.forward = counted  # type: ignore[method-assign]
    loop.loss = lambda tokens: next_token(loop.model(tokens[:, :-1], counts), tokens) / 2  # type: ignore[method-assign]


LOSSES: list[Tensor] = []


class Auxiliary(Around):
    """Hands a loss to a list, as many mixtures of experts do."""

    def forward(self, x: Tensor) -> Any:
        LOSSES.append(0.01 * x.square().mean())
        return self.block(x)


def with_losses(loop: Loop) -> None:
    def loss(tokens: Tensor) -> Tensor:
        plain = next_token(loop.model(tokens[:, :-1]), tokens) / 2
        total = plain + sum(LOSSES)
        LOSSES.clear()
        return total

    loop.loss = loss  # type: ignore[method-assign]


def with_hooks(loop: Loop) -> None:
    """A user's hooks collect what a penalty needs."""
    for block in loop.model.blocks:
        block.register_forward_hook(lambda module, args, output: LOSSES.append(1e-3 * output.square().mean()))
    with_losses(loop)


def with_queue(loop: Loop) -> None:
    """Losses go where no attribute leads."""
    losses: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
    loop.model.blocks[0].register_forward_hook(lambda module, args, output: losses.put(1e-3 * output.square().mean()))
    loop.loss = lambda tokens: next_token(loop.model(tokens[:, :-1]), tokens) / 2 + losses.get()  # type: ignore[method-assign]


def wrapped(kind: type[Around]) -> Callable[[Loop], None]:
    def plant(loop: Loop) -> None:
        for place, block in enumerate(loop.model.blocks):
            loop.model.blocks[place] = kind(block)
        if kind is Auxiliary:
            with_losses(loop)

    return plant


def run(plant: Callable[[Loop], None], every: int) -> Loop:
    LOSSES.clear()
    SEEN["passes"] = Meter.calls_of_all = audited_loop.PASSES = noted.calls = 0  # type: ignore[attr-defined]
    loop = Loop(every=0)
    plant(loop)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-3, weight_decay=0.1)
    if every:
        loop.watcher = StepWatcher(loop.model, loop.optimizer, every, loop.keep)
    return loop.run(4)


LEFT: dict[str, tuple[Callable[[Loop], None], str]] = {
    "a generator": (wrapped(OwnGenerator), "blocks.0.generator"),
    "Python's generator": (wrapped(OwnRandom), "blocks.0.generator"),
    "NumPy's generator": (wrapped(OwnNumpy), "blocks.0.generator"),
    "a tensor that is no buffer": (wrapped(Balance), "blocks.0.bias"),
    "a tensor that is no buffer, by its data": (wrapped(BalanceData), "blocks.0.bias"),
    "a large array": (wrapped(Large), "blocks.0.counts"),
    "an array": (wrapped(OfNumpy), "blocks.0.bias"),
    "a list deep inside": (wrapped(Deep), "blocks.0.state"),
    "a list in a dict": (wrapped(History), "blocks.0.seen"),
    "losses in a list of the module": (wrapped(Auxiliary), "LOSSES"),
    "a slot": (wrapped(Given), "blocks.0.counts"),
    "an iterator": (wrapped(Cycling), "blocks.0.factor"),
    "an iterator of an iterator": (wrapped(Counting), "blocks.0.factor"),
    "a list's iterator": (wrapped(OfList), "blocks.0.factor"),
    "a generator of values": (wrapped(Generating), "blocks.0.factor"),
    "a function's function": (wrapped(Helped), "SEEN"),
    "a class": (wrapped(OfClass), "Meter.calls_of_all"),
    "a name of another module": (wrapped(OfModule), "audited_loop.PASSES"),
    "a function's attribute": (wrapped(OfFunction), "noted keeps"),
    "a partial function": (wrapped(OfPartial), "a partial function"),
    "a hook's closure": (hooked(in_a_closure), "counts of"),
    "a hook's object": (hooked(lambda: Meter().hook), "Meter.calls"),
    "an object that is called": (hooked(Meter), "Meter.calls"),
    "a hook on the backward pass": (in_the_backward_pass, "hooks on their backward passes"),
    "an object that is given": (given_an_object, "a Slotted that it is given"),
    "what hooks collect": (with_hooks, "LOSSES"),
    "a queue": (with_queue, "elsewhere than in its outputs"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_another_pass_would_change_is_not_taken_again(name: str) -> None:
    plant, said = LEFT[name]
    audited, alone = run(plant, 2), run(plant, 0)
    assert torch.equal(audited.bits(), alone.bits())
    assert not audited.findings()
    found = unchecked(audited.results[4])
    assert said in found["gradient"] and said in found["forward"], found


# ── what is no side effect ────────────────────────────────────────────────────────────────────────────────────────────


class MovingData(Around):
    """A buffer that each pass moves through ``.data``, as codebooks often are."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        self.mean.data.mul_(0.9).add_(0.01)
        return self.block(x - self.mean)


class Moving(Around):
    """A buffer that each pass moves, and uses."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        self.mean.mul_(0.9).add_(0.01)
        return self.block(x - self.mean)


class Checkpointed(Around):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def normed(loop: Loop) -> None:
    for block in loop.model.blocks:
        spectral_norm(block.up)


class Kept(Around):
    """Keeps an auxiliary loss as an attribute, for the loop to add."""

    def forward(self, x: Tensor) -> Any:
        self.extra = 0.01 * x.square().mean()
        return self.block(x)


def with_kept(loop: Loop) -> None:
    wrapped(Kept)(loop)
    loop.loss = (
        lambda tokens: (  # type: ignore[method-assign]
            next_token(loop.model(tokens[:, :-1]), tokens) / 2 + 0 * sum(block.extra for block in loop.model.blocks)
        )
    )


class Doubled(torch.autograd.Function):
    """Keeps its inputs as attributes for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, also: Tensor) -> Tensor:
        ctx.x, ctx.others = x, [also]
        return 2 * x + also

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return 2 * gradient + 0 * ctx.x, gradient + 0 * ctx.others[0]


class OwnFunction(Around):
    def forward(self, x: Tensor) -> Any:
        return Doubled.apply(self.block(x), x)  # type: ignore[no-untyped-call]


class OwnMethod(Counter):
    """Calls a method of its own by an attribute."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.scale = self.scaled

    def scaled(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 1 / self.calls)

    def forward(self, x: Tensor) -> Any:
        return self.scale(self.block(x))


class Leaf(nn.Linear):
    """A layer without modules inside that counts its passes, in a buffer and in an attribute, and draws."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("passes", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.passes += 1
        drawn = 1e-3 * torch.rand(x.shape) if self.training else torch.zeros(x.shape)
        return super().forward(x) * (1 + 1 / self.calls + 1 / self.passes) + drawn


def with_leaf(loop: Loop) -> None:
    loop.model.blocks[0].out = Leaf()


HEALTHY = {
    "a counter": wrapped(Counter),
    "a method": wrapped(OwnMethod),
    "a layer that counts": with_leaf,
    "a function of autograd": wrapped(OwnFunction),
    "an attribute": with_kept,
    "a buffer that moves": wrapped(Moving),
    "a buffer that moves by its data": wrapped(MovingData),
    "checkpoints": wrapped(Checkpointed),
    "spectral norm": normed,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_pass_that_leaves_nothing_is_taken_again(name: str) -> None:
    plant = HEALTHY[name]
    audited, alone = run(plant, 2), run(plant, 0)
    assert torch.equal(audited.bits(), alone.bits())
    assert not audited.findings()
    assert {each.status for each in audited.results[4] if each.piece == "gradient"} == {EQUAL}, audited.results[4]


def test_another_optimizer_may_step_between() -> None:
    loop = Loop(every=0)
    head = [loop.model.head.weight]
    others = [p for p in loop.model.parameters() if p is not head[0]]
    loop.optimizer, first = torch.optim.AdamW(others, lr=1e-3), torch.optim.SGD(head, lr=0.1)
    loop.watcher = StepWatcher(loop.model, loop.optimizer, 2, loop.keep, task())
    before = loop.update

    def update() -> None:
        first.step()
        before()

    loop.update = update  # type: ignore[method-assign]
    loop.run(4)
    assert not {each.name for each in loop.findings()} - {"no-group"}
    assert "weights were written to since the forward pass" in unchecked(loop.results[4])["gradient"]


def test_attributes_are_bound_as_before_a_pass_and_then_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.count, model[0].name = 1, "first"  # type: ignore[assignment]
    with attributes_as(Before(attributes=[(model, "count", 0), (model[0], "name", ABSENT)]), model):
        assert model.count == 0 and not hasattr(model[0], "name")
        model.more = 3  # type: ignore[assignment]
    assert model.count == 1 and not hasattr(model, "more") and model[0].name == "first"
    assert F.relu(model(torch.ones(1, 2))).shape == (1, 2)


def failing_once(loop: Loop) -> None:
    """A batch of unknown tokens fails in the third step, and the loop goes on."""
    before = loop.after_backward

    def after_backward() -> None:
        if loop.step == 3:
            with pytest.raises(IndexError):
                loop.model(torch.full((1, 4), 1000))
        before()

    loop.after_backward = after_backward  # type: ignore[method-assign]


def test_a_pass_that_fails_ends_no_audit() -> None:
    audited, alone = run(failing_once, 1), run(failing_once, 0)
    assert torch.equal(audited.bits(), alone.bits())
    assert not audited.findings()
    assert {each.status for each in audited.results[4] if each.piece == "gradient"} == {EQUAL}, audited.results[4]
