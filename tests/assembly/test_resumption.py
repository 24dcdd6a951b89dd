"""What a step takes besides weights and moments travels in the optimizer's state; tests/equivalence
resumes whole trainings.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import narrowgauge as ng

pytestmark = pytest.mark.filterwarnings("ignore")


def prepared(recipe: str, steps: int = 0) -> tuple[nn.Module, ng.Optimizer]:
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model, optimizer = ng.prepare(layers, recipe, audit_every=0, compile=False)
    for _ in range(steps):
        model(torch.ones(4, 32, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("recipe", ["float8-tensor/word", "int8-outlier-codes/word"])
def test_the_state_of_a_prepared_model_is_the_plain_models(recipe: str) -> None:
    """What others load has no name that they do not know."""
    names = set(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).state_dict())
    assert set(prepared(recipe)[0].state_dict()) == names


@pytest.mark.parametrize("recipe", ["bfloat16/word", "int8-row/compact"])
def test_a_flattened_checkpoint_of_pytorch_has_everything(recipe: str) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    (model, optimizer), (twin, loaded) = prepared(recipe, steps=2), prepared(recipe)
    weights, states = get_state_dict(model, optimizer, options=options)
    set_state_dict(twin, loaded, model_state_dict=weights, optim_state_dict=states, options=options)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        for name, value in optimizer.state[mine].items():
            assert torch.equal(loaded.state[theirs][name], value), name
