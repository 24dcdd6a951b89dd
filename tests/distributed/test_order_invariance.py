"""What would make the bits of an order-invariant sum depend on the number of ranks is refused as it happens, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import narrowgauge as ng
from narrowgauge.errors import RecipeError
from ranks import run_ranks

# ── random numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Drawing(nn.Module):
    """A linear layer, and something that may draw random numbers."""

    def __init__(self, draw: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.linear(x))


def attended(x: Tensor, probability: float) -> Tensor:
    heads = x.view(1, 1, -1, 8)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=probability)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "functional dropout": lambda x: F.dropout(x, 0.5),
    "dropout in attention": lambda x: attended(x, 0.5),
    "noise": lambda x: x + torch.randn_like(x),
    "a layer left out at random": lambda x: x if torch.rand(()) < 2 else 2 * x,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_forward_pass_that_draws_random_numbers_is_refused(draw: Callable[[Tensor], Tensor]) -> None:
    model = Drawing(draw)
    reduction = ng.reduce_gradients_with(model, "reproducible")
    with pytest.raises(RecipeError, match="a forward pass of Drawing drew random numbers"), reduction.micro_batch():
        model(torch.ones(2, 8)).sum().backward()
    outer = nn.ModuleDict({"body": nn.ModuleList([Drawing(draw)])})
    ng.reduce_gradients_with(outer, "reproducible")
    with pytest.raises(RecipeError, match="drew random numbers"):  # a part that is called by itself
        outer["body"][0](torch.ones(2, 8))


def test_dropout_in_the_attention_of_a_transformers_model_is_found() -> None:
    """No module stands for it: attention calls a function."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.5,
    )
    model, _ = ng.prepare(LlamaForCausalLM(config).train(), "bfloat16/word/reproducible")
    tokens = torch.arange(8).view(1, 8)
    with pytest.raises(RecipeError, match="dropout to 0, in attention too"):
        model(tokens, labels=tokens)
    model.eval()(tokens, labels=tokens).loss.backward()  # as from_pretrained leaves it


def compiled_calls(model: nn.Module) -> None:
    torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 8)).sum().backward()


def test_a_model_that_is_compiled_as_a_whole_is_one_graph() -> None:
    model = Drawing()
    ng.reduce_gradients_with(model, "reproducible")
    compiled_calls(model)
    assert model.linear.weight.grad is not None


def seeded(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return F.dropout(x, 0.5)


HEALTHY: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout of 0": lambda x: attended(F.dropout(x, 0.0), 0.0),
    "a generator of its own": lambda x: x * torch.rand(8, generator=torch.Generator().manual_seed(3)),
    "seeded by the micro-batch": seeded,
    "a checkpoint": lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
    "a reentrant checkpoint": lambda x: checkpoint(torch.tanh, x, use_reentrant=True),
}


@pytest.mark.parametrize("draw", HEALTHY.values(), ids=HEALTHY)
def test_forward_passes_that_depend_on_their_micro_batch_alone_are_not(draw: Callable[[Tensor], Tensor]) -> None:
    model = Drawing(draw)
    reduction = ng.reduce_gradients_with(model, "reproducible")
    batches = DataLoader(list(torch.randn(6, 8)), batch_size=2, shuffle=True)  # draws as it begins
    for _ in range(2):
        torch.rand(3)
        for place, batch in enumerate(batches):
            with reduction.micro_batch(is_last=place == 2):
                torch.rand(3)
                model(batch).sum().backward()
        model.zero_grad()


def test_passes_that_are_not_differentiated_may_draw() -> None:
    model = Drawing(DRAWS["noise"])
    reduction = ng.reduce_gradients_with(model, "reproducible")
    with torch.no_grad():
        model(torch.ones(2, 8))
    model.eval()(torch.ones(2, 8))
    copied = copy.deepcopy(model).train()  # an average of weights, say
    copied(torch.ones(2, 8))
    reduction.close()
    model.train()(torch.ones(2, 8)).sum().backward()


def test_other_reductions_may_draw() -> None:
    model = Drawing(DRAWS["noise"])
    ng.reduce_gradients_with(model, "float32")
    model(torch.ones(2, 8)).sum().backward()


def test_stochastic_casts_draw_nothing() -> None:
    model, optimizer = ng.prepare(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "int8-row/word/reproducible")
    for _ in range(2):
        model(torch.ones(4, 32, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_failed_forward_pass_is_forgotten() -> None:
    def fail(_: Tensor) -> Tensor:
        torch.rand(1)
        raise KeyError("batch")

    model = Drawing(fail)
    ng.reduce_gradients_with(model, "reproducible")
    with pytest.raises(KeyError):
        model(torch.ones(2, 8))
    model.draw = torch.tanh
    model(torch.ones(2, 8)).sum().backward()
    model.draw = DRAWS["noise"]
    with pytest.raises(RecipeError, match="drew random numbers"):
        model(torch.ones(2, 8))


def test_what_no_module_stands_for_can_be_surrounded() -> None:
    model = Drawing()
    reduction = ng.reduce_gradients_with(model, "reproducible")
    with pytest.raises(RecipeError, match="a forward pass drew"), reduction.forward_pass():
        F.dropout(model(torch.ones(2, 8)), 0.5)
    with reduction.forward_pass():
        model(torch.ones(2, 8)).sum().backward()


# ── sums before the sum ─────────────────────────────────────────────────────────────────────────────────────────────────


def placed(kind: str) -> tuple[nn.Module, nn.Module]:
    """A model and what is called in its place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if kind == "ddp":
        return model, nn.parallel.DistributedDataParallel(model)
    if kind != "plain":
        shape = (dist.get_world_size(),) if kind == "sharded" else (dist.get_world_size(), 1)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, model


KINDS = ("plain", "ddp", "sharded", "shards of one")


def refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except RecipeError as error:
        return str(error)
    return ""


def two_passes(rank: int) -> dict[str, list[str]]:
    """Of each kind: a step of one pass, whose gradients are zeroed in place; a second pass in one step; passes apart."""
    said: dict[str, list[str]] = {}
    for kind in KINDS:
        model, called = placed(kind)
        ng.reduce_gradients_with(called, "reproducible", average=False)

        def run(part: Callable[[], Tensor]) -> None:
            part().sum().backward()

        def whole(called: nn.Module = called) -> Tensor:
            return called(torch.ones(1, 4))

        messages = []
        for _ in range(3):
            messages.append(refusal(lambda: run(whole)))
            model.zero_grad(set_to_none=False)
        messages.append(refusal(lambda: run(whole)))
        messages.append(refusal(lambda: run(whole)))
        model.zero_grad()
        messages.append(refusal(lambda: run(whole)))
        said[kind] = messages
    return said


def test_a_second_pass_in_one_step_is_refused(tmp_path: Path) -> None:
    for size in (1, 2):
        for said in run_ranks(two_passes, size, tmp_path / str(size)):
            for kind, messages in said.items():
                assert messages[:4] == [""] * 4 and messages[5] == "", kind
                assert "a second backward pass was met in one step" in messages[4], kind


def passes_apart(rank: int) -> list[list[float]]:
    """Two passes in one step, over parameters that have nothing in common."""
    found = []
    for kind in ("plain", "sharded", "shards of one"):
        parts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        if kind != "plain":
            shape = (dist.get_world_size(),) if kind == "sharded" else (dist.get_world_size(), 1)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
            for part in parts:
                fully_shard(part, mesh=mesh)
        ng.reduce_gradients_with(parts, "reproducible", average=False)
        for part in parts:
            part(torch.full((1, 2), 1.0 + rank)).sum().backward()
        grads = [part.weight.grad for part in parts]
        found.append([float((g.full_tensor() if hasattr(g, "full_tensor") else g)[0, 0]) for g in grads])
    return found


def test_passes_over_other_parameters_are_not(tmp_path: Path) -> None:
    for found in run_ranks(passes_apart, 2, tmp_path):
        assert found == [[3.0, 3.0]] * 3


def added_up(rank: int) -> list[float]:
    """Two passes of sums that may be added up, over shards of one rank each: FSDP2 adds to the sum itself."""
    found = []
    for name in ("native", "float32"):
        model = nn.Linear(2, 2, bias=False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicas", "shards"))
        fully_shard(model, mesh=mesh)
        ng.reduce_gradients_with(model, name, average=False)
        for _ in range(2):
            model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        found.append(float(model.weight.grad.full_tensor()[0, 0]))
    return found


def test_shards_of_one_rank_are_summed_once(tmp_path: Path) -> None:
    assert run_ranks(added_up, 2, tmp_path) == [[6.0, 6.0]] * 2


def unsent(rank: int) -> list[str]:
    """Backward passes whose gradients stay on their rank."""
    said = []
    model, called = placed("ddp")
    reduction = ng.reduce_gradients_with(called, "reproducible")

    def keep() -> None:
        with called.no_sync():
            called(torch.ones(1, 4)).sum().backward()

    said.append(refusal(keep))
    model.zero_grad()
    with reduction.micro_batch():  # which sends them
        keep()
    for when in ("before", "between", "all-reduce"):
        model, called = placed("shards of one" if when == "all-reduce" else "sharded")
        reduction = ng.reduce_gradients_with(called, "reproducible")

        def hold(model: nn.Module = model, when: str = when) -> None:
            if when != "between":
                (model.set_requires_all_reduce if when == "all-reduce" else model.set_requires_gradient_sync)(False)
            loss = model(torch.ones(1, 4)).sum()
            if when == "between":
                model.set_requires_gradient_sync(False)
            loss.backward()

        with pytest.raises(RecipeError) as caught, reduction.micro_batch():
            hold()
        said.append(str(caught.value))
    return said


def test_gradients_that_are_not_sent_are_refused(tmp_path: Path) -> None:
    for size in (1, 2):
        for no_sync, *held in run_ranks(unsent, size, tmp_path / str(size)):
            assert no_sync.startswith("no_sync() of DistributedDataParallel adds up the gradients of micro-batches")
            assert len(held) == 3 and all("set_requires_gradient_sync(False)" in message for message in held)


def test_tied_parameters_under_reentrant_checkpoints_go_into_micro_batches() -> None:
    layer = nn.Linear(4, 4)
    reduction = ng.reduce_gradients_with(layer, "reproducible")

    def loss() -> Tensor:
        x = torch.ones(1, 4, requires_grad=True)
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=True)
        return x.sum()

    assert "second backward pass" in refusal(lambda: loss().backward())
    layer.zero_grad()
    reduction.discard()
    with reduction.micro_batch():
        loss().backward()
    assert layer.weight.grad is not None
