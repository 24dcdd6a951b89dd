"""Alarms of what a storage loses, on small runs that train: they fire where nothing keeps the rest,
and nowhere else.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.optim.audit import figures_of
from narrowgauge.runs.events import Event
from narrowgauge.runs.schema import Row

ROWS = 1024
WIDTH = 32
MET = 24
"""Rows of an embedding, their length, and how many of them the batches hold."""


def run(storage: str, weight_decay: float = 0.1) -> tuple[list[Event], Row]:
    """Train an embedding of whose rows most are never met; the events of the detectors, and the
    figures of the last audit.
    """
    torch.manual_seed(0)
    table = nn.Embedding(
        ROWS, WIDTH, dtype=torch.float32 if storage == "float32" else torch.bfloat16
    )
    table.weight.data.mul_(0.02)
    optimizer = ng.AdamW(
        table.named_parameters(),
        lr=3e-3,
        weight_decay=weight_decay,
        storage=storage,
        audit_every=2,
        compile=False,
    )
    optimizer.on_alarm = lambda alarms: None
    compute = "float32" if storage == "float32" else "bfloat16"
    alarms = ng.analysis.Alarms(f"{compute}/{storage}")
    events = list[Event]()
    figures: Row = {}
    target = torch.randn(MET, WIDTH)
    for step in range(1, 61):
        loss = (table(torch.arange(MET)).float() - target).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.settle()
        if optimizer.last_audit is not None:
            figures = figures_of(optimizer.last_audit.double())
            optimizer.last_audit = None
            events += alarms.on_step({"step": step, **figures})
    return events, figures


def test_lost_decay_is_told_though_the_edq_is_good() -> None:
    (event,), figures = run("naive")
    assert (event.kind, event.tensor, event.threshold) == ("lost_decay", None, 0.5)
    assert event.value is not None and event.value > 0.6
    assert "'word'" in event.advice
    assert figures["edq"] > 0.95
    assert run("naive", weight_decay=0.0)[0] == []  # nobody meant to move it


@pytest.mark.parametrize("storage", ["word", "kahan", "stochastic", "float32"])
def test_what_is_kept_beside_the_weight_is_no_alarm(storage: str) -> None:
    events, figures = run(storage)
    assert [event.kind for event in events] == []
    # The number itself is as high: it counts what the model sees.
    assert storage == "float32" or figures["imprecision_share"] > 0.7
    assert abs(figures["lost_decay"]) < 0.35
