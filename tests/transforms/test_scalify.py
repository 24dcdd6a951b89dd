"""Scalify: rules on scales against exact fractions, whole models against themselves in plain
float64, data near one.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from matmul import zoo
from narrowgauge.assembly.preparation import prepare
from narrowgauge.matmul.linear import matrix_of
from narrowgauge.trainer.language_model import loss_sum
from narrowgauge.transforms.scaled_tensor import Scaled
from narrowgauge.transforms.scalify import scalify
from tensors import gradients, random_tokens, relative_error, rms
from text.refusals import refused

FAMILIES = ("Llama", "GPT2")
# About what a mean over a large batch makes of gradients: their elements are near 1e-6.
SMALL = 2.0**-20
TOKENS = random_tokens(3, 17, 128, seed=1)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(request.param)


def tiny(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    model = zoo.build(family)
    for name, parameter in model.named_parameters():
        # What starts as zeros or ones would hide a wrong rule.
        if parameter.ndim == 1:
            mean = 1.0 if "norm" in name or "ln_" in name else 0.0
            torch.nn.init.normal_(parameter, mean=mean, std=0.02)
    return model.to(dtype)


def scalified(model: nn.Module) -> Any:
    copied = copy.deepcopy(model)
    scalify(copied)
    return copied


def loss_and_gradients(model: PreTrainedModel, factor: float = 1.0):
    loss = loss_sum(model, TOKENS)
    return loss.detach(), gradients(model, loss * factor)


def distance(computed: Tensor, reference: Tensor) -> float:
    assert type(computed) is Tensor and computed.dtype == reference.dtype
    return relative_error(computed, reference)


def test_scales_of_a_linear_layer_grow_by_the_root_of_the_number_of_terms():
    layer = nn.Linear(16, 64, bias=False, dtype=torch.float64)
    nn.init.constant_(layer.weight, 2.0**-9)
    scalify(layer)
    x = Scaled(torch.ones(2, 16).double(), 2.0**-6).requires_grad_()
    y = layer.forward(x)  # the module itself would return a plain value
    y.backward(Scaled(torch.ones(2, 64).double(), 2.0**-35))
    for scaled, scale, value in (
        (y, 2.0 ** (-6 - 9) * 4, 16 * 2.0 ** (-6 - 9)),
        (x.grad, 2.0 ** (-35 - 9) * 8, 64 * 2.0 ** (-35 - 9)),
    ):
        assert scaled.scale.item() == scale and (scaled.raw * scaled.scale).unique().tolist() == [
            value
        ]
    assert layer.weight.grad.unique().tolist() == [2 * 2.0 ** (-35 - 6)]


def test_a_model_computes_what_it_computed(model):
    transformed = scalified(model)
    assert list(transformed.state_dict()) == list(model.state_dict())
    (loss, reference), (found_loss, gradients) = (
        loss_and_gradients(model, SMALL),
        loss_and_gradients(transformed, SMALL),
    )
    assert distance(found_loss, loss) < 1e-12
    assert max(distance(gradients[name], reference[name]) for name in reference) < 1e-12
    with torch.no_grad():
        logits, other_logits = (
            m(input_ids=TOKENS, use_cache=False).logits for m in (model, transformed)
        )
    assert distance(other_logits, logits) < 1e-12


def test_a_module_that_is_no_such_norm_is_refused():
    class Centred(nn.LayerNorm):
        pass

    with refused("a norm that is centred"):
        scalify(nn.Sequential(Centred(4)))
    with refused("a norm of T5"):
        scalify(zoo.build("T5"))


class RecordedLinear(nn.Linear):
    """A linear layer that keeps the operands of its three matmuls."""

    is_transposed = False

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, matrix_of(self), self.bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        assert type(x) is Tensor
        self.seen = {"x": x.detach(), "weight": weight.detach()}
        y = x @ weight.t()
        y.register_hook(lambda gradient: self.seen.update(gradient=gradient))
        return y if bias is None else y + bias


def recorded(model: PreTrainedModel) -> PreTrainedModel:
    """As a narrow layer is put in place: by its class."""
    for module in model.modules():
        if type(module) is nn.Linear or type(module).__name__ == "Conv1D":
            module.is_transposed = type(module) is not nn.Linear
            sides = module.weight.shape if module.is_transposed else module.weight.shape[::-1]
            module.__class__ = RecordedLinear
            module.in_features, module.out_features = sides
    return model


def operands(model: nn.Module):
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, RecordedLinear):
            layers[name] = module
    inputs = {}
    for name, module in layers.items():
        for kind, x in module.seen.items():
            inputs[(name, kind)] = x.float()
    return inputs


def test_operands_of_all_matmuls_lie_near_one_whatever_the_gradient(model):
    """The band: root mean squares from 1/2 to 8, of gradients, which e5m2 holds, from 2^-8 to 2^8;
    for gradients near 1e-6 and for those 2^30 times smaller.
    """
    plain = recorded(model.float())
    transformed = scalified(plain)
    loss_and_gradients(transformed, SMALL * 2.0**-30)
    far = {key: x.clone() for key, x in operands(transformed).items()}
    loss_and_gradients(plain, SMALL)
    loss_and_gradients(transformed, SMALL)
    near = operands(transformed)
    raw = operands(plain)
    assert len(near) == 3 * (15 if "Llama" in type(model).__name__ else 9)
    for (_, kind), x in near.items():
        if kind != "gradient":
            assert 1 / 2 <= rms(x) <= 8
    assert all(2.0**-8 <= rms(x) <= 2.0**8 for x in near.values())
    assert all(torch.equal(far[key], near[key]) for key in near)
    assert all(rms(x) < 1e-5 for (_, kind), x in raw.items() if kind == "gradient")


def float16_error(model: nn.Module, factor: float, reference: dict[str, Tensor]) -> float:
    """The largest relative error of a parameter's gradient; 1 where all of it became zero."""
    gradients = loss_and_gradients(model, factor)[1]
    return max(distance(gradients[name].double(), reference[name] * factor) for name in reference)


@pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_that_float16_loses_without_a_loss_scale_are_kept(family):
    base = tiny(family, torch.float32)
    _, reference = loss_and_gradients(copy.deepcopy(base).double())
    plain = copy.deepcopy(base).half()
    model, optimizer = prepare(copy.deepcopy(base), "scalify-float16/float32", audit_every=0)
    assert not optimizer.scales_loss
    factors = (1.0, 2.0**-16, 2.0**-24, 2.0**-40)
    (error,) = {float16_error(model, factor, reference) for factor in factors}
    assert error < 0.03  # powers of two change no bit
    assert float16_error(plain, 1.0, reference) < 0.005
    assert float16_error(plain, 2.0**-24, reference) == 1.0
