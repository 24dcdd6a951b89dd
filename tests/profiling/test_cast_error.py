"""What casts lose: readings whose answers are known, and a few true steps in which every layer is read."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import pytest
import torch

from narrowgauge.numerics.metrics import cast_loss, cast_sums
from narrowgauge.profiling import cast_error
from narrowgauge.profiling.cast_error import losses
from narrowgauge.spec.computes import Cast
from narrowgauge.spec.notation import parse
from trainer.tiny_runs import settings

TENSOR = Cast("float8_e4m3fn", "tensor")
OUTLIER = [1.99, *[0.5] * 31]
# Values, their cast, the scale's amax; the fractions that overflow and that become zero, and the signal to noise in decibels.
LOSSES: dict[str, tuple[list[float], Cast, float | None, float, float, float | None]] = {
    "all is representable": ([127.0, -3.0, 0.0, 64.0], Cast("int8", "row"), None, 0, 0, math.inf),
    "two of four become zero": ([127.0, 0.1, -0.2, 0.0, 5.0], Cast("int8", "row"), None, 0, 2 / 4, None),
    "a static scale": (
        [448.0, 464.0, 470.0, 2.0**-11],
        Cast("float8_e4m3fn", "tensor", scaling="static"),
        None,
        1 / 4,
        1 / 4,
        None,
    ),
    "a scale of another tensor": ([1.0, 2.0, 4.0, -8.0], TENSOR, 2.0, 2 / 4, 0, None),
    "its own scale": ([1.0, 2.0, 4.0, -8.0], TENSOR, 8.0, 0, 0, math.inf),
    "a value that rounds to the end": ([2.05], TENSOR, 2.0, 0, 0, None),
    "the scale of the OCP rule": (OUTLIER, Cast("float8_e4m3fn", "1x32", "float8_e8m0fnu"), None, 1 / 32, 0, None),
    "a power of two that holds the largest": (OUTLIER, Cast("float8_e4m3fn", "1x32", "power-of-two"), None, 0, 0, None),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_cast_loses_is_counted(name: str) -> None:
    values, cast, amax, *fractions, db = LOSSES[name]
    amax = None if amax is None else torch.full((1, 1), amax)
    loss = cast_loss(cast_sums(torch.tensor([values]), cast, amax=amax).sum(0))
    assert [loss.overflow, loss.underflow] == fractions and loss.sqnr_db == (db or loss.sqnr_db)


def test_the_casts_of_every_layer_are_read(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_error, "NUM_BATCHES", 2)
    config = settings(place, tmp_path, batch_size=2)
    names = ["int8-row/word", "nvfp4/word", "bfloat16/word"]
    int8, nvfp4, bfloat16 = losses([parse(name) for name in names], config)
    for measured in (int8, nvfp4):
        read = {(loss["layer"], loss["tensor"]) for loss in measured}
        assert len(read) == len(measured) and {tensor for _, tensor in read} == {"input", "weight", "output_grad"}
        # One input of q, k and v, and one of gate and up. The row keeps lm_head.
        assert len({layer for layer, tensor in read if tensor == "input"}) == 8
        db = [loss["sqnr_db"] for loss in measured]
        assert db == sorted(db) and all(math.isfinite(x) for x in db)
    assert bfloat16 == [] and not any(loss["overflow"] for loss in int8)
    mean_of_int8, mean_of_nvfp4 = (fmean(loss["sqnr_db"] for loss in measured) for measured in (int8, nvfp4))
    assert mean_of_nvfp4 < mean_of_int8
