"""Two recorded loops that differ in what no setting says, and what their records tell, however little a loop says of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.analysis.diagnosis.pairs.two_runs import TwoRuns, compare_two

VOCABULARY, STEPS = 32, 4


def mean_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def shifted_again(logits: Tensor, tokens: Tensor) -> Tensor:
    return mean_loss(logits, tokens.roll(-1, 1))


def in_another_order(logits: Tensor, tokens: Tensor) -> Tensor:
    return mean_loss(logits.double(), tokens).float()


def recorded(
    folder: Path, loss_of: Callable[[Tensor, Tensor], Tensor] = mean_loss, evaluated: float = 3.0, audit_every: int = 0
) -> ng.Run:
    """A loop that does not say how many tokens a step has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1)
    with ng.RunRecorder(folder, model, optimizer, audit_every=audit_every) as recorder:
        for _ in range(STEPS):
            tokens = torch.randint(VOCABULARY, (4, 24), generator=data)
            loss = loss_of(model(tokens), tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss.item(), batch=tokens)
        recorder.evaluate(evaluated)
    return ng.read_run(folder)


def pair(tmp_path: Path, loss_of: Callable[[Tensor, Tensor], Tensor], audit_every: int = 0) -> TwoRuns:
    one = recorded(tmp_path / "one", audit_every=audit_every)
    return compare_two(one, recorded(tmp_path / "other", loss_of, audit_every=audit_every))


def test_equal_outputs_make_a_loss_that_differs_other_code(tmp_path: Path) -> None:
    found = pair(tmp_path, shifted_again)
    assert found.alignment.first_difference is not None and found.alignment.first_difference.stage == "loss"
    assert found.reason is not None and found.reason.name == "bug"
    assert any("of 3 modules the outputs were hashed and are equal" in said for said in found.evidence)
    assert not found.next_measurement and found.departures == ((), ())


def test_a_loss_that_is_rounded_otherwise_is_no_other_code(tmp_path: Path) -> None:
    found = pair(tmp_path, in_another_order)
    assert found.alignment.first_difference is not None and 0 < found.alignment.first_difference.relative < 1e-6
    assert found.reason is None
    assert "fingerprints" not in found.next_measurement  # they are there
    assert not any("outputs" in said for said in found.evidence)


def test_what_departs_in_one_run_alone_is_said_first(tmp_path: Path) -> None:
    found = pair(tmp_path, shifted_again, audit_every=1)
    assert [each.name for each in found.departures[1]] == ["labels-shifted"] and not found.departures[0]
    assert "a step of other alone departs" in found.evidence[0] and "(labels-shifted)" in found.evidence[0]
    assert found.to_dict()["departures"] == [[], ["labels-shifted"]]
    both = compare_two(recorded(tmp_path / "third", shifted_again, audit_every=1), ng.read_run(tmp_path / "other"))
    assert both.departures == ((), ())
    unaudited = recorded(tmp_path / "fourth", shifted_again)
    assert compare_two(unaudited, ng.read_run(tmp_path / "other")).departures == ((), ())


def test_an_evaluation_that_differs_asks_for_no_fingerprints(tmp_path: Path) -> None:
    found = compare_two(recorded(tmp_path / "one"), recorded(tmp_path / "other", evaluated=2.5))
    assert found.reason is not None and found.reason.name == "evaluation" and not found.next_measurement
