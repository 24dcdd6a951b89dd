"""The numbers of a watched loop, what is told of them, and errors of ours. Faults and healthy loops are
rows of the corpus.
"""

import copy
import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from measuring.watched import Watched
from narrowgauge.measuring.diagnose import laws
from narrowgauge.measuring.diagnose.step_metrics import reads
from narrowgauge.measuring.optimizer_copy import OptimizerCopy
from narrowgauge.measuring.samples import take
from narrowgauge.measuring.watch import device_scalars, meter
from narrowgauge.measuring.watch.hooks import RunNotice
from text.refusals import refused

pytestmark = [
    pytest.mark.filterwarnings("ignore::narrowgauge.measuring.watch.hooks.RunNotice"),
    pytest.mark.usefixtures("one_thread"),
]
B16 = torch.bfloat16


def test_a_copy_of_an_optimizer_keeps_a_rate_that_is_a_tensor():
    """As torchao's classes ask."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(4))], lr=torch.tensor(1e-3))
    group = optimizer.param_groups[0]
    copied = OptimizerCopy(optimizer, group, torch.ones(4), options={"lr": 0.5})
    assert torch.equal(copied.optimizer.param_groups[0]["lr"], torch.tensor(0.5))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_the_stored_share_is_that_of_a_twin_in_float32(kind):
    """The share of the step that bfloat16 stores, of each tensor that was sampled."""
    twin = None
    before = {}

    def copied(optimizer, args, kwargs):
        nonlocal twin
        before.update({name: p.detach().clone() for name, p in loop.model.named_parameters()})
        wide = [nn.Parameter(p.float()) for p in before.values()]
        for x, p in zip(wide, loop.model.parameters(), strict=True):
            x.grad = p.grad.float()
        twin = kind(wide, lr=1e-4)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for state in twin.state.values():
            for name, value in state.items():
                state[name] = value.float() if isinstance(value, Tensor) else value
        twin.step()

    loop = Watched(kind=kind, dtype=B16, lr=1e-4).train(6)
    loop.optimizer.register_step_pre_hook(copied)
    loop.train(1)
    shares = loop.watcher.meter.last["stored"]
    assert len(shares) == 6
    for (name, old), x in zip(before.items(), twin.param_groups[0]["params"], strict=True):
        if name in shares:
            meant = take(x.detach() - old.float()).double()
            now = loop.model.get_parameter(name).detach()
            stored = take(now.float() - old.float()).double()
            share = float((meant * stored).sum() / meant.square().sum())
            assert shares[name] == pytest.approx(share, rel=0.02, abs=2e-3)
    assert min(shares.values()) < 0.9 or kind is torch.optim.SGD


class OfTheWhole(torch.optim.SGD):
    """Divides a gradient by the norm of its tensor, so elements do not step alone."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad /= p.grad.norm()
        super().step()


def test_a_class_that_does_not_step_by_elements_is_not_judged(tmp_path):
    """Its small tensors, which a sample holds whole, neither."""
    loop = Watched(kind=OfTheWhole, dtype=B16, lr=1e-4, record=tmp_path / "run").train(8)
    loop.watcher.close()
    assert not any("stored" in row for row in ng.read_run(tmp_path / "run").steps)
    assert "does not repeat" in str(loop.watcher.meter.unseen)


def test_classes_of_one_name_are_measured_apart():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(B16)
    namesake = type("SGD", (OfTheWhole,), {})
    optimizers = [torch.optim.SGD(model[0].parameters()), namesake(model[1].parameters())]
    watcher = ng.watch(model, optimizers)
    for _ in range(4):
        model(torch.ones(2, 8, dtype=B16)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        watcher.step()
    assert [*watcher.meter.last["stored"]] == ["0.weight", "0.bias"]
    assert [*watcher.meter.unseen] == [f"stored updates by {__name__}.SGD"]


def test_tensors_that_took_unlike_steps_are_measured():
    """As the experts of a mixture, some of which get no gradient in a step."""
    loop = Watched(dtype=B16).train(2)
    update = loop.update

    def without_one():
        loop.model.norm.weight.grad = None
        update()

    loop.update = without_one
    loop.train(1)
    loop.update = update
    loop.train(1)
    assert len(loop.watcher.meter.last["stored"]) == 6 and not loop.watcher.meter.unseen


def test_what_an_audit_alarms_of_is_a_reading_of_the_record(tmp_path):
    kind = partial(ng.AdamW, storage="naive", audit_every=1)
    loop = Watched(kind=kind, dtype=B16, lr=1e-5, record=tmp_path / "run").train(12)
    loop.watcher.close()
    [reading] = ng.diagnose(tmp_path / "run").readings
    audited = ng.audit(loop.optimizer)
    name, _, rest = reading.tensor.partition(" and ")
    assert reading.what == "stored-share" and name in audited and rest, reading
    assert reading.value == pytest.approx(audited[name].edq, abs=0.1) and reading.value < 0.5


def test_a_step_reads_the_device_as_often_for_many_tensors_as_for_few(
    monkeypatch,
):
    reads = []
    copied = device_scalars.HostCopy.cpu

    def counted(self):
        reads.append(self)
        return copied(self)

    monkeypatch.setattr(device_scalars.HostCopy, "cpu", counted)
    Watched().train(4)
    assert len(reads) == 4


# ── what is told ───────────────────────────────────────────────────────────────────────────────────


def test_a_fault_is_told_once_and_again_when_it_is_twice_as_large():
    loop = Watched(max_grad_norm=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loop.factor in (1.0, 1.0, 1.0, 5.0, 5.0):
            loop.train(1)
    words = [str(w.message) for w in caught if w.category is RunNotice]
    assert [text.partition(":")[0] for text in words] == ["step 1", "step 4"]
    assert "Gradients of norm" in words[0] and "the limit is 0.01" in words[0]


def test_one_of_two_optimizers_has_no_clip_of_its_own(tmp_path):
    def part(loop):
        loop.optimizer.param_groups[0]["params"] = [loop.model.head.weight]
        loop.clip = lambda: nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)

    loop = Watched(part, max_grad_norm=0.01, record=tmp_path / "run")
    loop.after_step = lambda loss: loop.watcher.step(loss, grad_norm=1.0)
    loop.train(4).watcher.close()
    assert ng.diagnose(tmp_path / "run").ok


def test_an_unknown_kind_is_refused_and_a_known_one_is_silent():
    with refused("no kind"):
        Watched(ignore=["clip-nrm"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Watched(max_grad_norm=0.01, ignore=["clip-norm"]).train(3)


def test_norms_are_zero_of_zeros_and_infinite_of_infinities_alone():
    """Squares of the others leave float32's range."""
    values = torch.tensor([1e-30, 1e30, 0.0, math.inf])
    norms = device_scalars.norms_of([value.expand(4) for value in values])
    assert norms.tolist() == pytest.approx([2e-30, 2e30, 0.0, math.inf])


# ── errors of ours ─────────────────────────────────────────────────────────────────────


MEASURES = {
    "_take_gradients": "arrived",
    "_take_size": "largest",
    "_take_stored": "stored",
    "_see_probe": "kept",
}
"""Measures of a step, and a column of each."""


@pytest.mark.parametrize("place", MEASURES)
def test_a_measure_that_fails_ends_alone_and_is_named(place, monkeypatch, tmp_path):
    monkeypatch.setattr(meter, "failure_of", lambda title, error: f"{title} ended: {error}")
    well = Watched().train(4)
    monkeypatch.setattr(meter.Meter, place, lambda self, *args: int("no ink"))
    loop = Watched(record=tmp_path / "run").train(4)
    loop.watcher.close()
    others = {*MEASURES.values()} - {MEASURES[place]}
    if place == "_take_gradients":  # samples are of what has a gradient
        others = {"kept"}
    assert MEASURES.values() & loop.watcher.meter.last.keys() == others
    diagnosis = ng.diagnose(tmp_path / "run")
    assert diagnosis.ok and "no ink" in str(diagnosis)
    for mine, its in zip(well.model.parameters(), loop.model.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_an_error_in_a_law_ends_the_laws_and_not_the_loop(monkeypatch):
    messages = []
    monkeypatch.setattr(laws, "failure_of", lambda title, error: f"{title} ended: {error}")

    def broken(tell):
        yield
        raise ValueError("no ink")

    monkeypatch.setattr(laws, "RULES", (reads("loss")(broken),))
    loop = Watched()
    loop.watcher.laws._say = messages.append
    loop.train(3)
    assert messages == ["the laws ended: no ink"] and loop.watcher.meter.number == 3
