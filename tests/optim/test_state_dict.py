"""What an optimizer refuses, and that a refusal costs nothing."""

from __future__ import annotations

import pytest
import torch

import narrowgauge as ng
from optim.scenarios import kept, parameters
from tensors import assert_same_bits, take_steps

SHAPES = [(20, 30), (7,)]


def trained(storage: str, seed: int = 0) -> ng.AdamW:
    optimizer = ng.AdamW(parameters(storage, SHAPES), storage=storage, compile=False, seed=seed)
    take_steps(optimizer, range(5), scale=0.01)
    return optimizer


@pytest.mark.parametrize(("saved", "mine"), [("naive", "word"), ("compact", "states8")])
def test_a_state_of_another_storage_is_refused_and_nothing_is_lost(saved: str, mine: str) -> None:
    optimizer = trained(mine)
    before = kept(optimizer)
    with pytest.raises(ng.errors.RecipeError, match=f"storage '{saved}' into an optimizer of storage '{mine}'"):
        optimizer.load_state_dict(trained(saved).state_dict())
    assert_same_bits(before, kept(optimizer))


@pytest.mark.parametrize(
    ("storage", "place", "damaged"),
    [("word", 0, "packed"), ("compact", 0, "exp_avg_sq_bound"), ("collage-plus", 1, "exp_avg_sq_low")],
)  # fmt: skip
@pytest.mark.parametrize("how", ["shape", "missing"])
def test_a_damaged_state_is_refused_and_nothing_is_lost(storage: str, place: int, damaged: str, how: str) -> None:
    optimizer = trained(storage)
    before, state = kept(optimizer), trained(storage).state_dict()
    assert damaged in state["state"][place]
    if how == "missing":
        del state["state"][place][damaged]
    else:
        state["state"][place][damaged] = torch.zeros(3, dtype=state["state"][place][damaged].dtype)
    with pytest.raises(ng.errors.RecipeError, match="shape" if how == "shape" else f"no '{damaged}'"):
        optimizer.load_state_dict(state)
    assert_same_bits(before, kept(optimizer))
    take_steps(optimizer, range(5, 7), scale=0.01)
    straight = trained(storage)
    take_steps(straight, range(5, 7), scale=0.01)
    assert_same_bits(kept(straight), kept(optimizer))


def test_an_audit_of_all_ranks_stays_one_after_a_load() -> None:
    optimizer = ng.AdamW([torch.nn.Parameter(torch.ones(2))], storage="float32", compile=False)
    optimizer.auditor.join = joined = lambda sums: sums
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.auditor.join is joined


@pytest.mark.parametrize(("key", "entry"), [(99, "of no parameter"), ("another", {})])
def test_a_state_of_no_parameter_is_refused(key: object, entry: object) -> None:
    optimizer = trained("word")
    state = optimizer.state_dict()
    state["state"][key] = entry
    with pytest.raises(ng.errors.RecipeError, match=f"no param group lists its entry '?{key}"):
        optimizer.load_state_dict(state)
