"""Every kind of the static check reads what it says in a set-up that is wrong, and nothing in one
that is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Readings
from narrowgauge.measuring.set_up import set_up_of, spread

pytestmark = pytest.mark.filterwarnings("ignore")


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(32, 16), nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32)
    )


def adamw(model: Any, **options: Any) -> Readings:
    return ng.check(model, torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **options}))


def whats(check: Readings) -> list[str]:
    return [reading.what for reading in check]


class Rotated(nn.Module):
    """A weight beside rotary frequencies, a mask, small integers and a batch norm's statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.norm = nn.Parameter(torch.randn(4, 4)), nn.BatchNorm1d(4)
        self.norm.running_mean = torch.randn(4)
        self.register_buffer("inv_freq", 5e5 ** (-torch.arange(32) / 32), persistent=False)
        self.register_buffer("mask", torch.full((4, 4), torch.finfo(torch.bfloat16).min).triu(1))
        self.register_buffer("position", torch.arange(256.0))


# ── every kind ────────────────────────────────────────────────────────────────────────────────────


def not_finite() -> Readings:
    model = language_model()
    model[1].weight.data[0, 0], model[4].weight.data[0, 0] = float("nan"), float("-inf")
    mask = nn.Parameter(torch.full((2, 2), float("-inf")), requires_grad=False)
    model[3].register_parameter("mask", mask)
    return adamw(model)


def untied() -> Readings:
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(32, 16), "head": nn.Linear(16, 32, bias=False)}
    )
    model["head"].weight = model["embedding"].weight
    assert not len(adamw(model))
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    return adamw(model)


def stepped_by_adamw(*of: Callable[[nn.Module], nn.Module]) -> Readings:
    model = language_model()
    return ng.check(model, torch.optim.AdamW([p for part in of for p in part(model).parameters()]))


PROVOKED: dict[str, tuple[Callable[[], Readings], str, float]] = {
    "missing-parameters": (lambda: stepped_by_adamw(lambda m: m[:2]), "2.weight and 3 others", 4),
    "parameters-twice": (lambda: stepped_by_adamw(lambda m: m, lambda m: m[4]), "4.weight and 1 other", 2),
    "nonfinite": (not_finite, "1.weight and 1 other", 2),
    "rounded-buffers": (lambda: ng.check(m := Rotated().bfloat16(), ng.AdamW(m.parameters())), "inv_freq", 1),
    "stored-share": (lambda: adamw(language_model().bfloat16(), lr=1e-9), "0.weight and 6 others", 0),
    "truncated-setting": (lambda: adamw(language_model().half(), lr=1.0, betas=(0.9, 0.95)), "0.weight and 6 others", 0),
    "untied": (untied, "head.weight", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", PROVOKED)
def test_a_kind_reads_what_it_says_and_nothing_else(name: str) -> None:
    provoke, tensor, value = PROVOKED[name]
    check = provoke()
    assert [(r.what, r.tensor, r.value) for r in check] == [(name, tensor, value)], check
    assert check[0].text.endswith(".") and "nan" not in check[0].text


def test_the_table_of_kinds_has_a_row_for_each_of_the_static_check() -> None:
    by_check = {name for name, kind in KINDS.items() if kind.by == "ng.check"}
    assert by_check == set(PROVOKED) - {"nonfinite"}


# ── set-ups that are right ────────────────────────────────────────────────────────────────────────


def flat() -> Readings:
    model = language_model()
    partition = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return ng.check(model, torch.optim.AdamW([partition]))


def adapted() -> Readings:
    base = language_model().bfloat16().requires_grad_(False)
    model = nn.ModuleDict({"base": base, "adapter": nn.Linear(8, 8)})
    return ng.check(model, torch.optim.AdamW(model["adapter"].parameters()))


def on_meta() -> Readings:
    with torch.device("meta"):
        return adamw(language_model().bfloat16())


def of_format(dtype: torch.dtype) -> Readings:
    return adamw(nn.ParameterList([nn.Parameter(torch.ones(8, 8).to(dtype))]))


def prepared(recipe: str) -> Readings:
    model, optimizer = ng.prepare(language_model(), recipe, compile=False, max_grad_norm=1.0)
    return ng.check(model, optimizer).require()


CLEAN: dict[str, Callable[[], Readings]] = {
    "bfloat16/word": lambda: prepared("bfloat16/word"),
    "bfloat16/split": lambda: prepared("bfloat16/split"),
    "float32/float32": lambda: prepared("float32/float32"),
    "float8-row/compact": lambda: prepared("float8-row/compact"),
    "cast alone": lambda: ng.check(m := ng.cast_parameters(Rotated(), torch.bfloat16), ng.AdamW(m.parameters())),
    "flat partitions": flat,
    "adapters": adapted,
    "meta": on_meta,
    "complex": lambda: of_format(torch.complex64),
    "float8": lambda: of_format(torch.float8_e4m3fn),
    "no dimensions": lambda: adamw(nn.ParameterList([nn.Parameter(torch.tensor(2.3))])),
    "its own rate": lambda: ng.check(m := language_model(), transformers.Adafactor(m.parameters())),
    "fused": lambda: adamw(language_model().half(), lr=1.0, betas=(0.9, 0.95), fused=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_a_set_up_that_is_right_is_clean(name: str) -> None:
    assert not len(CLEAN[name]())


def test_masters_of_a_loops_own_stand_for_the_weights_and_have_their_names() -> None:
    equal = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    for model in (language_model().bfloat16(), equal.bfloat16()):
        masters = [p.detach().float().requires_grad_() for p in model.parameters()]
        set_up = set_up_of(model, torch.optim.AdamW(masters, lr=1e-3))
        names = [stepped.name for stepped in set_up.stepped]
        assert names == [name for name, _ in model.named_parameters()]
    model = language_model().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    assert not whats(ng.check(model, torch.optim.AdamW(masters, lr=1e-3)))


def test_a_sample_covers_every_column() -> None:
    for columns in (64, 63, 96, 1):
        size = (1 << 16) // columns * columns
        sample = spread(torch.arange(size).reshape(-1, columns))
        assert len((sample % columns).unique()) == columns


class Container(torch.optim.Optimizer):
    """An optimizer of all parameters whose step calls its members', as torchtitan's."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.optimizers = list(members)
        parameters = [p for member in members for p in member.param_groups[0]["params"]]
        super().__init__(parameters, {})


def test_the_members_of_a_container_have_the_rates() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    first = torch.optim.AdamW(model[0].parameters(), lr=3e-3, weight_decay=0.2)
    second = torch.optim.SGD(model[1].parameters(), lr=4e-2)
    table = "\n".join(ng.check(model, Container(first, second)).lines)
    for word in ("0.003", "0.2", "0.04", "AdamW", "SGD"):
        assert word in table
    assert "Container" not in table


def test_what_is_no_model_or_optimizer_is_refused() -> None:
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters())
    for wrong in ((model, model), (model.parameters(), optimizer)):
        with pytest.raises(ng.errors.RecipeError, match="Cannot check "):
            ng.check(*wrong)
    with pytest.raises(ng.errors.RecipeError, match="batch= needs loss="):
        ng.check(model, optimizer, batch=Tensor())
