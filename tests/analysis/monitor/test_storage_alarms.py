"""Alarms of what a storage loses, on small runs that train: they fire where nothing keeps the rest,
and nowhere else.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.analysis.laws import Laws
from narrowgauge.analysis.reading import Reading
from narrowgauge.analysis.snapshot import Facts, Snapshot
from narrowgauge.gauges.hub import Hub
from narrowgauge.measuring.casts import Gauges
from narrowgauge.runs.schema import Row
from narrowgauge.spec.notation import parse
from tensors import metric_of

ROWS = 96
WIDTH = 32
MET = 24
"""Rows of an embedding, their length, and how many of them the batches hold."""


def run(storage: str, weight_decay: float = 0.1) -> tuple[list[Reading], list[Row]]:
    """Train an embedding of whose rows most are never met; the events of the detectors, and the
    rows of the gauges.
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
    laws = Laws(Facts().advised_for(parse(f"{compute}/{storage}")))
    rows = list[Row]()
    gauges = Gauges(Hub(table, [optimizer]), optimizer, 5, rows.append)
    target = torch.randn(MET, WIDTH)
    for _ in range(60):
        loss = (table(torch.arange(MET)).float() - target).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    gauges.end()
    readings: list[Reading] = []
    for row in rows:
        readings += laws.read(Snapshot.of_gauges(row))
    return readings, rows


def test_lost_decay_is_told_though_the_edq_is_good() -> None:
    (event,), rows = run("naive")
    assert (event.what, event.tensor, event.bound) == ("lost-decay", "weight", 0.5)
    assert (event.value or 0) > 0.6
    assert "'word'" in event.advice
    assert (metric_of(rows[-1], "updates", "weight", "edq") or 0.0) > 0.95
    assert run("naive", weight_decay=0.0)[0] == []  # nobody meant to move it


@pytest.mark.parametrize("storage", ["word", "kahan", "stochastic", "float32"])
def test_what_is_kept_beside_the_weight_is_no_alarm(storage: str) -> None:
    events, rows = run(storage)
    assert [event.what for event in events] == []
    # The number itself is as high: it counts what the model sees.
    share, lost = (
        metric_of(rows[-1], "updates", "weight", name)
        for name in ("imprecision_share", "lost_decay")
    )
    assert share is not None and (storage == "float32" or share > 0.7)
    assert lost is not None and abs(lost) < 0.25
