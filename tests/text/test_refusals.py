"""What is refused, as one table: each refusal is one line that names what was asked and gives one
advice.

The regular expressions hold the essential words only. Nothing is changed or written by what is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import narrowgauge as ng
from narrowgauge.cli.main import main
from narrowgauge.errors import (
    ChipError,
    DataError,
    FormatError,
    NarrowgaugeError,
    RecipeError,
    RecordError,
)
from narrowgauge.matmul.inference import quantize_for_inference
from narrowgauge.numerics.rounding import round_to
from narrowgauge.planner.layouts import read_layout
from narrowgauge.planner.plan import plan
from narrowgauge.runs.record import read_run
from narrowgauge.spec.notation import get_compute, parse

# ── commands: status 2, one line on standard error, nothing on standard output; test_golden has mor

CHIP = "plan run --model llama-8b --chip H100-SXM"
COMMANDS = [
    ("show recipe", "UsageError", "NAME"),
    ("train --config nowhere.toml", "DataError", r"nowhere\.toml"),
    ("train --out nowhere", "DataError", "narrowgauge tokenize TEXT OUT"),
    ("compare --seeds 2", "UsageError", "'--recipes'"),
    ("plan run", "UsageError", "--model"),
    (f"{CHIP} --layout head", "RecipeError", "'head'.*NAME=VALUE"),
    (f"{CHIP} --chips eight", "UsageError", "'eight'"),
    ("plan run --model llama-8b --cluster no.toml", "DataError", r"no\.toml"),
    ("plan run --model llama-8b", "ChipError", "no machine.*--chip"),
    (f"{CHIP} --rule moun", "RecipeError|UsageError", "moun"),
    ("plan run --model gpt2-124m --chip H100-SXM --sequence-length 4096", "RecipeError|NarrowgaugeError", "1,024 positions"),
    ("plan scaling 128:10d", "DataError", "two or more"),
    ("plan scaling 128:10d,256:7d --at 0", "UsageError", "from 1 on"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "kind", "words"), COMMANDS, ids=[row[0] for row in COMMANDS])
def test_a_command(
    line: str, kind: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, line.split(), prog_name="narrowgauge")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), (
        result.exception
    )
    assert re.match(rf"(?:{kind}): ", result.stderr), result.stderr
    assert re.search(words, result.stderr), result.stderr
    assert not any(tmp_path.iterdir())


# ── calls ─────────────────────────────────────────────────────────────────────────────────────────


def weights(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4, dtype=dtype))]


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16))


def in_float16() -> None:
    model = layers().half()
    ng.swap_linears(model, "float8-row")
    model(torch.ones(2, 16, dtype=torch.float16))


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # recipes by name
    "bf16": (lambda: parse("bf16"), RecipeError, "'bf16'.*'bfloat16/word'"),
    "a reduction": (lambda: parse("bfloat16/word/reproducibl"), RecipeError, "'reproducibl'"),
    "two meanings": (lambda: get_compute("float8"), RecipeError, "float8-row.*float8-tensor"),
    # optimizers
    "lr": (lambda: ng.AdamW(weights(), lr=-1.0), RecipeError, "lr = -1.*at least 0"),
    "beta": (lambda: ng.AdamW(weights(), betas=(0.9, 1.0)), RecipeError, r"beta2 = 1\.0.*below 1"),
    "storage": (lambda: ng.AdamW(weights(), storage="wrod"), RecipeError, "mean 'word'"),
    "float64": (lambda: ng.AdamW(weights(torch.float64)), RecipeError, r"'word'.*float64.*model\.float\(\).*'float64'"),
    "a matrix rule": (lambda: ng.Muon(weights(torch.float32), storage="float64"), RecipeError, "compute in float32"),
    "no parameters": (lambda: ng.AdamW([]), ValueError, "empty"),
    # models
    "a model of float16": (lambda: ng.prepare(layers().half(), "bfloat16/word"), RecipeError, "bfloat16/word.*float16"),
    "inference": (lambda: quantize_for_inference(layers(), "int7"), RecipeError, "'int7'"),
    "a model in float16": (in_float16, RecipeError, "float8-row.*float16.*bfloat16 weights"),
    # casts
    "a format": (lambda: round_to(torch.ones(3), "float8_e4m3fm"), FormatError, "mean 'float8_e4m3fn'"),
    "a rounding": (lambda: round_to(torch.ones(3), "bfloat16", "up"), FormatError, "'up'"),
    "no seed": (lambda: round_to(torch.ones(3), "bfloat16", "stochastic"), FormatError, "seed"),
    # plans
    "a layout": (lambda: read_layout("zero=4"), RecipeError, "zero = 4.*0, 1, 2, 3"),
    "what does not divide": (
        lambda: plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8, layout={"tensor": 3}),
        NarrowgaugeError, "tensor.: 3.*does not divide llama-8b",
    ),
    "a cluster and chips": (lambda: plan("llama-8b", cluster="it.toml", chips=8), ChipError, "its own chips"),
    "a module": (lambda: plan(layers(), chip="H100-SXM"), DataError, "plan Sequential: .*config"),
    # runs
    "no run": (lambda: read_run(Path("nowhere")), RecordError, "nowhere"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call(name: str) -> None:
    call, kind, words = CALLS[name]
    with pytest.raises(kind) as refused:
        call()
    text = str(refused.value)
    assert "\n" not in text and re.search(words, text), text
    if isinstance(refused.value, NarrowgaugeError):
        assert refused.value.advice or "must be" in text, text


# ── files ─────────────────────────────────────────────────────────────────────────────────────────

NODES = 'chip = "H100-SXM"\n'
CLUSTERS = [
    ("chips = 8", "does not say its chip"),
    (f"{NODES}chps = 8", "mean 'chips'"),
    (f"{NODES}chips = 8\nchips_per_node = 0", "chips_per_node = 0"),
    ("[[nodes", r"cluster\.toml: Expected"),
]


@pytest.mark.parametrize(("text", "words"), CLUSTERS)
def test_a_cluster(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises((RecipeError, DataError, ChipError), match=words) as refused:
        plan("llama-8b", cluster=path)
    assert "\n" not in str(refused.value)
