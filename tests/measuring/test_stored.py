"""The stored shares of an update are predicted before the run, as the audit measures them in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.measuring.reading import Readings
from narrowgauge.measuring.set_up import set_up_of
from narrowgauge.measuring.stored import Update
from narrowgauge.spec.significance import MIN_EDQ

pytestmark = pytest.mark.filterwarnings("ignore")


def one_weight(value: Tensor, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    weight = nn.Parameter(value.bfloat16())
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, **options}
    return nn.ParameterList([weight]), torch.optim.AdamW([weight], **options)


def share_of(check: Readings) -> float:
    return next((r.value for r in check if r.what == "stored-share"), 1.0)


def updates_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Update]:
    return [Update(stepped, None) for stepped in set_up_of(model, optimizer).trained]


@pytest.mark.parametrize("lr", [3e-4, 6e-4, 2e-3])
def test_the_predicted_share_is_what_the_audit_measures(lr: float) -> None:
    """Gradients of random sign, a bfloat16 weight: the EDQ before the run beside that of 60 steps."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64) * 0.5
    predicted = share_of(ng.check(*one_weight(weight, lr=lr)))
    parameter = nn.Parameter(weight.bfloat16())
    optimizer = ng.AdamW(
        [parameter], lr=lr, betas=(0.9, 0.95), weight_decay=0.0, storage="naive", compile=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        for _ in range(60):
            parameter.grad = torch.randn(64, 64).bfloat16()
            optimizer.step()
    measured = ng.audit(optimizer).total.edq
    assert measured < MIN_EDQ and abs(predicted - measured) < 0.1, (predicted, measured)


@pytest.mark.parametrize("lr", [5e-4, 2e-3])
def test_muons_stored_share_is_predicted_by_the_shape(lr: float) -> None:
    torch.manual_seed(0)
    start = (0.02 * torch.randn(512, 512)).bfloat16().float()
    gradient = torch.randn(512, 512)
    moved = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = nn.Parameter(start.to(dtype, copy=True))
        optimizer = torch.optim.Muon([weight], lr=lr, weight_decay=0.0)
        if dtype is torch.bfloat16:
            predicted = share_of(ng.check(nn.ParameterList([weight]), optimizer))
        weight.grad = gradient.to(dtype)
        optimizer.step()
        moved.append(weight.detach().float() - start)
    stored, change = moved
    share = float((change * stored).sum() / change.square().sum())
    assert predicted == pytest.approx(share, abs=0.1)


@pytest.mark.parametrize(("fused", "keeps"), [(True, True), (False, False)])
def test_a_fused_kernel_stores_the_decay_that_others_round_away(fused: bool, keeps: bool) -> None:
    ends = []
    for decay in (0.0, 0.1):
        start = 0.05 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        weight = nn.Parameter(start.bfloat16())
        optimizer = torch.optim.AdamW(
            [weight], lr=1e-3, weight_decay=decay, fused=fused, betas=(0.9, 0.95)
        )
        (update,) = updates_of(nn.ParameterList([weight]), optimizer)
        share = update.shares().decay
        generator = torch.Generator().manual_seed(1)
        for _ in range(100):
            weight.grad = torch.randn(64, 64, generator=generator).bfloat16()
            optimizer.step()
        ends.append(weight.detach().double())
    shrink = 1 - float((ends[0] * ends[1]).sum() / ends[0].square().sum())
    assert (shrink > 0.005) == keeps == (share != 0.0), shrink


def test_kahan_sums_of_torchs_kind_do_not_keep_the_decay() -> None:
    """optimi multiplies the bfloat16 weight by 1 − lr · decay; ours decays in the step."""
    model = nn.Linear(16, 16).bfloat16()
    group = {"params": list(model.parameters()), "kahan_sum": True}
    kahan = torch.optim.AdamW([group], lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    assert [u.shares()[:2] for u in updates_of(model, kahan)] == [(1.0, 0.0)] * 2
    ours = ng.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, storage="kahan", compile=False)
    assert [u.shares().decay for u in updates_of(model, ours)] == [None] * 2


def test_a_second_moment_whose_decay_is_rounded_away_is_told_once_with_the_step() -> None:
    """One cause is one reading: the step, its decay and the second moment have one cure."""
    model = nn.Linear(64, 64).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)
    check = ng.check(model, optimizer)
    assert [r.what for r in check] == ["stored-share"] and share_of(check) < 0.2
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0)
    assert not len(ng.check(model, optimizer))


def test_the_rate_is_the_peak_of_a_schedule_before_the_first_step_and_that_of_now_after_it() -> (
    None
):
    model, optimizer = one_weight(torch.randn(64, 64), lr=1e-3)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=100)
    assert not len(ng.check(model, optimizer))
    model, optimizer = one_weight(torch.ones(64, 64))
    optimizer.param_groups[0]["initial_lr"] = 0.1
    assert not len(ng.check(model, optimizer))
    model[0].grad = torch.randn(64, 64).bfloat16()
    optimizer.step()
    assert share_of(ng.check(model, optimizer)) < 0.9


@pytest.mark.parametrize(("lr", "share"), [(0.03, 1.0), (0.015, 0.0)])
def test_decay_below_a_quarter_of_a_spacing_is_swallowed(lr: float, share: float) -> None:
    (update,) = updates_of(*one_weight(torch.randn(8, 8), lr=lr, weight_decay=0.1))
    assert update.shares().decay == share


@pytest.mark.parametrize(("factor", "is_master"), [(1.0, True), (1 + 2.0**-9, True), (1.1, False)])
def test_a_state_is_a_master_if_it_is_within_a_rounding_of_the_weight(
    factor: float, is_master: bool
) -> None:
    weight = nn.Parameter(torch.linspace(1, 2, 64).bfloat16())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["copy"] = factor * weight.detach().float()
    (update,) = updates_of(nn.ParameterList([weight]), optimizer)
    assert (update.keeper is not None) == is_master


@pytest.mark.parametrize(("dtype", "is_kept"), [(torch.float16, True), (torch.bfloat16, False)])
def test_apex_steps_bfloat16_without_the_master_copy_that_it_makes(
    dtype: torch.dtype, is_kept: bool
) -> None:
    weight = nn.Parameter(torch.linspace(1, 2, 64).to(dtype))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.param_groups_master, optimizer.master_weights = [], True
    (update,) = updates_of(nn.ParameterList([weight]), optimizer)
    assert (update.keeper is not None) == is_kept


def test_the_predicted_change_is_adams_next_step() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, -0.5)
        optimizer.step()
    for update in updates_of(model, optimizer):
        change = update.change()
        assert change is not None
        torch.testing.assert_close(change, torch.full_like(change, 0.01))


class MyAdamW(torch.optim.AdamW):
    """A class with a step of the user's own, whose module is no known library."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Unheard(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None: ...


def test_a_class_without_a_row_is_unseen_and_one_of_the_users_own_too() -> None:
    model = nn.Linear(8, 8).bfloat16()
    result = ng.check(model, Unheard(model.parameters(), {"lr": 1e-5}))
    assert not len(result) and "(steps of Unheard)" in str(result)
    result = ng.check(model, MyAdamW(model.parameters(), lr=1e-5))
    assert not len(result) and "MyAdamW is no library's" in str(result)


def test_a_step_as_large_as_the_gradient_needs_a_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    assert "pass batch=" in str(ng.check(model, optimizer))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    judged = ng.check(model, optimizer, batch=torch.randn(16, 32).bfloat16(), loss=loss)
    assert share_of(judged) < 0.7 and not judged.unseen, judged


def test_each_rate_has_its_own_row_of_the_table() -> None:
    torch.manual_seed(0)
    small, large = (nn.Parameter(torch.randn(64, 64).bfloat16()) for _ in range(2))
    groups = [{"params": [large], "lr": 3e-2}, {"params": [small], "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    check = ng.check(nn.ParameterList([small, large]), optimizer)
    (reading,) = check
    rows = [line.split() for line in check.lines[1:3]]
    assert reading.tensor == "0" and [row[2] for row in rows] == ["0.0005", "0.03"]


def test_a_bias_in_front_of_a_batch_norm_has_no_update_to_keep() -> None:
    """Its gradient is zero but for the rounding of a sum."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(16, 4), torch.arange(16) % 3

    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs), targets)

    loss(model, inputs).backward()
    noise = model[0].bias.grad
    assert 0 < noise.norm() < 1e-6
    optimizer.zero_grad()
    readings = ng.check(model, optimizer, batch=inputs, loss=loss)
    assert "stored-share" not in [reading.what for reading in readings]
