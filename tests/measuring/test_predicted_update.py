"""The stored shares of an update are predicted before the run, as the audit measures them in it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.measuring.check.predicted_update import predict
from narrowgauge.measuring.check.training_setup import setup_of
from narrowgauge.measuring.optimizer_copy import low_bits_kept
from narrowgauge.measuring.reading import Readings
from narrowgauge.spec.significance import MIN_EDQ
from tensors import gaussian

pytestmark = pytest.mark.filterwarnings("ignore")


def one_weight(value: Tensor, **options: Any):
    weight = nn.Parameter(value.bfloat16())
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, **options}
    return nn.ParameterList([weight]), torch.optim.AdamW([weight], **options)


def share_of(check: Readings) -> float:
    return next((r.value for r in check if r.what == "stored-share"), 1.0)


def predictions(model: nn.Module, optimizer: torch.optim.Optimizer):
    return [predict(stepped, None, {})[0] for stepped in setup_of(model, optimizer).trained]


@pytest.mark.parametrize("lr", [3e-4, 6e-4, 2e-3])
def test_the_predicted_share_is_what_the_audit_measures(lr):
    """Gradients of random sign, a bfloat16 weight: the EDQ before the run beside that of 60 steps."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64) * 0.5
    predicted = share_of(ng.check(*one_weight(weight, lr=lr)))
    parameter = nn.Parameter(weight.bfloat16())
    optimizer = ng.AdamW(
        [parameter], lr=lr, betas=(0.9, 0.95), weight_decay=0.0, storage="naive", compile=False
    )
    assert share_of(ng.check(nn.ParameterList([parameter]), optimizer)) == predicted
    for _ in range(60):
        parameter.grad = torch.randn(64, 64).bfloat16()
        optimizer.step()
    measured = ng.audit(optimizer).total.edq
    assert measured < MIN_EDQ and abs(predicted - measured) < 0.1, (predicted, measured)


@pytest.mark.parametrize("lr", [5e-4, 2e-3])
def test_muons_stored_share_is_predicted_by_the_shape(lr):
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


def test_one_cause_is_one_reading():
    """The step, its decay and the second moment have one cure."""
    check = ng.check(
        *one_weight(torch.randn(64, 64), lr=1e-5, betas=(0.9, 0.999), weight_decay=0.1)
    )
    assert [r.what for r in check] == ["stored-share"] and share_of(check) < 0.2
    assert check.lines[1].split()[-2:] == ["0", "0"], check


def test_the_peak_of_a_schedule_counts_before_the_first_step_and_the_rate_after_it():
    model, optimizer = one_weight(torch.ones(64, 64))
    optimizer.param_groups[0]["initial_lr"] = 0.1
    assert not len(ng.check(model, optimizer))
    model[0].grad = torch.randn(64, 64).bfloat16()
    optimizer.step()
    assert share_of(ng.check(model, optimizer)) < 0.9


class Own(torch.optim.Optimizer):
    """A sign rule of the user's own, which rounds as its option says."""

    def __init__(self, params: Any, rounding: str) -> None:
        super().__init__(params, {"lr": 1e-5, "rounding": rounding})
        self.constants = [None, True, 1, 0.5, 1j, "a", b"a", {"a"}, frozenset("a"), torch.float32]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                change = -group["lr"] * p.grad.float().sign()
                if group["rounding"] == "kahan":
                    change += state.get("rest", 0.0)
                    state["rest"] = change - ((p.float() + change).to(p.dtype) - p.float())
                if group["rounding"] == "master":
                    p.copy_(state.setdefault("master", p.float()).add_(change))
                elif group["rounding"] in ("random", "cut"):
                    bits = (p.float() + change).view(torch.int32)
                    if group["rounding"] == "random":
                        bits = bits + torch.randint(1 << 16, p.shape)
                    p.copy_((bits.int() & -65536).view(torch.float32))
                else:
                    p.add_(change)


KEPT = {"nearest": False, "kahan": True, "random": True, "master": True}
"""Whether the low bits of a step add up."""


@pytest.mark.parametrize("rounding", KEPT)
def test_what_a_class_of_the_users_own_keeps_is_measured(rounding):
    weight = nn.Parameter(gaussian(64, 64, seed=0).bfloat16())
    (stepped,) = setup_of(nn.ParameterList([weight]), Own([weight], rounding)).trained
    before = torch.get_rng_state()
    assert low_bits_kept(stepped.optimizer, stepped.group, weight) == KEPT[rounding]
    row, reason = predict(stepped, None, {})
    assert (row["stored_of_step"] == 1.0) == KEPT[rounding] and not reason
    assert torch.equal(before, torch.get_rng_state()) and not stepped.optimizer.state


def test_a_class_that_rounds_its_copy_too_is_not_judged(tmp_path):
    weight = nn.Parameter(torch.randn(64, 64).bfloat16())
    model, optimizer = nn.ParameterList([weight]), Own([weight], "cut")
    assert "rounds the weights of a copy" in str(ng.check(model, optimizer))
    with ng.watch(model, optimizer, record=tmp_path / "run") as watch:
        for _ in range(4):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
    assert "stored" not in watch.meter.last


@pytest.mark.parametrize(("beta2", "share"), [(0.999, None), (1 - 1e-9, 0.0)])
def test_a_second_moment_that_never_changes_is_named(beta2, share):
    """In float32 too, where the second beta is 1."""
    weight = nn.Parameter(torch.randn(64))
    optimizer = torch.optim.AdamW([weight], betas=(0.9, beta2))
    assert predictions(nn.ParameterList([weight]), optimizer)[0]["of_second_moment"] == share


class Unheard(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None: ...


def test_a_second_moment_in_codes_is_not_judged_as_one_in_16_bits():
    """torchao holds states of 4,096 elements as codes, and smaller ones in the weight's format."""
    low_bit = pytest.importorskip("torchao.optim")
    for rows, moment in ((8, 0.0), (64, None)):
        model = nn.Linear(64, rows, bias=False).bfloat16()
        (row,) = predictions(model, low_bit.AdamW8bit(model.parameters()))
        assert row["of_second_moment"] == moment


def test_what_is_not_predicted_is_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).half()
    eps = ng.check(model, torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95)))
    assert [(r.what, r.value) for r in eps] == [("stored-eps", 0.0)] and eps.lines[1].split()[
        -1
    ] == "0", eps
    model.bfloat16()
    held = torch.optim.AdamW(model.parameters())
    held.model = model
    for optimizer, words in (
        (Unheard(model.parameters(), {"lr": 1e-5}), "a copy of Unheard does not step"),
        (held, "AdamW.model has no copy"),
        (torch.optim.SGD(model.parameters(), lr=0.01), "pass batch="),
    ):
        result = ng.check(model, optimizer)
        assert not len(result) and words in str(result)

    def loss(model, x):
        return model(x).float().square().mean()

    judged = ng.check(model, optimizer, batch=torch.randn(16, 32).bfloat16(), loss=loss)
    assert share_of(judged) < 0.7 and not judged.unseen, judged


def test_each_rate_has_its_own_row_of_the_table():
    torch.manual_seed(0)
    small, large = (nn.Parameter(torch.randn(64, 64).bfloat16()) for _ in range(2))
    groups = [{"params": [large], "lr": 3e-2}, {"params": [small], "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    check = ng.check(nn.ParameterList([small, large]), optimizer)
    (reading,) = check
    rows = [line.split() for line in check.lines[1:3]]
    assert reading.tensor == "0" and [row[2] for row in rows] == ["0.0005", "0.03"]


@pytest.mark.parametrize(("num_lost", "num_readings"), [(1, 0), (2, 1)])
def test_a_share_at_its_bound_is_no_reading(num_lost, num_readings):
    """Of ten equal updates, one or two vanish in a large weight."""
    weight = nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    weight.data[:num_lost] = 100.0
    weight.grad = torch.ones_like(weight)
    check = ng.check(nn.ParameterList([weight]), torch.optim.SGD([weight], lr=2.0**-10))
    assert len(check) == num_readings
