"""What a check says of a model before its first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowgauge as ng


def test_a_parameter_without_dimensions_is_checked() -> None:
    model = nn.Linear(8, 8)
    model.scale = nn.Parameter(torch.tensor(2.3))
    assert ng.check(model, ng.AdamW(model.parameters())).ok


@pytest.mark.parametrize("is_frozen", [False, True])
def test_statistics_that_move_beside_frozen_weights_are_told(is_frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[1].requires_grad_(not is_frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    words = "frozen, and statistics move in training mode: 1"
    assert (words in ng.check(model, optimizer).lines) == is_frozen
    model[1].eval()
    assert words not in ng.check(model, optimizer).lines


class Container(torch.optim.Optimizer):
    """An optimizer of all parameters whose step calls its members', as torchtitan's."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.optimizers = list(members)
        parameters = [p for member in members for p in member.param_groups[0]["params"]]
        super().__init__(parameters, {})


def test_the_members_of_a_container_have_the_rates() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    first = torch.optim.AdamW(model[0].parameters(), lr=3e-3, weight_decay=0.2)
    second = torch.optim.SGD(model[1].parameters(), lr=4e-2)
    table = "\n".join(ng.check(model, Container(first, second)).lines)
    for word in ("0.003", "0.2", "0.04", "AdamW", "SGD"):
        assert word in table
    assert "Container" not in table


def test_a_matrix_of_the_size_of_an_embedding_is_no_head() -> None:
    model = torch.nn.ModuleDict(
        {
            "embed": nn.Embedding(16, 8),
            "blocks": nn.ModuleList(nn.Linear(8, 16) for _ in range(2)),
            "head": nn.Linear(8, 16),
        }
    )
    lines = ng.check(model, torch.optim.SGD(model.parameters())).lines
    assert [line.split()[1] for line in lines if line.startswith("head")] == ["1"]
