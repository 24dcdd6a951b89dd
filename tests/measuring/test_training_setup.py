"""Set-ups of other formats and libraries are read without a reading; what is none is refused."""

from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.measuring.check.training_setup import sample_elements, setup_of
from narrowgauge.measuring.reading import Readings

pytestmark = pytest.mark.filterwarnings("ignore")


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(32, 16), nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32)
    )


def adamw(model: Any, **options: Any) -> Readings:
    return ng.check(model, torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **options}))


def flat() -> Readings:
    model = language_model()
    partition = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return ng.check(model, torch.optim.AdamW([partition]))


def on_meta() -> Readings:
    with torch.device("meta"):
        return adamw(language_model().bfloat16())


def of_format(dtype: torch.dtype) -> Readings:
    return adamw(nn.ParameterList([nn.Parameter(torch.ones(8, 8).to(dtype))]))


CLEAN = {
    "flat partitions": flat,
    "meta": on_meta,
    "complex": lambda: of_format(torch.complex64),
    "float8": lambda: of_format(torch.float8_e4m3fn),
    "no dimensions": lambda: adamw(nn.ParameterList([nn.Parameter(torch.tensor(2.3))])),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_set_up_that_is_right_is_clean(name):
    assert not len(CLEAN[name]())


def test_masters_of_a_loops_own_stand_for_the_weights_and_have_their_names():
    equal = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    for model in (language_model().bfloat16(), equal.bfloat16()):
        masters = [p.detach().float().requires_grad_() for p in model.parameters()]
        setup = setup_of(model, torch.optim.AdamW(masters, lr=1e-3))
        names = [stepped.name for stepped in setup.stepped]
        assert names == [name for name, _ in model.named_parameters()]


def test_a_sample_covers_every_column():
    for columns in (64, 63, 96, 1):
        size = (1 << 16) // columns * columns
        sample = sample_elements(torch.arange(size).reshape(-1, columns))
        assert len((sample % columns).unique()) == columns
    assert len(sample_elements(torch.arange(8_000)).unique()) == 8_000


class Container(torch.optim.Optimizer):
    """An optimizer of all parameters whose step calls its members', as torchtitan's."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.optimizers = list(members)
        parameters = [p for member in members for p in member.param_groups[0]["params"]]
        super().__init__(parameters, {})


def test_the_members_of_a_container_have_the_rates():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    first = torch.optim.AdamW(model[0].parameters(), lr=3e-3, weight_decay=0.2)
    second = torch.optim.SGD(model[1].parameters(), lr=4e-2)
    table = "\n".join(ng.check(model, Container(first, second)).lines)
    for word in ("0.003", "0.2", "0.04", "AdamW", "SGD"):
        assert word in table
    assert "Container" not in table
