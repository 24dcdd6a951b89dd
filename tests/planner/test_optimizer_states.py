"""States of other optimizers are what the optimizers keep, and adapters are what PEFT trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowgauge.assembly.preparation import class_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.planner.clusters import cluster_of
from narrowgauge.planner.jobs import Job
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.memory import memory_terms
from narrowgauge.planner.model import Adapters, decoder, read_model
from narrowgauge.planner.model_state import state_of, with_optimizer
from narrowgauge.planner.step_time import step_terms
from narrowgauge.spec.notation import parse

LLAMA = read_model("llama-8b")
ROWS, COLS = 512, 256


def state_bytes(optimizer: Optimizer, weight: torch.nn.Parameter) -> float:
    """Bytes that an optimizer keeps beside a weight, after a step."""
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = optimizer.state_of(weight)
    return float(sum(tensor.untyped_storage().nbytes() for tensor in state.tensors()))


@pytest.mark.parametrize("storage", ["word", "master", "exact", "compact", "states8", "split"])
@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "muon", "adafactor"])
def test_states_are_those_that_the_optimizer_keeps(name: str, storage: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(ROWS, COLS, dtype=torch.bfloat16))
    counted = state_bytes(class_of(name)([weight], lr=1e-3, storage=storage), weight)
    # Of a model with twice the MLP's size two matrices more: up, and down.
    recipe = with_optimizer(parse(f"bfloat16/{storage}"), name)
    small, large = (
        decoder(
            "one", num_layers=1, hidden_size=COLS, num_heads=1, intermediate_size=size, vocab_size=1, is_gated=False
        )
        for size in (ROWS, 2 * ROWS)
    )
    beside = [state_of(shape, recipe).layers.optimizer for shape in (small, large)]
    assert (beside[1] - beside[0]) / 2 == pytest.approx(counted, rel=0.01, abs=4 * COLS)


def test_muon_leaves_embedding_and_head_to_adamw() -> None:
    recipe = parse("bfloat16/master")
    muon, adamw = state_of(LLAMA, with_optimizer(recipe, "muon")), state_of(LLAMA, recipe)
    assert muon.embedding == adamw.embedding and muon.head == adamw.head
    assert muon.layers.optimizer == pytest.approx(8 / 12 * adamw.layers.optimizer, rel=1e-3)


def test_adapters_have_gradients_and_states_and_the_base_has_none() -> None:
    recipe = parse("bfloat16/master")
    adapted = replace(LLAMA, adapters=Adapters(16))
    # 16 × (inputs + outputs) of q, k, v, o, gate, up, down, in 32 layers.
    per_rank = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert adapted.num_trained_parameters == 32 * 16 * per_rank
    terms = memory_terms(adapted, recipe, Layout(), 4096).groups
    assert terms["optimizer"] == pytest.approx(12 * adapted.num_trained_parameters)
    assert terms["weights"] == pytest.approx(2 * (LLAMA.num_parameters + adapted.num_trained_parameters))
    small = memory_terms(replace(LLAMA, adapters=Adapters(16, "nf4")), recipe, Layout(), 4096).groups
    layers = sum(m.count * m.in_features * m.out_features for m in LLAMA.matmuls if m.part != "head")
    assert terms["weights"] - small["weights"] == pytest.approx((2 - 0.5 - 0.127 / 8) * layers)


def test_a_step_of_adapters_has_no_gradients_of_frozen_weights() -> None:
    recipe, cluster = parse("bfloat16/word"), cluster_of("H100-SXM", 1)
    layout = Layout(micro_batches=64)
    full, adapted, quantized = (
        step_terms(Job(shape, recipe, layout, cluster, 4096)).groups
        for shape in (LLAMA, replace(LLAMA, adapters=Adapters(16)), replace(LLAMA, adapters=Adapters(16, "nf4")))
    )
    # Two products of three; those of the adapters are small, and limited by memory.
    assert 2 / 3 < adapted["matmuls"] / full["matmuls"] < 0.85
    assert adapted["optimizer"] < 0.01 * full["optimizer"]
    assert quantized["matmuls"] == pytest.approx(adapted["matmuls"]) and quantized["casts"] > 0
    assert LLAMA.flops_per_token(4096) > replace(LLAMA, adapters=Adapters(16)).flops_per_token(4096)
