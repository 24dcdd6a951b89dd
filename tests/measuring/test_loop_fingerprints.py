"""A loop of one's own records hashes of its tensors, with the same bits as without."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import narrowgauge as ng
from narrowgauge.matmul.inference import quantize_for_inference
from narrowgauge.measuring.diagnose.first_difference import first_difference
from narrowgauge.runs.record import Run
from tensors import random_tokens

STEPS = 6


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(29, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 29))


def tokens_at(step: int) -> Tensor:
    return random_tokens(4, 8, 29, seed=step)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def recorded(folder: Path, every: int) -> Run:
    """Train, and return the record."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ng.RunRecorder(folder, model, optimizer, fingerprints_every=every) as recorder:
        for step in range(1, STEPS + 1):
            tokens = tokens_at(step)
            loss = loss_of(model, tokens)
            loss.backward()
            with torch.no_grad():  # an evaluation is no part of the step
                loss_of(model, tokens_at(0))
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss, tokens=tokens.numel())
    return ng.read_run(folder)


def test_every_tensor_of_a_step_is_recorded(tmp_path):
    hashed = recorded(tmp_path / "a", every=1)
    unhashed = recorded(tmp_path / "b", every=0)
    assert unhashed.fingerprints == []
    assert "bit for bit to the last weight" in first_difference(hashed, unhashed).verdict
    rows = {row["step"]: row["tensors"] for row in hashed.fingerprints}
    assert list(rows) == list(range(STEPS + 1))
    names = [name for name, _ in model_of().named_parameters()]
    assert list(rows[0]) == [f"weight:{name}" for name in names]
    forward = [key for key in rows[2] if key.startswith(("tokens:", "output:"))]
    assert forward == ["tokens:batch", *(f"output:{name}" for name in "013")]
    assert [key for key in rows[2] if key not in forward] == [
        *(f"grad:{name}" for name in reversed(names)),
        *(f"{kind}:{name}" for name in names for kind in ("weight", "exp_avg", "exp_avg_sq")),
    ]
    assert [row["output:1"][2] for step, row in rows.items() if step] == [4 * 8 * 32] * STEPS
    assert rows[0]["weight:1.weight"][1] == pytest.approx(float(model_of()[1].weight.norm()))


def test_outputs_of_a_base_of_codes_are_recorded(tmp_path):
    """A stored weight is a weight, and no parameter."""
    model = nn.Sequential(nn.Embedding(29, 16), nn.Linear(16, 29, bias=False))
    quantize_for_inference(model, "int8-row")
    optimizer = torch.optim.AdamW(model[0].parameters())
    with ng.RunRecorder(tmp_path, model, optimizer, fingerprints_every=1) as recorder:
        loss = loss_of(model, tokens_at(1))
        loss.backward()
        optimizer.step()
        recorder.step(loss)
    assert "output:1" in ng.read_run(tmp_path).fingerprints[-1]["tensors"]


def test_masters_of_a_loops_own_and_states_of_any_optimizer_are_recorded(tmp_path):
    model = model_of().bfloat16()
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    with ng.RunRecorder(tmp_path / "a", model, optimizer, fingerprints_every=1) as recorder:
        loss = loss_of(model, tokens_at(1))
        loss.backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()
        recorder.step(loss)
    rows = ng.read_run(tmp_path / "a").fingerprints
    assert "weight:1.weight" in rows[0]["tensors"]
    assert "state:momentum_buffer:1.weight" in rows[1]["tensors"]
