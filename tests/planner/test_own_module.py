"""A user's own module: its step is counted on fake tensors, and planned as it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

import narrowgauge as ng
from narrowgauge.errors import DataError, RecipeError
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.own_module import LiveBytes
from narrowgauge.trainer.language_model import drawn


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(4)
        )
        self.head = nn.Linear(64, 500)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def llama() -> nn.Module:
    return drawn(
        AutoConfig.for_model(
            "llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=160, vocab_size=500,
            num_hidden_layers=3,
        ),
        0,
    )  # fmt: skip


TOKENS = torch.zeros(4, 64, dtype=torch.int64)
CASES: dict[str, tuple[Any, Any]] = {
    "residual": (Residual, TOKENS),
    "llama": (llama, {"input_ids": TOKENS, "labels": TOKENS}),
}


def planned(
    make: Any, batch: Any = TOKENS, recipe: str = "bfloat16/word", **asked: Any
) -> Estimate:
    model = make if isinstance(make, nn.Module) else make()
    return ng.plan(model, batch=batch, recipes=recipe, chip="H100-SXM", **asked).best


@pytest.mark.parametrize("storage", ["float32", "word"])
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_a_real_step(name: str, storage: str) -> None:
    make, batch = CASES[name]
    model = make().to(torch.bfloat16 if storage == "word" else torch.float32)
    optimizer = ng.AdamW(model.parameters(), lr=1e-4, storage=storage)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    best = planned(model, batch, "", optimizer=optimizer, layout="micro_batch=4,micro_batches=1")
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    live = LiveBytes(list(model.parameters()))
    with live:
        output = model(**batch) if isinstance(batch, dict) else model(batch)
        (output.loss if isinstance(batch, dict) else output.float().sum()).backward()
    optimizer.step()
    counted = live.activations + live.gradients
    for parameter in model.parameters():
        counted += parameter.nbytes
        for tensor in optimizer.state[parameter].values():
            counted += tensor.nbytes if isinstance(tensor, Tensor) else 0
    assert best.memory.without("overhead").total == pytest.approx(counted, rel=0.05)
    assert best.architecture.num_parameters == sum(p.numel() for p in model.parameters())


def test_operations_are_those_counted() -> None:
    """By hand: six per weight of a matmul and token; fused attention has some beside them."""
    by_hand = 6 * (4 * 2 * 64 * 256 + 64 * 500)
    flops = planned(Residual).architecture.flops_per_token(64)
    assert flops == pytest.approx(by_hand, rel=0.05)
    assert planned(*CASES["llama"]).architecture.attention_flops(64) > 0


def test_what_is_frozen_has_no_gradients_and_no_states() -> None:
    model = Residual()
    unfrozen = planned(model, recipe="bfloat16/master")
    for block in model.blocks:
        block.requires_grad_(False)
    frozen = planned(model, recipe="bfloat16/master")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert frozen.trained_parameters == trained
    ratio = frozen.memory.groups["optimizer"] / unfrozen.memory.groups["optimizer"]
    assert ratio == pytest.approx(trained / unfrozen.architecture.num_parameters)


def test_a_counted_module_has_data_and_shard_ranks_only() -> None:
    tokens = torch.zeros(1, 16_384, dtype=torch.int64)
    layout = planned(Residual, tokens, chips=4).layout
    assert layout.num_ranks == layout.num_replicas == 4
    with pytest.raises(RecipeError, match="data and shard ranks"):
        planned(Residual, tokens, chips=4, layout="tensor=2")


def test_a_module_that_reads_values_is_refused() -> None:
    class Reads(Residual):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) * tokens.sum().item()

    with pytest.raises(DataError, match="fake tensors"):
        ng.plan(Reads(), batch=TOKENS, chip="H100-SXM")


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.conv(images).mean((2, 3)))


@pytest.mark.parametrize(("make", "batch"), [*CASES.values(), (Images, torch.zeros(4, 3, 16, 16))])
def test_a_counted_module_has_no_interval_of_published_runs(make: Any, batch: Any) -> None:
    answer = ng.plan(make(), batch=batch, recipes="bfloat16/word", chip="H100-SXM", tokens=1e9)
    best = answer.best
    assert best.memory_interval is best.rate_interval is best.days_interval(1e9) is None
    assert any("checked against no run, so no interval" in line for line in answer.sentences())
    assert answer.tables()
