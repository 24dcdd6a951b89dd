"""What casts lose: readings whose answers are known, and a few true steps in which every layer is read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from narrowgauge.numerics.metrics import CastLoss, cast_loss, cast_sums
from narrowgauge.profiling import cast_error
from narrowgauge.profiling.cast_error import losses
from narrowgauge.spec.computes import Cast
from narrowgauge.spec.notation import parse
from narrowgauge.trainer.config import TrainConfig
from tensors import gaussian

SHAPE = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
WORDS = ["def", "return", "the", "quick", "brown", "fox", "jumps", "over", "import", "lazy", "dog", "self", "None"]


def reading(x: torch.Tensor, cast: Cast, **options: torch.Tensor) -> CastLoss:
    return cast_loss(cast_sums(x, cast, **options).sum(0))


def test_what_a_format_holds_loses_nothing() -> None:
    loss = reading(torch.tensor([[127.0, -3.0, 0.0, 64.0]]), Cast("int8", "row"))
    assert (loss.sqnr_db, loss.overflow, loss.underflow) == (math.inf, 0, 0)


def test_values_that_become_zero_are_counted_among_those_that_were_not() -> None:
    loss = reading(torch.tensor([[127.0, 0.1, -0.2, 0.0, 5.0]]), Cast("int8", "row"))
    assert loss.underflow == 2 / 4
    assert loss.overflow == 0


def test_values_beyond_a_stale_scale_are_counted() -> None:
    x = torch.tensor([[1.0, 2.0, 4.0, -8.0]])
    cast = Cast("float8_e4m3fn", "tensor", scaling="delayed")
    assert reading(x, cast, amax=torch.full((1, 1), 2.0)).overflow == 2 / 4
    assert reading(x, cast, amax=torch.full((1, 1), 8.0)).overflow == 0
    # 2.05 rounds to the format's end: that is an error like any other.
    assert reading(torch.tensor([[2.05]]), cast, amax=torch.full((1, 1), 2.0)).overflow == 0


def test_the_scale_of_the_ocp_rule_lets_the_largest_overflow() -> None:
    x = torch.full((1, 32), 0.5)
    x[0, 3] = 1.99
    assert reading(x, Cast("float8_e4m3fn", "1x32", "float8_e8m0fnu")).overflow == 1 / 32
    assert reading(x, Cast("float8_e4m3fn", "1x32", "power-of-two")).overflow == 0


@pytest.mark.parametrize(("format", "db"), [("float8_e4m3fn", 31.5), ("float8_e5m2", 25.5), ("int8", 44.0)])
def test_noise_of_a_gaussian_is_that_of_the_formats_precision(format: str, db: float) -> None:
    """A bit of mantissa is worth 6.02 dB; of int8 per row, log2(254/6.6) bits below the standard deviation."""
    assert reading(gaussian(64, 512), Cast(format, "row")).sqnr_db == pytest.approx(db, abs=2.0)


def test_stochastic_rounding_is_twice_as_noisy() -> None:
    x = gaussian(256, 256)
    nearest = reading(x, Cast("int8", "row")).sqnr_db
    stochastic = reading(x, Cast("int8", "row", rounding="stochastic")).sqnr_db
    assert nearest - stochastic == pytest.approx(3.0, abs=0.3)


def test_the_casts_of_every_layer_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_error, "NUM_BATCHES", 2)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(" ".join(WORDS[(k * k + number) % 13] for k in range(300)))
    config = TrainConfig(
        model=str(tmp_path / "model"), data=str(tmp_path / "text"), batch_size=2, sequence_length=16, lr=1e-3
    )
    names = ["int8-row/word", "nvfp4/word", "bfloat16/word"]
    measured = dict(zip(names, losses([parse(name) for name in names], config), strict=True))
    for name in names[:2]:
        read = {(loss["layer"], loss["tensor"]) for loss in measured[name]}
        assert len(read) == len(measured[name]) and {tensor for _, tensor in read} == {"input", "weight", "output_grad"}
        assert len({layer for layer, tensor in read if tensor == "input"}) == 8, (
            "one of q, k and v, one of gate and up; the row keeps lm_head"
        )
        db = [loss["sqnr_db"] for loss in measured[name]]
        assert db == sorted(db) and all(math.isfinite(x) for x in db)
    assert measured["bfloat16/word"] == []
    by_row = {name: sum(loss["sqnr_db"] for loss in casts) / len(casts) for name, casts in measured.items() if casts}
    assert by_row["nvfp4/word"] < by_row["int8-row/word"]
    assert not any(loss["overflow"] for loss in measured["int8-row/word"])
