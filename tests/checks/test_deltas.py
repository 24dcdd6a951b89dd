"""A delta holds every changed bit, and puts a second model where the first one is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import narrowgauge as ng


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 500)).to(dtype)


def bits_of(model: nn.Module) -> list[bytes]:
    return [p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_server_follows_every_bit_of_a_run(dtype: torch.dtype) -> None:
    trained = model_of(dtype)
    served = model_of(dtype).requires_grad_(False)
    for p in served.parameters():
        p.fill_(torch.nan)
    ng.apply_delta(served, ng.delta(trained))
    assert bits_of(served) == bits_of(trained)
    optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
    for step in range(3):
        trained(torch.arange(step, step + 8)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # bits that compare as equal, and as unequal to themselves
            trained[1].bias[step] = -0.0 if step else 0.0
            trained[1].bias[7] = torch.nan
        changes = ng.delta(trained)
        ng.apply_delta(served, changes)
        assert bits_of(served) == bits_of(trained)
        assert 0 < sum(len(values) for _, values, _ in changes.values()) < 500 * 64 * 2 + 500
    assert not ng.delta(trained)


def test_distances_take_16_bits_where_they_fit() -> None:
    model = nn.Linear(1000, 100, bias=False).bfloat16()
    ng.delta(model)
    model.weight.data.view(-1)[[5, 90_000]] += 1
    gaps, _, _ = ng.delta(model)["weight"]
    assert (gaps.tolist(), gaps.dtype) == ([5, 89_995], torch.int32)
    model.weight.data.view(-1)[[5, 900]] += 1
    gaps, _, _ = ng.delta(model)["weight"]
    assert (gaps.tolist(), gaps.dtype) == ([5, 895], torch.int16)


def test_a_copy_begins_anew_and_another_model_is_refused() -> None:
    model = model_of(torch.bfloat16)
    ng.delta(model)
    twin = copy.deepcopy(model)
    assert set(ng.delta(twin)) == {name for name, _ in twin.named_parameters()}
    model[1].bias.data[3] += 1
    changes = ng.delta(model)
    wide = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 501)).bfloat16()
    for refused in (
        model_of(torch.float16), wide, nn.Sequential(nn.Embedding(4, 4)), nn.Linear(4, 4),
    ):  # fmt: skip
        before = bits_of(refused)
        with pytest.raises(ng.errors.DataError, match="Cannot apply a delta"):
            ng.apply_delta(refused, changes)
        assert bits_of(refused) == before


def test_a_tied_model_and_a_complex_one_reach_an_untied_server() -> None:
    class Tied(nn.Module):
        def __init__(self, is_tied: bool) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.phases = nn.Parameter(torch.randn(3, dtype=torch.complex128))
            if is_tied:
                self.head.weight = self.embed.weight

    trained = Tied(True)
    served = Tied(False)
    ng.apply_delta(served, ng.delta(trained))
    with torch.no_grad():
        trained.embed.weight[3, 2] = 5.0
        trained.phases[1] = 1 + 2j
    changes = ng.delta(trained)
    ng.apply_delta(served, changes)
    assert torch.equal(served.head.weight, trained.embed.weight)
    assert torch.equal(served.embed.weight, trained.embed.weight)
    assert torch.equal(served.phases, trained.phases)
    assert changes["head.weight"] is changes["embed.weight"]
