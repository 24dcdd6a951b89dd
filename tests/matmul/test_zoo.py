"""53 classes of transformers: their parts, against a table written by hand, and the values of all of
their layers, against products of what the casts say.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import narrowgauge as ng
from matmul import zoo
from matmul.scenarios import expected
from narrowgauge.matmul.inference import QuantizedLinear
from narrowgauge.matmul.kept_layers import multiplied, roles_of
from narrowgauge.torch_support.model_parts import parts

Row = tuple[str, list[str], dict[int, int]]
"""Where the blocks are, the routers, and the number of mixtures by that of experts."""


def answer(model: nn.Module) -> Row:
    """Return the parts of a model by name."""
    model_parts = parts(model)
    names = {module: name for name, module in model.named_modules()}
    places = {names[block].rpartition(".")[0] for block in model_parts.blocks}
    place = ""
    if model_parts.blocks:
        (place,) = places
    for experts in model_parts.experts:
        assert not any(name.startswith("b") for name in experts.stacks)
    return place, sorted(names[router] for router in model_parts.routers), len(model_parts.experts)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_parts_of_a_class_of_transformers(name):
    row = zoo.MODELS[name]
    with torch.device("meta"):
        model = zoo.build(name)
    model.tie_weights()
    num_mixtures = sum(row.get("experts", {}).values())
    assert answer(model) == (row["blocks"], sorted(row.get("routers", [])), num_mixtures)
    wide = {name for name, role in roles_of(model).items() if role == "outside the blocks"}
    assert multiplied(model).keys() & row["heads"] <= wide


def routers(path: str, count: int) -> list[str]:
    return [path.format(index) for index in range(count)]


LAYOUTS = {
    "nanoGPT, tied": (lambda: zoo.nano_gpt(True), ("transformer.h", [], 0)),
    "in checkpoint wrappers": (
        lambda: zoo.titan(checkpoint_wrapper),
        (
            "layers",
            routers("layers.{}._checkpoint_wrapped_module.moe.router.gate", 4),
            4,
        ),
    ),
    "all in one Sequential": (
        lambda: nn.Sequential(nn.Embedding(128, 64), *zoo.blocks(), nn.Linear(64, 128)),
        ("", [], 0),
    ),
    "experts with a bias of three dims": (
        lambda: zoo.lm(
            layers=nn.ModuleList(zoo.mixture(zoo.Biased(), nn.Linear(64, 4)) for _ in range(2))
        ),
        ("layers", routers("layers.{}.router", 2), 2),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_of_other_layouts(name):
    make, row = LAYOUTS[name]
    assert answer(make()) == row


def calls_of(layer: nn.Module):
    """Return a list that will hold input, output and the output's gradient of each call."""
    calls = []

    def note(layer: Any, args: Any, y: torch.Tensor) -> None:
        calls.append([args[0].detach().clone(), y.detach().clone()])
        if y.requires_grad:
            y.register_hook(calls[-1].append)

    layer.register_forward_hook(note)
    return calls


COMPUTES = (
    "bfloat16", "float8-row", "float8-tensor", "float8-block", "mxfp8", "mxfp4", "nvfp4", "int8-row",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in zoo.MODELS if name not in zoo.UNRUN])
def test_each_layer_s_values_are_those_of_its_casts(name):
    """Each class in one compute, in turn."""
    compute = COMPUTES[list(zoo.MODELS).index(name) % len(COMPUTES)]
    model = zoo.build(name).eval()
    linears = ng.swap_linears(model, compute)
    layers = {p: layer for p, layer in linears.layers.items() if isinstance(layer, nn.Linear)}
    seen = {path: calls_of(layer) for path, layer in layers.items()}
    model(**zoo.inputs_of(name)).loss.backward()
    users = Counter(map(id, (p for _, p in model.named_parameters(remove_duplicate=False))))
    for path, layer in layers.items():
        slopes = []
        for x, y, *gradients in seen[path]:
            rows = x.flatten(0, -2)
            slope = gradients[0].flatten(0, -2) if gradients else torch.zeros_like(y).flatten(0, -2)
            values = expected(layer, rows, slope)
            error = distance(y.flatten(0, -2), values["output"])
            assert error < LIMIT, (compute, path, error)
            slopes.append(values["grad_weight"])
        is_random = layer.compute.is_stochastic
        if len(slopes) == 1 and slopes[0].any() and users[id(layer.weight)] == 1 and not is_random:
            slope = layer.weight.grad.t() if layer.is_transposed else layer.weight.grad
            assert distance(slope, slopes[0]) < LIMIT, (compute, path)
    assert widened_layers(model, name) <= {"dt_proj"}  # of Mamba, which multiplies by its weight


def widened_layers(model: nn.Module, name: str) -> set[str]:
    """Return the last names of the layers whose stored weights are widened in a pass."""
    keep = {"Llama4": ("*.experts",), "JetMoe": ("*.input_linear", "*.output_linear")}
    ng.quantize_for_inference(model, "int8-row", keep=keep.get(name, ()))
    names = set()
    dequantize = QuantizedLinear.dequantize

    def seen(layer: QuantizedLinear) -> torch.Tensor:
        names.add(layer.layer_name.rpartition(".")[2])
        return dequantize(layer)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(QuantizedLinear, "dequantize", seen)
        model(**zoo.inputs_of(name))
    return names


LIMIT = 0.01
"""Of the norm: roundings of sums and of results."""


def distance(x: torch.Tensor, expected: torch.Tensor) -> float:
    return float((x.double() - expected).norm() / expected.norm().clamp_min(1e-30))
