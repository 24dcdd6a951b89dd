"""The parts of 63 classes of transformers and of other layouts, against a table written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from matmul import zoo
from narrowgauge.torch_support.anatomy import parts, shared_inputs

Row = tuple[str, list[str], list[str], dict[int, int]]
"""Where the blocks are, the heads, the routers, and the number of mixtures by that of experts."""


def answer(model: nn.Module) -> Row:
    """Return the parts of a model by name."""
    model_parts = parts(model)
    names = {module: name for name, module in model.named_modules()}
    places = {names[block].rpartition(".")[0] for block in model_parts.blocks}
    place = ""
    if model_parts.blocks:
        (place,) = places
    mixtures: dict[int, int] = {}
    for experts in model_parts.experts:
        mixtures[experts.number] = mixtures.get(experts.number, 0) + 1
        assert not any(name.startswith("b") for name in experts.stacks)
    heads = sorted(names[head] for head in model_parts.heads)
    return place, heads, sorted(names[router] for router in model_parts.routers), mixtures


@pytest.mark.parametrize("name", zoo.MODELS)
def test_parts_of_a_class_of_transformers(name: str) -> None:
    row = zoo.MODELS[name]
    with torch.device("meta"):
        model = zoo.build(name)
    model.tie_weights()
    experts = {int(count): mixtures for count, mixtures in row.get("experts", {}).items()}
    expected = row["blocks"], sorted(row["heads"]), sorted(row.get("routers", [])), experts
    assert answer(model) == expected


def routers(path: str, count: int) -> list[str]:
    return [path.format(index) for index in range(count)]


LAYOUTS: dict[str, tuple[Callable[[], nn.Module], Row]] = {
    "nanoGPT, tied": (lambda: zoo.nano_gpt(True), ("transformer.h", ["lm_head"], [], {})),
    "nanoGPT, untied": (lambda: zoo.nano_gpt(False), ("transformer.h", ["lm_head"], [], {})),
    "torchtitan's mixture": (
        zoo.titan,
        ("layers", ["out"], routers("layers.{}.moe.router.gate", 4), {8: 4}),
    ),
    "in checkpoint wrappers": (
        lambda: zoo.titan(checkpoint_wrapper),
        (
            "layers",
            ["out"],
            routers("layers.{}._checkpoint_wrapped_module.moe.router.gate", 4),
            {8: 4},
        ),
    ),
    "a Sequential as the body": (
        lambda: zoo.lm(body=nn.Sequential(*zoo.blocks())),
        ("body", ["out"], [], {}),
    ),
    "all in one Sequential": (
        lambda: nn.Sequential(nn.Embedding(128, 64), *zoo.blocks(), nn.Linear(64, 128)),
        ("", ["5"], [], {}),
    ),
    "bytes: as many as the width": (
        lambda: zoo.lm(
            256,
            256,
            into=nn.Linear(256, 256),
            layers=nn.ModuleList(nn.Linear(256, 256) for _ in range(2)),
        ),
        ("layers", ["out"], [], {}),
    ),
    "four layers beside Linear(64, 4)": (
        lambda: zoo.lm(
            layers=nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), mix=nn.Linear(64, 4)
        ),
        ("layers", ["out"], [], {}),
    ),
    "experts with a bias of three dims": (
        lambda: zoo.lm(
            layers=nn.ModuleList(zoo.mixture(zoo.Biased(), nn.Linear(64, 4)) for _ in range(2))
        ),
        ("layers", ["out"], routers("layers.{}.router", 2), {4: 2}),
    ),
    "weights of attention for each head": (
        lambda: zoo.lm(layers=nn.ModuleList(zoo.PerHead() for _ in range(2))),
        ("layers", ["out"], [], {}),
    ),
    "a mixture alone": (
        lambda: zoo.mixture(zoo.blocks(8), nn.Linear(64, 8)),
        ("experts", [], ["router"], {8: 1}),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_of_other_layouts(name: str) -> None:
    make, row = LAYOUTS[name]
    assert answer(make()) == row


def test_adapters_are_no_parts_of_a_head() -> None:
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    model = peft.get_peft_model(zoo.build("Llama"), config)
    model_parts = parts(model)
    assert len(model_parts.blocks) == 2
    assert model_parts.heads == [model.base_model.model.lm_head.base_layer]
    adapters = {name for name, module in model.named_modules() if module in model_parts.adapters}
    assert all("lora_" in name for name in adapters) and len(adapters) >= 6


def test_layers_that_share_an_input_are_those_of_one_forward_pass() -> None:
    model = zoo.build("T5")
    names = {module: name for name, module in model.named_modules()}
    with torch.no_grad():
        groups = shared_inputs(model, lambda: model(**zoo.inputs_of("T5")))
    by_name = {tuple(names[layer].rpartition("layer.")[2] for layer in group) for group in groups}
    assert ("0.SelfAttention.q", "0.SelfAttention.k", "0.SelfAttention.v") in by_name
