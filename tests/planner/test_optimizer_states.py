"""States of other optimizers are what the optimizers keep, and adapters are what PEFT trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import narrowgauge as ng
from narrowgauge.assembly.preparation import class_of
from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.planner.inputs.architectures import Adapters, Architecture
from narrowgauge.planner.inputs.clusters import cluster_of
from narrowgauge.planner.inputs.jobs import Job
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.inputs.model_configs import read_architecture
from narrowgauge.planner.memory.rank_memory import memory_terms
from narrowgauge.planner.memory.state_bytes import state_of, with_optimizer
from narrowgauge.planner.plan import plan
from narrowgauge.planner.time.step_time import step_terms
from narrowgauge.spec.notation import parse

LLAMA = read_architecture("llama-8b")
ROWS, COLS = 512, 256


def held(optimizer: Optimizer, weight: torch.nn.Parameter) -> float:
    """Bytes that an optimizer keeps beside a weight, after a step."""
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    store = optimizer._registry.states[weight]
    return float(sum(tensor.untyped_storage().nbytes() for tensor in store.tensors()))


@pytest.mark.parametrize("storage", ["word", "master", "exact", "compact", "states8", "split"])
@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "muon", "adafactor"])
def test_states_are_those_that_the_optimizer_keeps(name: str, storage: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(ROWS, COLS, dtype=torch.bfloat16))
    kept = held(class_of(name)([weight], lr=1e-3, storage=storage), weight)
    # Of a model with twice the MLP's size two matrices more: up, and down.
    recipe = with_optimizer(parse(f"bfloat16/{storage}"), name)
    small, large = (Architecture("one", 1, COLS, 1, 1, COLS, size, 1, is_gated=False) for size in (ROWS, 2 * ROWS))
    beside = [state_of(shape, recipe).layers.on_rank(1).optimizer for shape in (small, large)]
    assert (beside[1] - beside[0]) / 2 == pytest.approx(kept, rel=0.01, abs=4 * COLS)


def test_bytes_of_a_parameter() -> None:
    rows = {
        name: with_optimizer(parse("bfloat16/master"), name).bytes_per_param for name in ("adamw", "muon", "adafactor")
    }
    assert rows == {"adamw": 16.0, "muon": 12.0, "adafactor": 8.0}
    with pytest.raises(RecipeError, match=r"optimizer 'moun'.*muon"):
        with_optimizer(parse("bfloat16/word"), "moun")


@pytest.mark.parametrize("storage", ["kahan", "collage-light", "collage-plus", "naive"])
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_what_an_optimizer_refuses_is_not_planned(name: str, storage: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
    asked = f"bfloat16/{storage}"
    try:
        {"muon": ng.Muon, "adafactor": ng.Adafactor}[name]([weight], lr=1e-3, storage=storage)  # type: ignore[operator]
    except RecipeError:
        with pytest.raises(RecipeError, match=f"rule '{name}' was requested with storage '{storage}'"):
            plan("llama-8b", recipes=[asked], chip="H100-SXM", optimizer=name)
    else:
        assert plan("llama-8b", recipes=[asked], chip="H100-SXM", optimizer=name).options
    # Where none is named, those that it steps are planned, of the state alone too.
    tables = plan("llama-8b", chip="H100-SXM", chips=8, optimizer=name), plan(params=1e9, optimizer=name)
    assert all(option.recipe.storage.arithmetic == "float32" for table in tables for option in table.options)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
@pytest.mark.parametrize("recipe", ["float64/float64", "bfloat16/master64"])
def test_a_matrix_rule_in_float64_is_refused_for_its_own_reason(recipe: str, name: str) -> None:
    with pytest.raises(RecipeError, match="whose updates are float64") as caught:
        with_optimizer(parse(recipe), name)
    assert "expansions" not in str(caught.value)


def test_muon_leaves_embedding_and_head_to_adamw() -> None:
    recipe = parse("bfloat16/master")
    muon, adamw = state_of(LLAMA, with_optimizer(recipe, "muon")), state_of(LLAMA, recipe)
    assert muon.embedding == adamw.embedding and muon.head == adamw.head
    assert muon.layers.on_rank(1).optimizer == pytest.approx(8 / 12 * adamw.layers.on_rank(1).optimizer, rel=1e-3)


def test_adapters_have_gradients_and_states_and_the_base_has_none() -> None:
    recipe = parse("bfloat16/master")
    adapted = replace(LLAMA, adapters=Adapters(16))
    # 16 × (inputs + outputs) of q, k, v, o, gate, up, down, in 32 layers.
    each = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert adapted.num_trained_parameters == 32 * 16 * each
    terms = memory_terms(adapted, recipe, Layout(), 4096).groups
    assert terms["optimizer"] == pytest.approx(12 * adapted.num_trained_parameters)
    assert terms["weights"] == pytest.approx(2 * (LLAMA.num_parameters + adapted.num_trained_parameters))
    codes, kept = (Adapters(16, base).base_bytes for base in ("int8", "int8-outlier"))
    assert (
        kept == codes + 4 / 4096 + 4 * (2 * 4096 + 4) / 4096**2
    )  # scales of rows, and 4 of 4,096 columns in 16 bits too
    small = memory_terms(replace(LLAMA, adapters=Adapters(16, "nf4")), recipe, Layout(), 4096).groups
    layers = sum(m.count * m.in_features * m.out_features for m in LLAMA.matmuls if m.part != "head")
    assert terms["weights"] - small["weights"] == pytest.approx((2 - 0.5 - 0.127 / 8) * layers)


def test_a_step_of_adapters_has_no_gradients_of_frozen_weights() -> None:
    recipe, cluster = parse("bfloat16/word"), cluster_of("H100-SXM", 1)
    layout = Layout(micro_batches=64)
    whole, adapted, quantized = (
        step_terms(Job(shape, recipe, layout, cluster, 4096)).groups
        for shape in (LLAMA, replace(LLAMA, adapters=Adapters(16)), replace(LLAMA, adapters=Adapters(16, "nf4")))
    )
    # Two products of three; those of the adapters are small, and limited by memory.
    assert 2 / 3 < adapted["matmuls"] / whole["matmuls"] < 0.85
    assert adapted["optimizer"] < 0.01 * whole["optimizer"]
    assert quantized["matmuls"] == pytest.approx(adapted["matmuls"]) and quantized["casts"] > 0
    assert LLAMA.flops_per_token(4096) > replace(LLAMA, adapters=Adapters(16)).flops_per_token(4096)


def test_wrong_adapters_are_refused_in_a_line() -> None:
    for message, rank, base in (("rank 0", 0, "nf4"), ("'nf5'.*nf4", 8, "nf5")):
        with pytest.raises(RecipeError, match=message):
            Adapters(rank, base)
    with pytest.raises(NarrowgaugeError, match="adapters were requested for a number of parameters"):
        plan(params=1e9, lora=8)
