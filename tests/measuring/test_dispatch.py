"""Small steps whose shadow is known: what it follows, what it names, and what it leaves as it was."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from measuring.test_training_setup import language_model
from narrowgauge.measuring.check.dispatch import PolicyMode
from narrowgauge.measuring.check.passes import Passes
from narrowgauge.measuring.check.policies.float64_shadow import Float64Shadow
from tensors import random_tokens


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(logits, tokens[:, 1:].flatten())


def test_shadows_of_narrow_weights_have_the_bits_of_a_float64_model():
    model = language_model().bfloat16()
    exact = copy.deepcopy(model).double()
    tokens = random_tokens(8, 17, 32)
    leaves = dict(model.named_parameters())
    passes = Passes(model, leaves, [tokens], next_token)
    shadows = passes.run(passes.step, Float64Shadow()).shadows
    next_token(exact, tokens).backward()
    for name, p in exact.named_parameters():
        assert torch.equal(p.grad, shadows[name]), name


def test_masks_changed_in_place_change_their_shadow():
    x = torch.randn(64).bfloat16().requires_grad_()
    wide = Float64Shadow()
    with PolicyMode(wide):
        y = x * 3
        mask = y > -1
        mask &= y < 1
        mask.logical_or_(y > 2)
        (y * mask).sum().backward()
    exact = x.detach().double() * 3
    expected = 3.0 * ((exact > -1) & (exact < 1) | (exact > 2))
    assert torch.equal(wide.of(x.grad), expected)
