"""Models that the caller has sharded with ``fully_shard``: the bits of one process, or one clear
line.

Rows that no number of ranks divides, several groups, tied, frozen and whole parameters; before and
after the first forward pass; and under FSDP2's mixed precision.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import narrowgauge as ng
from distributed.models import full_tensor_of, mesh_of
from narrowgauge.distributed import sharding
from narrowgauge.errors import RecipeError
from ranks import run_ranks
from tensors import random_tokens

LEAVES = 5
POLICIES: dict[str, dict[str, Any]] = {
    "bfloat16": {"param_dtype": torch.bfloat16},
    "float16 that returns float32": {"param_dtype": torch.float16, "output_dtype": torch.float32},
    "inputs as they are": {"param_dtype": torch.bfloat16, "cast_forward_inputs": False},
}
"""Mixed precision of float32 weights."""


class Net(nn.Module):
    """Two blocks of odd sizes between a tied embedding and head, with a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6)) for _ in range(2)
        )
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = x.to(self.frozen.weight.dtype)
        return self.head(self.frozen(x) * self.gain).float()  # type: ignore[no-any-return]


def loss_of(model: nn.Module, leaf: int) -> Tensor:
    tokens = random_tokens(2, 5, 11, seed=leaf)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / LEAVES


def sharded(kind: str, how: str = "", dtype: torch.dtype = torch.float32) -> Net:
    """Return a model that the caller has sharded, and perhaps used, as ``how`` says."""
    model = Net().to(dtype)
    mesh = mesh_of(kind)
    options: dict[str, Any] = {}
    if how == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if how in POLICIES:
        policy = MixedPrecisionPolicy(**POLICIES[how], reduce_dtype=torch.float32)
        options["mp_policy"] = policy
    ignored = {model.gain} if how == "whole" else None
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, ignored_params=ignored, **options)
    if how in ("evaluated", "run", "trained"):
        with torch.set_grad_enabled(how != "evaluated"):
            loss = loss_of(model, 0)
        if how == "trained":
            loss.backward()
            model.zero_grad()
    return model


def learn(model: nn.Module) -> list[str]:
    """Return the norms of two steps of five micro-batches, and the weights in the end."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    reduction = ng.reduce_gradients_with(model, "reproducible", average=False)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    storage = "word" if model.gain.dtype is torch.bfloat16 else "float32"
    optimizer = ng.AdamW(named, lr=1e-2, storage=storage, compile=False, max_grad_norm=1.0)
    seen = []
    for step in range(2):
        for first in range(0, LEAVES, size):
            is_absent = first + rank >= LEAVES
            with reduction.micro_batch(is_last=first + size >= LEAVES, is_absent=is_absent):
                loss_of(model, 100 * step + (0 if is_absent else first + rank)).backward()
        optimizer.step()
        seen.append(float(optimizer.grad_norm).hex())  # type: ignore[arg-type]
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, step)  # an evaluation, which leaves the root's parameters gathered
    for module in sharding.fsdp_modules(model):
        module.reshard()
    return [*seen, sharding.fingerprint_whole({name: optimizer.stored(p) for name, p in named})]


PLACES = {1: ("sharded",), 2: ("sharded", "shards of one"), 4: ("replicas",)}
HOWS = ("", "evaluated", "run", "trained", "whole", "offloaded")


def learned(rank: int) -> dict[tuple[str, str], list[str]]:
    """Train in every way in which a caller shards, by place and way."""
    torch.set_num_threads(1)
    outcomes = {}
    for place in PLACES[dist.get_world_size()]:
        for how in HOWS:
            outcomes[place, how] = learn(sharded(place, how, torch.bfloat16))
        for how in POLICIES:
            outcomes[place, how] = learn(sharded(place, how))
    return outcomes


def alone(rank: int) -> dict[tuple[str, str], list[str]]:
    """Train without shards on one rank; FSDP2 itself casts for mixed precision."""
    return {**learned(rank), ("sharded", ""): learn(Net().bfloat16())}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return what one process learns in each way."""
    (outcomes,) = run_ranks(alone, 1, tmp_path_factory.mktemp("one"))
    return {how: outcomes["sharded", how if how in POLICIES else ""] for how in (*HOWS, *POLICIES)}


@pytest.mark.parametrize("size", [2, 4])
def test_the_caller_s_shards_have_the_bits_of_one_process(
    size: int, expected: dict[str, list[str]], tmp_path: Path
) -> None:
    assert len(set(map(str, expected.values()))) == len(POLICIES)
    for outcomes in run_ranks(learned, size, tmp_path):
        assert [case for case, seen in outcomes.items() if seen != expected[case[1]]] == []


def refusal_of(attempt: Callable[[], object]) -> str:
    with pytest.raises(RecipeError) as error:
        attempt()
    return str(error.value)


def summed(model: Net) -> dict[str, Tensor]:
    """Gradients of one micro-batch a rank, added up over the ranks, of what is trained."""
    with ng.reduce_gradients_with(model, "reproducible", average=False).micro_batch():
        loss_of(model, dist.get_rank()).backward()
    gradients: dict[str, Any] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            gradients[name] = p.grad
    return {name: full_tensor_of(gradient) for name, gradient in gradients.items()}


def sums_and_refusals(rank: int) -> tuple[list[dict[str, Tensor]], dict[str, str]]:
    sums = []
    lines = {}
    for how in ("", "trained"):
        for replaced in (False, True):
            model = sharded("sharded", how)
            if replaced:  # as load_state_dict(assign=True) does
                value = Net().embedding.weight.detach()
                model.embedding.weight = nn.Parameter(
                    distribute_tensor(value, mesh_of("sharded"), [Shard(0)])
                )  # type: ignore[assignment]
                model.head.weight = model.embedding.weight
            sums.append(summed(model))
    model = Net()
    reduction = ng.reduce_gradients_with(model)
    fully_shard(model, mesh=mesh_of("sharded"))
    lines["sharded later"] = refusal_of(lambda: reduction.micro_batch().__enter__())
    model = sharded("sharded")
    model.extra = nn.Parameter(distribute_tensor(torch.ones(4), mesh_of("sharded"), [Shard(0)]))
    lines["not FSDP2's"] = refusal_of(lambda: ng.reduce_gradients_with(model))
    return sums, {**lines, **notes_of_steps()}


def notes_of_steps() -> dict[str, str]:
    """Return what optimizers say of parameters that FSDP2 has taken out of the model."""
    notes = {}
    model = Net()
    optimizer = ng.AdamW(model.named_parameters(), storage="float32")
    fully_shard(model, mesh=mesh_of("sharded"))
    loss_of(model, 0).backward()
    notes["made before"] = note_of(optimizer.step)
    model, optimizer = ng.prepare(Net(), "float32/float32")  # type: ignore[assignment]
    fully_shard(model, mesh=mesh_of("sharded"), ignored_params={model.gain})
    loss_of(model, 0).backward()
    notes["prepared before"] = note_of(optimizer.step)
    return notes


def note_of(step: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return " ".join(str(warning.message) for warning in caught)


def test_what_fsdp_gathers_is_summed_and_stepped_or_refused(tmp_path: Path) -> None:
    """Once parameters that FSDP2 did not know yet were taken for whole ones, shards of different
    elements were added up.
    """
    model = Net()
    for leaf in range(2):
        loss_of(model, leaf).backward()
    expected = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            expected[name] = p.grad
    for sums, lines in run_ranks(sums_and_refusals, 2, tmp_path):
        for gradients in sums:
            torch.testing.assert_close(gradients, expected)
        assert "was frozen or not in the model when the reduction" in lines["sharded later"]
        assert "'extra' is a DTensor" in lines["not FSDP2's"]
        assert "no gradient of 'gain'" in lines["made before"]
        assert "make the optimizer after" in lines["prepared before"]
