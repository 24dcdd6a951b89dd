"""The question as users put it: what is printed, what a program gets, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from narrowgauge.cli.main import main
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.profiling import cast_error, measurement
from narrowgauge.profiling.costs import Round
from narrowgauge.profiling.layer_plan import timed_settings
from narrowgauge.profiling.profile_report import Loss
from narrowgauge.profiling.profiler import profile
from narrowgauge.spec.computes import casts_made
from narrowgauge.spec.notation import parse, parse_names, parse_table
from narrowgauge.spec.recipes import Recipe


def call(*words: str) -> Result:
    return CliRunner().invoke(main, ["profile", *words], prog_name="narrowgauge")


def predicted(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", "layers", *words], prog_name="narrowgauge")


def made_up(kinds: Any, recipes: list[Recipe], config: Any, **_: Any) -> list[Round]:
    """A machine on which int8-row halves a matmul and casts are free, and all others double it."""
    from narrowgauge.spec.computes import COMPUTES

    table = {}
    for shape, setting in timed_settings(kinds, recipes):
        each = {"bfloat16": 2e-3, "int8-row": 1e-3}.get(setting.compute, 4e-3)
        casts = {} if setting.is_plain else dict.fromkeys(casts_made(COMPUTES[setting.compute]), 1e-6)
        table[shape, setting] = {**casts, "output": each, "grad_input": each, "grad_weight": each}
    return [Round({parse("bfloat16/word"): 1.0}, table)] * 3


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "measure", made_up)
    monkeypatch.setattr(measurement, "free_bytes", lambda: 1 << 40)
    lost = (Loss("model.layers.0.mlp.up_proj", "grad_weight.left", "gradient", 12.5, 0.25, 0.5),)
    monkeypatch.setattr(cast_error, "losses", lambda recipes, config: [lost for _ in recipes])


def test_a_prediction_says_that_it_is_one_and_what_it_takes() -> None:
    result = predicted("--model", "llama-1b", "--recipe", "float8-tensor/word, nvfp4", "--chip", "h100-sxm5")
    assert result.exit_code == 0, result.stderr
    assert "PREDICTED for H100-SXM5-80GB" in result.stdout
    assert "emulated: H100-SXM5-80GB does not multiply float4_e2m1fn" in result.stdout
    assert "note: a prediction from the data sheet of H100-SXM5-80GB; nothing was run." in result.stdout
    assert "72% of 989 TFLOP/s" in result.stdout
    for pattern in ("model.layers.*.self_attn.q_proj", "model.layers.*.mlp.down_proj", "lm_head"):
        assert result.stdout.count(pattern) >= 2
    assert result.stderr == ""


def test_json_is_an_object_for_each_recipe() -> None:
    result = predicted("--model", "llama-8b", "--recipe", "float8-row,int8-row", "--chip", "H200", "--json")
    rows = json.loads(result.stdout)
    assert [row["recipe"] for row in rows] == ["float8-row/word", "int8-row/word"]
    for row in rows:
        assert row["predicted"] is True
        assert row["multiplied"] == "native"
        assert row["step_ratio"] > 1
        assert parse_table(row["fastest"]).storage.name == "word"
        layers = {layer["pattern"]: layer for layer in row["layers"]}
        assert len(layers) == 8
        down = layers["model.layers.*.mlp.down_proj"]
        assert (down["out_features"], down["in_features"], down["count"]) == (4096, 14336, 32)
        apart = [down[f"{way}_{what}_seconds"] for way in ("forward", "backward") for what in ("cast", "matmul")]
        assert sum(apart) == pytest.approx(sum(down["parts_seconds"].values())) == pytest.approx(down["seconds"])
        assert layers["lm_head"]["verdict"] == "kept"


def test_what_was_measured_is_reported(machine: None) -> None:
    result = call("--model", "llama-8m", "--recipes", "int8-row/word,float8-row/word")
    assert result.exit_code == 0, result.stderr
    assert "measured on this" in result.stdout and "PREDICTED" not in result.stdout
    lines = result.stdout.splitlines()
    by_name = {line.split()[0]: line for line in lines if line and "/word" in line.split()[0]}
    # 56 layers of 6 ms; the row halves or doubles them.
    assert f"{1 / (1 - 56 * 3e-3):.2f} ×" in by_name["int8-row/word"]
    assert f"{1 / (1 + 56 * 6e-3):.2f} ×" in by_name["float8-row/word"]
    assert "Fastest: int8-row/word, 1.20 × bfloat16/word. As a recipe file:" in result.stdout


def test_the_recipe_file_that_is_printed_is_one(machine: None, tmp_path: Path) -> None:
    def file_in(text: str) -> Recipe:
        (tmp_path / "fastest.toml").write_text(text.split("\n", 1)[1].split("note:")[0])
        return parse(tmp_path / "fastest.toml")

    text = profile("llama-8m", [parse("float8-row/word")]).text()
    assert text.startswith("None of these is faster here: bfloat16/word is the fastest.")
    assert file_in(text) == parse("bfloat16/word")
    some = profile("llama-1b", [parse("float8-tensor")], chip="H100-SXM5").text()
    assert "with 4 kinds of layers kept" in some
    assert some.count("[[override]]\npattern = ") == 4
    recipe = file_in(some)
    rows = {name: recipe.compute_of(f"model.layers.3.{name}").name for name in ("self_attn.q_proj", "mlp.up_proj")}
    assert rows == {"self_attn.q_proj": "bfloat16", "mlp.up_proj": "float8-tensor"}


def test_numerics_are_printed_worst_first(machine: None) -> None:
    result = call("--model", "llama-8m", "--recipes", "int8-row/word", "--numerics")
    assert "int8-row/word: the 1 worst of 1 casts" in result.stdout
    assert "12.5    25.00%     50.00%" in result.stdout
    assert "measured in the first 3 steps on 'stdlib'" in result.stdout
    [row] = json.loads(call("--model", "llama-8m", "--recipes", "int8-row/word", "--numerics", "--json").stdout)
    assert row["losses"][0]["sqnr_db"] == 12.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "lama-8m", "--recipes", "int8-row"], "no model is named 'lama-8m'. Did you mean 'llama-8m'?"),
        (["--model", "llama-8m", "--recipes", "int8-roe/word"], "Did you mean 'int8-row'?"),
        (["--model", "llama-8m", "--recipes", ","], "no recipe was named."),
        (["--model", "llama-8m", "--recipes", "int8-row", "--sequence-length", "4096"], "Use --sequence-length 2048"),
        (["--model", "llama-70b", "--recipes", "int8-row"], "Predict it for another machine: narrowgauge plan layers"),
        (["--recipes", "int8-row"], "Missing option '--model'"),
    ],
)
def test_a_mistake_costs_one_line(words: list[str], message: str) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert message in result.stderr


@pytest.mark.parametrize(("chip", "message"), [("H300", "no chip is named 'H300'."), ("A100", "2 names begin with it")])
def test_a_mistaken_chip_costs_one_line(chip: str, message: str) -> None:
    result = predicted("--model", "llama-8m", "--recipe", "int8-row", "--chip", chip)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert message in result.stderr


def test_a_prediction_by_its_former_command_says_the_present_one() -> None:
    result = call("--model", "llama-8m", "--recipes", "int8-row", "--chip", "H200", "--numerics")
    note, error = result.stderr.splitlines()
    assert result.exit_code == 2 and "narrowgauge plan layers" in note and "Omit --chip" in error


def test_a_recipe_that_is_named_twice_counts_once() -> None:
    asked = profile("llama-1m", parse_names("int8-row,int8-row/word,float8-row"), chip="H200")
    assert [cost.recipe.name for cost in asked.costs] == ["int8-row/word", "float8-row/word"]
    with pytest.raises(NarrowgaugeError, match="no recipe was named"):
        profile("llama-1m", [], chip="H200")


def test_what_is_not_counted_is_noted(tmp_path: Path) -> None:
    (tmp_path / "phases.toml").write_text('recipe = "bfloat16/word"\n[[phase]]\nuntil = 0.9\ncompute = "int8-row"\n')
    notes = " ".join(profile("llama-1m", [parse("unit"), parse(tmp_path / "phases.toml")], chip="H200").notes)
    assert "unit changes the whole model" in notes
    assert "no kernel of this version has run on a GPU" in notes
    assert "bfloat16/word has phases; reported is the last one, in bfloat16." in notes
