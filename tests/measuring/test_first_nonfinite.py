"""The first value of a step that is not finite, in float16: the right operation is named."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor, nn

from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.measuring.places import ranked_places
from narrowgauge.spec.computes import COMPUTES


def cause_of(model: nn.Module, x: Tensor) -> str:
    """Return the cause that is printed; empty where every value is finite."""
    readings = ranked_places(model, lambda: model(x).float().sum().backward())
    begin = "not finite first: "
    causes = [line.removeprefix(begin) for line in readings.lines if line.startswith(begin)]
    assert bool(causes) == ("nonfinite" in [reading.what for reading in readings]), readings
    return "".join(causes)


class Attention(nn.Linear):
    """Attention whose mask is transformers' own: in float16 its sum with a score may be -inf."""

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x) @ x.mT
        above = torch.ones(scores.shape[-2:], dtype=scores.dtype).triu(1)
        return (scores + above * torch.finfo(scores.dtype).min).softmax(-1) @ x


class Divided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x)


def test_a_mask_is_not_blamed() -> None:
    attention = Attention(4, 4, bias=False)
    nn.init.eye_(attention.weight)
    x = 9 * torch.arange(12.0).view(1, 3, 4).half() - 60
    assert cause_of(attention.half(), x) == ""
    assert cause_of(nn.Sequential(attention, Divided()), x).startswith("div in ")


def test_a_narrow_layer_names_its_compute_and_what_went_in() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)).half()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        swap_linears(model, replace(COMPUTES["float8-row"], dtype="float16"), keep=())
    x = torch.ones(16, 32).half()
    assert cause_of(model, x) == ""
    with torch.no_grad():
        model[1].weight.fill_(2.0**12)
        model[0].bias.fill_(100.0)
    words = cause_of(model, x)
    assert words.startswith("the product in float8-row in ")
    assert " in 512 of 512 values (float16)" in words
