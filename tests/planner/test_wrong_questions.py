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
from narrowgauge.planner.plan import plan
from narrowgauge.planner.program import DEFAULT, PARTS, read_program, with_parts
from narrowgauge.spec.chips import CHIPS, Chip, read_chip

TOKENS = torch.zeros(8, 32, dtype=torch.int64)


def module() -> nn.Module:
    return nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 16), nn.Linear(16, 100))


def refused(**question: Any) -> str:
    """Return the line that refuses a question."""
    with pytest.raises(NarrowgaugeError) as error:
        plan(**{"model": "llama-8b", "chip": "H100-SXM", **question})
    text = str(error.value)
    assert "\n" not in text and (error.value.advice or "must be" in text), text
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
    absent = "mlp" if "mixtral" in name else "experts"
    present = [part for part in PARTS if part not in ("reference", absent)]
    frozen = dict.fromkeys(present, "frozen")
    assert "nothing" in refused(**question, parts=frozen)
    assert absent in refused(**question, parts={absent: "nf4"})
    for part in present:
        if part == "head" and name == "gpt2-124m":
            continue  # tied to the embeddings
        best = plan(**question, parts={**frozen, part: "trained"}).best
        assert 0 < best.trained_parameters < best.architecture.num_parameters
        assert best.kind != "adapters"


WRONG: dict[str, tuple[Any, ...]] = {
    "price": (math.nan, -1.0, 0.0, math.inf, "1", 2.5),
    "tokens": (math.nan, 0.5, math.inf, "1e9"),
    "lora": (-1, 1.5, math.nan, "16", 99_999_999),
    "chips": (1.5, 0, -8, math.nan, True),
    "sequence_length": (0, 512.5, math.nan),
    "tokens_per_step": (0, math.nan, math.inf, 100),
    "interconnect_gbit_per_second": (0, -1.0, math.nan, "fast"),
    "like": (-1.0, 0.0, math.nan, math.inf, 7e7),
    "base": ("nf5", "float8", "nf4"),
    "batch": (TOKENS,),
    "program": ("torchtitn", "los=whole", "loss=none"),
    "parts": (
        {"head": 3}, {"reference": "trained"}, {"heads": "nf4"}, {"mlp": "lora99999999"}, {"head": "nf5"},
        {"head": "nf4+trained"}, dict.fromkeys(PARTS, "frozen"),
    ),
    "foo": (3,),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_values_that_no_question_has_are_refused(name: str) -> None:
    for value in WRONG[name]:
        assert refused(**{name: value})


def test_a_program_is_read_with_its_fields() -> None:
    program = read_program("torchtitan, loss=chunked, release=true")
    assert (program.gathered, program.loss, program.release) == ("bfloat16", "chunked", True)


OF_MODULES: dict[str, dict[str, Any]] = {
    "tokens_per_step": {"tokens_per_step": 65_536},
    "sequence_length": {"sequence_length": 4096},
    "lora": {"lora": 16},
    "base": {"base": "nf4"},
    "parts": {"parts": {"head": "frozen"}},
    "parts ": {"program": with_parts(DEFAULT, {"head": "frozen"})},
    "recompute": {"layout": "recompute=full"},
    "batch": {"batch": None},
    "batch ": {"batch": TOKENS[:, :0]},
}


@pytest.mark.parametrize("name", OF_MODULES)
def test_the_batch_of_a_module_is_its_step(name: str) -> None:
    """What would need another count of the step is refused."""
    question = {"model": module(), "batch": TOKENS, **OF_MODULES[name]}
    assert name.strip() in refused(**question)


def test_an_optimizer_of_vectors_has_no_storage_of_matrices() -> None:
    model = module()
    optimizer = ng.AdamW([model[1].bias], lr=1e-3, storage="float32")
    assert "matrices" in refused(model=model, batch=TOKENS, optimizer=optimizer)


# ── chips of files ────────────────────────────────────────────────────────────────────────────────

LIKE = "like = 'H100-SXM'\n"
NUMBER_FIELDS = [
    row.name for row in dataclasses.fields(Chip) if str(row.type).startswith(("int", "float"))
]


def chip_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("field", NUMBER_FIELDS)
def test_a_chip_has_numbers_above_0(field: str, tmp_path: Path) -> None:
    for value in ("nan", "inf", "-1", "true", "'80'", "[80]"):
        assert field in refused(chip=chip_file(tmp_path, f"{LIKE}{field} = {value}\n"))
    assert getattr(read_chip(chip_file(tmp_path, f"{LIKE}{field} = 50\n")), field) == 50


@pytest.mark.parametrize(
    "text",
    [
        "memory_gb = 94",
        f"{LIKE}memry_gb = 94",
        f"{LIKE}peak_tflops = 989",
        f"{LIKE}[peak_tflops]\nbfloat16 = -989",
        f"{LIKE}[peak_tflops]\nfloat8_e4m3fn = 989",
        f"{LIKE}[measured_tflops]\nbfloat16 = 98900",
        f"{LIKE}official = 1",
        f"{LIKE}vendor = 1",
    ],
)
def test_a_chip_file_says_what_a_chip_is(text: str, tmp_path: Path) -> None:
    assert "mine.toml" in refused(chip=chip_file(tmp_path, text))


# ── a measured run ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("factor", [0.3, 1.5])
def test_a_measured_run_scales_all_rows_and_changes(factor: float) -> None:
    """All terms of all rows are scaled, so that no time is negative and the order stays."""
    question: dict[str, Any] = {
        "model": "llama-1b", "recipes": ["bfloat16/master", "bfloat16/word"], "chip": ["RTX-4090", "L40S"],
        "sequence_length": 65_536,
    }  # fmt: skip
    free = plan(**question)
    like = plan(**question, like=factor * free.best.tokens_per_second)
    assert free.instead
    assert f"{factor:.2f} × the planned speed" in like.sentences()[-1]
    changed = [job for _, job in free.instead], [job for _, job in like.instead]
    for row, corrected in (
        *zip(free.options, like.options, strict=True),
        *zip(*changed, strict=True),
    ):
        assert row.recipe == corrected.recipe and row.layout == corrected.layout
        for term, scaled in zip(row.step, corrected.step, strict=True):
            assert scaled.value == pytest.approx(term.value / factor)
