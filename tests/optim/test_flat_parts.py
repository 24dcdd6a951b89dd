"""A long vector is a flat part of a model, as DeepSpeed's ZeRO makes, and neither gain nor bias."""

from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.optim import GaLore
from narrowgauge.optim.step.parameter_formats import LONGEST_VECTOR
from text.refusals import refused


def vector(length: int = LONGEST_VECTOR, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    weight = nn.Parameter(torch.ones(length, dtype=dtype))
    weight.grad = torch.full_like(weight, 1e-3)
    return weight


def parts_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return list(optimizer.param_groups[0]["params"])


def trained_and_resumed() -> list[torch.optim.Optimizer]:
    """Return two optimizers of two parts each: one after a step, one before it."""
    pair = []
    for _ in range(2):
        parts = [("first", vector(9, torch.float32)), ("second", vector(8, torch.float32))]
        pair.append(ng.AdamW(parts, storage="float32"))
    pair[0].step()
    return pair


def test_a_flat_part_has_the_storage_and_the_low_bits_of_a_matrix():
    """Elements of 1 keep low bits of zero in a gain alone."""
    stored = {}
    for shape in ((LONGEST_VECTOR,), (1, LONGEST_VECTOR)):
        weight = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
        weight.grad = torch.full_like(weight, 1e-3)
        optimizer = ng.AdamW([("weight", weight)], storage="word", low_bits="random")
        optimizer.step()
        assert optimizer.bytes_per_param() < 8.1
        stored[len(shape)] = optimizer.stored(weight).flatten()
    assert torch.equal(stored[1], stored[2])
    assert len(stored[1].unique()) > 100


def test_a_storage_that_most_elements_do_not_have_is_named():
    optimizer = ng.AdamW([("weight", vector(LONGEST_VECTOR - 1))], storage="word")
    with pytest.warns(
        UserWarning, match="1,048,575 of 1,048,575 elements are in storage 'master'"
    ) as told:
        optimizer.step()
    assert told[0].filename == __file__


@pytest.mark.parametrize("kind", [ng.Muon, GaLore])
def test_a_flat_part_has_no_matrices(kind):
    matrix = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = kind([matrix], lr=1e-3)
    matrix.grad = matrix.detach()  # it steps first
    optimizer.param_groups[0]["params"].append(vector())
    with refused("a flat part"):
        optimizer.step()


def test_parts_that_are_shown_in_turn_step_after_a_load():
    """ZeRO 3 shows an optimizer one part of its parameters a step."""
    optimizers = trained_and_resumed()
    trained, resumed = optimizers
    for part, value in zip(parts_of(resumed), parts_of(trained), strict=True):
        part.data.copy_(value.detach())
    resumed.load_state_dict(trained.state_dict())
    for optimizer in optimizers:
        parts = parts_of(optimizer)
        for part in parts:
            optimizer.param_groups[0]["params"] = [part]
            optimizer.step()
        optimizer.param_groups[0]["params"] = parts
    for part, value in zip(parts_of(resumed), parts_of(trained), strict=True):
        assert torch.equal(part, value)


def test_a_parameter_that_took_the_place_of_one_with_a_state_is_refused():
    """As ``resize_token_embeddings`` replaces one of many."""
    trained, resumed = trained_and_resumed()
    resumed.load_state_dict(trained.state_dict())
    resumed.param_groups[0]["params"][1] = vector(8, torch.float32)
    with refused("parameters that were replaced"):
        resumed.step()
