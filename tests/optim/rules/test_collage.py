"""Collage's step against ordinary bfloat16 tensors, its second moments against float64, and the
released code's faults.
"""

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.expansions import NearestEven
from narrowgauge.optim.rules.collage import collage_adamw
from narrowgauge.optim.rules.elementwise import ADAMW
from oracles import collage as narrow
from tensors import gaussian

BFLOAT16 = NearestEven(16)


def scalars(beta2: float, t: int) -> dict[str, Tensor]:
    """What AdamW's rule reads at step t; eps is a bfloat16, since torch's sums on a CPU round a
    number beside a tensor.
    """
    eps = float(torch.tensor(1e-8).bfloat16())
    group = {"lr": 1e-3, "betas": (0.9, beta2), "eps": eps, "weight_decay": 0.1}
    values = torch.tensor(ADAMW.prepare(group, t))
    return dict(zip(ADAMW.scalars, values.unbind(), strict=True))


def eager_step(words: dict[str, Tensor], g: Tensor, s: dict[str, float]) -> None:
    """One step in place; every operation is an ordinary one of bfloat16 tensors."""
    beta1, beta2 = (
        (1 - torch.tensor(s[name])).item() for name in ("one_minus_beta1", "one_minus_beta2")
    )
    words["m"] = torch.addcmul(
        words["m"] * beta1, g, torch.ones_like(g), value=s["one_minus_beta1"]
    )
    if "dv" in words:
        decayed = narrow.mul((words["v"], words["dv"]), narrow.split(beta2))
        increment = torch.addcmul(torch.zeros_like(g), g, g, value=s["one_minus_beta2"])
        words["v"], words["dv"] = narrow.grow(decayed, increment)
    else:
        # One rounding of a float32 sum; addcmul fuses product and sum, see the next test.
        words["v"] = (words["v"] * beta2 + s["one_minus_beta2"] * g.float() * g.float()).bfloat16()
    denominator = words["v"].sqrt() * s["inverse_root_correction2"] + s["eps"]
    change = words["m"] * s["negative_step_size"] / denominator + words["w"] * s["negative_decay"]
    words["w"], words["dw"] = narrow.grow((words["w"], words["dw"]), change)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("plus", [False, True], ids=["light", "plus"])
def test_published_step_is_eager_bfloat16_bit_for_bit(plus, beta2):
    count = 2048
    zeros = torch.zeros(count)
    weight = (BFLOAT16(gaussian(count, scale=0.02)), zeros)
    moments = [(zeros,), (zeros, zeros) if plus else (zeros,)]
    names = ("w", "dw", "m", "v", "dv")[: 4 + plus]
    words = dict.fromkeys(names, zeros.bfloat16()) | {"w": weight[0].bfloat16()}
    for t in range(1, 21):
        s = scalars(beta2, t)
        g = BFLOAT16(gaussian(count, seed=t, scale=1e-2))
        weight, *moments = collage_adamw(weight, g, *moments, s, BFLOAT16)
        numbers = {name: value.item() for name, value in s.items()}
        eager_step(words, g.bfloat16(), numbers)
        for name, value in zip(names, (*weight, *moments[0], *moments[1]), strict=True):
            assert torch.equal(value, words[name].float()), (t, name)
    assert (weight[1] != 0).float().mean() > 0.9
