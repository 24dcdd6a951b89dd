"""Collage's step against ordinary bfloat16 tensors, its second moments against float64, and the
released code's faults.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.expansions import NearestEven
from narrowgauge.numerics.rounding import bits_of
from narrowgauge.optim.rules.collage import Parts, collage_adamw
from oracles import collage as narrow

BFLOAT16 = NearestEven(16)


def scalars(
    *, beta2: float = 0.999, lr: float = 1e-3, decay: float = 0.1, t: int = 1000
) -> dict[str, Tensor]:
    """What AdamW's rule reads at step t; eps is a bfloat16, since torch's sums on a CPU round a
    number beside a tensor.
    """
    values = {
        "one_minus_beta1": 1 - 0.9,
        "one_minus_beta2": 1 - beta2,
        "negative_step_size": -lr / (1 - 0.9**t),
        "inverse_root_correction2": (1 - beta2**t) ** -0.5,
        "eps": float(torch.tensor(1e-8).bfloat16()),
        "negative_decay": -lr * decay,
    }
    return {name: torch.tensor(value) for name, value in values.items()}


def gradients(count: int, steps: int, scale: float = 1e-2, seed: int = 0) -> Iterator[Tensor]:
    """A new Gaussian gradient each step, bfloat16 values in float32."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield BFLOAT16(torch.randn(count, generator=generator) * scale)


def eager_step(words: dict[str, Tensor], g: Tensor, s: dict[str, float]) -> Tensor:
    """One step in place; every operation is an ordinary one of bfloat16 tensors.

    Returns the change.
    """
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
    return change


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("plus", [False, True], ids=["light", "plus"])
def test_published_step_is_eager_bfloat16_bit_for_bit(plus: bool, beta2: float) -> None:
    count = 2048
    start = BFLOAT16(torch.randn(count, generator=torch.Generator().manual_seed(1)) * 0.02)
    weight: Parts = (start, torch.zeros(count))
    moments: list[Parts] = [(torch.zeros(count),), tuple(torch.zeros(2 if plus else 1, count))]
    words = {}
    for name in ("dw", "m", "v", *(["dv"] if plus else [])):
        words[name] = torch.zeros(count, dtype=torch.bfloat16)
    words["w"] = weight[0].bfloat16()
    for t, g in enumerate(gradients(count, 20), 1):
        s = scalars(beta2=beta2, t=t)
        change, weight, *moments = collage_adamw(weight, g, *moments, s, BFLOAT16)
        expected = eager_step(
            words, g.bfloat16(), {name: value.item() for name, value in s.items()}
        )
        assert torch.equal(bits_of(change), bits_of(expected.float())), t
        computed = dict(
            zip(("w", "dw", "m", "v", "dv"), (*weight, *moments[0], *moments[1]), strict=False)
        )
        assert computed.keys() == words.keys()
        for name, value in computed.items():
            assert torch.equal(value, words[name].float()), (t, name)
    assert (weight[1] != 0).float().mean() > 0.9
