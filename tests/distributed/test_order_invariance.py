"""What would make the bits of an order-invariant sum depend on the number of ranks is refused as it
happens, and nothing else.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import narrowgauge as ng
from distributed.models import mesh_of
from narrowgauge.errors import RankError, RecipeError
from ranks import run_ranks
from text.refusals import refused


class Drawing(nn.Module):
    """A linear layer, and something that may draw random numbers."""

    def __init__(self, draw: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.linear(x))


def attended(x: Tensor, probability: float) -> Tensor:
    heads = x.view(1, 1, -1, 8)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=probability)


DRAWS = {
    "dropout in attention": lambda x: attended(x, 0.5),
    "a layer left out at random": lambda x: x if torch.rand(()) < 2 else 2 * x,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_micro_batch_that_draws_random_numbers_is_refused(
    draw,
):
    model = Drawing(draw)
    reduction = ng.reduce_gradients_with(model, "reproducible")
    with (
        refused("random numbers"),
        reduction.micro_batch(),
    ):
        model(torch.ones(2, 8)).sum().backward()


def test_passes_outside_micro_batch_are_refused():
    layer = Drawing()
    reduction = ng.reduce_gradients_with(layer, "reproducible")
    x = torch.ones(2, 8)
    with refused("a forward pass outside"):
        layer(x)
    with torch.no_grad():
        layer(x)
    layer.eval()(x)
    layer.train()
    with reduction.micro_batch():
        loss = layer(x).sum()
        loss.backward(retain_graph=True)
    with refused("a backward pass outside"):
        loss.backward()


def seeded(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return F.dropout(x, 0.5)


HEALTHY = {
    "dropout of 0": lambda x: attended(F.dropout(x, 0.0), 0.0),
    "a generator of its own": lambda x: x
    * torch.rand(8, generator=torch.Generator().manual_seed(3)),
    "seeded by the micro-batch": seeded,
    "a reentrant checkpoint": lambda x: checkpoint(torch.tanh, x, use_reentrant=True),
}


@pytest.mark.parametrize("draw", HEALTHY.values(), ids=HEALTHY)
def test_forward_passes_that_depend_on_their_micro_batch_alone_are_not(
    draw,
):
    model = Drawing(draw)
    plain = Drawing(draw)
    plain.load_state_dict(model.state_dict())
    reduction = ng.reduce_gradients_with(model, "reproducible")
    batches = DataLoader(list(torch.randn(6, 8)), batch_size=2, shuffle=True)  # draws as it begins
    for _ in range(2):
        torch.rand(3)
        for place, batch in enumerate(batches):
            with reduction.micro_batch(is_last=place == 2):
                model(batch).sum().backward()
            plain(batch).sum().backward()
        for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad)
        model.zero_grad()
        plain.zero_grad()


def refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except RecipeError as error:
        return str(error)
    return ""


def unsent(rank: int) -> list[str]:
    """Two backward passes in a micro-batch, and passes whose gradients stay on their rank."""
    messages = []
    for when in ("twice", "before", "between", "all-reduce"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        mesh = mesh_of("shards of one" if when == "all-reduce" else "sharded")
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
        reduction = ng.reduce_gradients_with(model, "reproducible")

        def hold(model: nn.Module = model, when: str = when, reduction: Any = reduction) -> None:
            if when in ("before", "all-reduce"):
                (
                    model.set_requires_all_reduce
                    if when == "all-reduce"
                    else model.set_requires_gradient_sync
                )(False)
            with reduction.micro_batch():
                loss = model(torch.ones(1, 4)).sum()
                if when == "between":
                    model.set_requires_gradient_sync(False)
                loss.backward()
                model(torch.ones(1, 4)).sum().backward()

        messages.append(refusal(hold))
    return [*messages, left_out()]


class Skipping(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x)


def left_out() -> str:
    """Return what is said where a micro-batch leaves a sharded layer out."""
    model = Skipping(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (model[1], model):
        fully_shard(module, mesh=mesh_of("sharded"))
    reduction = ng.reduce_gradients_with(model, "reproducible")

    def skip() -> None:
        with reduction.micro_batch():
            model(torch.ones(1, 4)).sum().backward()

    return refusal(skip)


def test_gradients_that_are_not_sent_one_by_one_are_refused(tmp_path):
    for size in (1, 2):
        for twice, *unsent_messages, skipped in run_ranks(unsent, size, tmp_path / str(size)):
            if size > 1:
                assert "two backward passes in one micro-batch" in twice
                assert "got none in a micro-batch" in skipped
            assert len(unsent_messages) == 3
            for message in unsent_messages:
                assert "set_requires_gradient_sync(False)" in message


def uneven(rank: int) -> str:
    """Each rank has two micro-batches in the first step. In the second rank 1 has three."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    reduction = ng.reduce_gradients_with(model, "reproducible")
    try:
        for count in (2, 2 + rank):
            for number in range(count):
                with reduction.micro_batch(is_last=number == count - 1):
                    model(torch.ones(1, 4)).sum().backward()
            model.zero_grad()
    except RankError as error:
        return str(error)
    return ""


def test_ranks_with_unequal_numbers_of_micro_batches_are_refused_on_all(tmp_path):
    for rank, message in enumerate(run_ranks(uneven, 2, tmp_path)):
        assert f"of micro-batch 2 of rank {rank} because" in message
