"""Wrong questions: each is refused in one line with an advice, and none is half done in silence."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.plan import plan, plan_longest
from narrowgauge.planner.program import DEFAULT, PARTS, with_parts
from narrowgauge.spec.chips import CHIPS, Chip, read_chip

TOKENS = torch.zeros(8, 32, dtype=torch.int64)


def module() -> nn.Module:
    return nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 16), nn.Linear(16, 100))


def refused(**question: Any) -> str:
    """Return the line that refuses a question."""
    with pytest.raises(NarrowgaugeError) as error:
        plan(**question)
    text = str(error.value)
    assert "\n" not in text and error.value.advice, text
    return text


@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_plans_a_model_that_is_too_large(chip: str) -> None:
    """Gradients are summed only in dtypes that sums have, also on chips of float16."""
    assert plan("llama-33b", chip=chip, advise=False).best.memory.total > 0


@pytest.mark.parametrize("name", ["llama-8b", "gpt2-124m", "mixtral-8x7b"])
def test_a_part_alone_trains_or_nothing_does(name: str) -> None:
    """What trains is counted by part, and a model of which nothing trains is refused."""
    question: dict[str, Any] = {
        "model": name,
        "recipes": "bfloat16/word",
        "chip": "B200",
        "chips": 8,
    }
    present = [part for part in PARTS if part not in ("reference", "experts")]
    if "mixtral" in name:
        present = [part for part in PARTS if part not in ("reference", "mlp")]
    frozen = dict.fromkeys(present, "frozen")
    assert "nothing" in refused(**question, parts=frozen)
    for part in present:
        if part == "head" and name == "gpt2-124m":
            continue  # tied to the embeddings
        best = plan(**question, parts={**frozen, part: "trained"}).best
        assert 0 < best.trained_parameters < best.architecture.num_parameters


@pytest.mark.parametrize("part", ["attention", "mlp", "embeddings", "head", "norms"])
def test_a_frozen_part_is_no_adapter(part: str) -> None:
    question: dict[str, Any] = {"recipes": "bfloat16/word", "chip": "H100-SXM", "chips": 8}
    best = plan("llama-8b", **question, parts={part: "float32"}).best
    assert best.kind == "dense"
    assert plan("llama-8b", **question, lora=8).best.kind == "adapters"


@pytest.mark.parametrize(("model", "part"), [("llama-8b", "experts"), ("mixtral-8x7b", "mlp")])
def test_a_part_that_a_model_lacks_is_refused(model: str, part: str) -> None:
    assert part in refused(model=model, chip="H100-SXM", parts={part: "nf4"})


OF_MODULES: dict[str, dict[str, Any]] = {
    "tokens_per_step": {"tokens_per_step": 65_536},
    "sequence_length": {"sequence_length": 4096},
    "lora": {"lora": 16},
    "base": {"base": "nf4"},
    "parts": {"parts": {"head": "frozen"}},
    "parts ": {"program": with_parts(DEFAULT, {"head": "frozen"})},
    "recompute": {"layout": "recompute=full"},
}


@pytest.mark.parametrize("name", OF_MODULES)
def test_the_batch_of_a_module_is_its_step(name: str) -> None:
    """What would need another count of the step is refused."""
    question = {"model": module(), "batch": TOKENS, "chip": "H100-SXM", **OF_MODULES[name]}
    assert name.strip() in refused(**question)


@pytest.mark.parametrize("batch", [None, TOKENS[:0], TOKENS[:, :0], ()])
def test_a_module_needs_a_batch(batch: Any) -> None:
    assert "batch" in refused(model=module(), batch=batch, chip="H100-SXM")


def test_an_optimizer_of_vectors_has_no_storage_of_matrices() -> None:
    model = module()
    optimizer = ng.AdamW([model[1].bias], lr=1e-3, storage="float32")
    text = refused(model=model, batch=TOKENS, optimizer=optimizer, chip="H100-SXM")
    assert "matrices" in text


def test_a_named_model_has_no_batch() -> None:
    assert "batch" in refused(model="llama-8b", batch=TOKENS, chip="H100-SXM")


NUMBERS: dict[str, tuple[Any, ...]] = {
    "price": (math.nan, -1.0, 0.0, math.inf, "1"),
    "tokens": (math.nan, 0.5, math.inf, "1e9"),
    "lora": (-1, 1.5, math.nan, "16", 99_999_999),
    "chips": (1.5, 0, -8, math.nan, True),
    "sequence_length": (0, 512.5, math.nan),
    "tokens_per_step": (0, math.nan, math.inf),
    "interconnect_gbit_per_second": (0, -1.0, math.nan, "fast"),
    "base": ("nf5", "float8"),
    "parts": ({"head": 3}, {"reference": "trained"}, {"heads": "nf4"}, {"mlp": "lora99999999"}),
    "foo": (3,),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_values_that_no_question_has_are_refused(name: str) -> None:
    for value in NUMBERS[name]:
        question: dict[str, Any] = {"model": "llama-8b", "chip": "H100-SXM", name: value}
        if name == "price":
            question["tokens"] = 1e9
        if name == "base":
            question["lora"] = 16
        assert refused(**question)


def test_a_price_needs_tokens() -> None:
    assert "tokens" in refused(model="llama-8b", chip="H100-SXM", price=2.5)


LIKE = "H100-SXM"
NUMBER_FIELDS = [
    row.name for row in dataclasses.fields(Chip) if str(row.type).startswith(("int", "float"))
]


def chip_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("field", NUMBER_FIELDS)
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "true", "'80'", "[80]"])
def test_a_chip_has_numbers_above_0(field: str, value: str, tmp_path: Path) -> None:
    path = chip_file(tmp_path, f"like = '{LIKE}'\n{field} = {value}\n")
    assert field in refused(model="llama-8b", chip=path)


@pytest.mark.parametrize("field", NUMBER_FIELDS)
def test_a_chip_may_have_any_number_above_0(field: str, tmp_path: Path) -> None:
    path = chip_file(tmp_path, f"like = '{LIKE}'\n{field} = 50\n")
    assert getattr(read_chip(path), field) == 50


@pytest.mark.parametrize(
    "text",
    [
        "memory_gb = 94",
        f"like = '{LIKE}'\npeak_tflops = 989",
        f"like = '{LIKE}'\n[peak_tflops]\nbfloat16 = -989",
        f"like = '{LIKE}'\n[peak_tflops]\nfloat8_e4m3fn = 989",
        f"like = '{LIKE}'\n[measured_tflops]\nbfloat16 = 98900",
        f"like = '{LIKE}'\nswitch_adds = 1",
        f"like = '{LIKE}'\nvendor = 1",
    ],
)
def test_a_chip_file_says_what_a_chip_is(text: str, tmp_path: Path) -> None:
    assert "mine.toml" in refused(model="llama-8b", chip=chip_file(tmp_path, text))


# ── a measured run ────────────────────────────────────────────────────────────────────────────────

MEASURED: dict[str, Any] = {
    "model": "llama-8b",
    "recipes": ["bfloat16/master", "bfloat16/word", "float32/float32"],
    "chip": ["A100-SXM4-80GB", "H100-SXM"],
    "chips": 8,
    "advise": False,
}


@pytest.mark.parametrize("factor", [0.3, 0.9, 1.0, 1.5])
def test_the_first_row_has_the_measured_rate(factor: float) -> None:
    """All terms of all rows are scaled, so that no time is negative and the order stays."""
    free = plan(**MEASURED)
    measured = factor * free.best.tokens_per_second
    like = plan(**MEASURED, like=measured)
    assert like.best.tokens_per_second == pytest.approx(measured)
    for row, corrected in zip(free.options, like.options, strict=True):
        assert row.recipe == corrected.recipe and row.layout == corrected.layout
        for term, scaled in zip(row.step, corrected.step, strict=True):
            assert scaled.value == pytest.approx(term.value / factor)


@pytest.mark.parametrize("rate", [-1.0, 0.0, math.nan, math.inf, 700_000.0])
def test_a_rate_above_the_peak_is_no_rate(rate: float) -> None:
    assert refused(**MEASURED, like=rate)


def test_changes_that_fit_are_corrected_too() -> None:
    question: dict[str, Any] = {"recipes": "bfloat16/master", "chip": "RTX-4090"}
    free = plan("llama-1b", sequence_length=65_536, **question)
    rate = free.best.tokens_per_second / 2
    like = plan("llama-1b", sequence_length=65_536, like=rate, **question)
    assert free.instead
    for (text, job), (same, corrected) in zip(free.instead, like.instead, strict=True):
        assert text == same
        assert corrected.tokens_per_second == pytest.approx(job.tokens_per_second / 2)


# ── numbers of chips that are no powers of two ────────────────────────────────────────────────────


@pytest.mark.parametrize("chips", [3, 5, 6, 7, 12])
def test_context_ranks_are_any_divisor_of_the_chips(chips: int) -> None:
    """What fits with a fixed number of context ranks is found without it."""
    question: dict[str, Any] = {"recipes": "bfloat16/word", "chip": "H200", "chips": chips}
    length = 4096 * 3 * 5 * 7
    for context in (ranks for ranks in (3, 5, 6, 7, 12) if chips % ranks == 0):
        fixed = plan(
            "llama-8b",
            layout={"context": context},
            advise=False,
            sequence_length=length,
            **question,
        )
        free = plan("llama-8b", advise=False, sequence_length=length, **question)
        assert free.best.fits >= fixed.best.fits


def test_more_chips_do_not_shorten_the_longest_sequence() -> None:
    question: dict[str, Any] = {"recipes": "bfloat16/word", "chip": "H100-SXM"}
    lengths = [
        plan_longest(model="llama-8b", chips=chips, **question).best.sequence_length
        for chips in (4, 8, 12)
    ]
    assert lengths == sorted(lengths)
