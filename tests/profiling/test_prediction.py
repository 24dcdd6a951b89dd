"""The roofline: figures worked out by hand, limits, and what a chip cannot do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from narrowgauge.errors import ChipError
from narrowgauge.planner.inputs.efficiency import best_share, shares_of
from narrowgauge.planner.time.roofline import (
    Setting,
    Shape,
    bytes_seconds,
    describe_support,
    matmul_seconds,
    operation_seconds,
)
from narrowgauge.profiling.costs import cost_of
from narrowgauge.profiling.layer_plan import kinds_of_preset
from narrowgauge.profiling.prediction import Step, assumptions, predict
from narrowgauge.spec.chips import CHIPS, get_chip
from narrowgauge.spec.computes import COMPUTES, casts_made
from narrowgauge.spec.models import MODELS, get_model
from narrowgauge.spec.notation import parse

H200 = get_chip("H200")
START = shares_of(H200)["kernel_seconds"].value
NARROW = [row for row in COMPUTES.values() if not row.is_wide]


def test_a_large_matmul_takes_its_multiply_adds_and_a_thin_one_its_bytes() -> None:
    large = matmul_seconds(2.0 * 8192**3, 3 * 2 * 8192**2, "bfloat16", H200)
    assert large == pytest.approx(2 * 8192**3 / (0.9 * 794.5e12) + START)
    thin = matmul_seconds(2.0 * 8192 * 8192, 2 * 8192 * 8192, "bfloat16", H200)
    assert thin == pytest.approx(2 * 8192 * 8192 / (0.8 * 4800e9) + START)


def test_a_cast_takes_the_bytes_it_reads_and_writes() -> None:
    tokens, shape = 4096, Shape(1024, 512)
    parts = operation_seconds(shape, Setting("float8-row"), tokens, H200)
    assert parts["output.left"] == pytest.approx(bytes_seconds(tokens * 512 * (2 + 1), H200) + START)
    assert parts["output.right"] == pytest.approx(bytes_seconds(1024 * 512 * (2 + 1), H200) + START)
    assert parts["grad_weight.left"] == pytest.approx(bytes_seconds(tokens * 1024 * (2 + 1), H200) + START)
    # A scale of the whole tensor is known only once all of it was read.
    whole = operation_seconds(shape, Setting("float8-tensor"), tokens, H200)
    assert whole["output.left"] == pytest.approx(bytes_seconds(tokens * 512 * (2 + 2 + 1), H200) + START)


@pytest.mark.parametrize("row", NARROW, ids=lambda row: row.name)
def test_a_part_for_each_cast_and_matmul(row: object) -> None:
    parts = operation_seconds(Shape(256, 128), Setting(row.name), 512, H200)  # type: ignore[attr-defined]
    assert set(parts) == {*casts_made(row), "output", "grad_input", "grad_weight"}  # type: ignore[arg-type]
    assert all(seconds > 0 for seconds in parts.values())


def test_emulated_rows_multiply_at_the_rate_of_what_they_are_emulated_in() -> None:
    shape, tokens = Shape(4096, 4096), 8192
    plain = operation_seconds(shape, Setting("bfloat16"), tokens, H200)
    emulated = operation_seconds(shape, Setting("mxfp8"), tokens, H200)
    native = operation_seconds(shape, Setting("float8-tensor"), tokens, H200)
    assert emulated["output"] == pytest.approx(plain["output"])
    assert native["output"] == pytest.approx((plain["output"] - START) * 794.5 / 1453.4 + START)


@pytest.mark.parametrize(
    ("row", "chip", "said"),
    [
        ("float8-row", "H100-SXM5", "native"),
        ("float8-row-e5m2", "H100-SXM5", "native"),
        ("float8-block", "H100-SXM5", "native"),
        ("float8-block", "B200", "emulated: no kernel for float8-block on B200-SXM-180GB here"),
        ("float8-block-e5m2", "H100-SXM5", "emulated: no kernel for float8-block-e5m2 on H100-SXM5-80GB here"),
        ("mxfp8", "B200", "native"),
        ("mxfp8", "H100-SXM5", "emulated: no kernel for mxfp8 on H100-SXM5-80GB here"),
        ("mxfp4", "B200", "native"),
        ("nvfp4", "RTX-5090", "native"),
        ("mxfp4", "RTX-5090", "emulated: no kernel for mxfp4 on RTX-5090 here"),
        ("float8-row", "MI355X", "native"),
        ("tfloat32", "A100-SXM4-80GB", "native"),
        ("tfloat32", "MI300X", "emulated: no kernel for tfloat32 on MI300X here"),
        ("float8-row", "A100-SXM4-80GB", "emulated: A100-SXM4-80GB does not multiply float8_e4m3fn"),
        ("float8-row", "MI300X", "emulated: MI300X does not multiply float8_e4m3fn"),
        ("nvfp4", "H100-SXM5", "emulated: H100-SXM5-80GB does not multiply float4_e2m1fn"),
        ("int8-row", "A100-SXM4-80GB", "native"),
        ("bfloat16", "MI300X", "native"),
    ],
)
def test_what_a_chip_multiplies_itself(row: str, chip: str, said: str) -> None:
    assert describe_support(COMPUTES[row], get_chip(chip)) == said


def test_efficiency_names_its_source() -> None:
    own = best_share("float8_e5m2", H200)
    assert (own.value, own.source) == (1453.4 / 1979, "its own best published matmul")
    share = best_share("int8", H200)
    assert 0.5 < share.low < share.value < share.high < 0.9
    source = share.source
    assert source.startswith("the median of") and "bfloat16" in source


@pytest.mark.parametrize(
    "chip", [chip for chip in CHIPS.values() if "bfloat16" in chip.peak_tflops], ids=lambda c: c.name
)
def test_every_row_has_a_prediction_on_every_chip(chip: object) -> None:
    model = MODELS["llama-1m"]
    kinds = kinds_of_preset(model)
    recipes = [parse(f"{row.name}/word") for row in NARROW]
    made = predict(kinds, recipes, Step(model, 8, 256), chip)  # type: ignore[arg-type]
    [(base, seconds)] = made.steps.items()
    assert base == parse("bfloat16/word")
    assert 0 < seconds < 1
    assert assumptions(recipes, chip)  # type: ignore[arg-type]


def test_published_steps_are_met_within_a_tenth() -> None:
    """Llama 3 8B, sequences of 8,192, eight H100: tensorwise 1.25 and rowwise 1.10 × bfloat16 (torchao's README)."""
    model, chip = get_model("llama-8b"), get_chip("H100-SXM5")
    kinds, step = kinds_of_preset(model), Step(model, 1, 8192)
    recipes = [parse("float8-tensor/word"), parse("float8-row/word")]
    rounds = [predict(kinds, recipes, step, chip)]
    no_bytes = {setting: 0.0 for _, setting in rounds[0].table}
    expected = [cost_of(recipe, kinds, rounds, step.num_tokens, no_bytes).step_ratio for recipe in recipes]
    assert expected == pytest.approx([1.25, 1.10], rel=0.1)
    assert expected[0] > expected[1]


def test_what_does_not_fit_a_chip_is_refused() -> None:
    model = get_model("llama-70b")
    with pytest.raises(ChipError, match="llama-70b in float8-row/word takes 5"):
        predict(kinds_of_preset(model), [parse("float8-row/word")], Step(model, 1, 128), H200)
    small = get_model("llama-1m")
    with pytest.raises(ChipError, match="does not multiply bfloat16"):
        predict(kinds_of_preset(small), [parse("float8-row/word")], Step(small, 1, 128), get_chip("V100"))


def test_a_prediction_loads_no_torch() -> None:
    lines = [
        "import sys",
        "from narrowgauge.profiling.profiler import profile",
        "from narrowgauge.spec.notation import parse_names",
        "profile('llama-1b', parse_names('float8-row,int8-row'), chip='H100-SXM5').tables()",
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])",
    ]
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr
