"""What ``plan --exact`` counts agrees with what the plan's formulas say, and what it cannot count is refused."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from narrowgauge.cli.main import main
from narrowgauge.errors import DataError
from narrowgauge.planner.plan import plan
from narrowgauge.profiling.exact_memory import exact_rows, exact_table


@pytest.mark.parametrize("recipe", ["bfloat16/word", "float8-row/word"])
def test_a_layer_keeps_what_the_plan_says(recipe: str) -> None:
    found = plan("llama-1m", recipes=[recipe], chip="H100-SXM", sequence_length=128)
    row = exact_rows(found)[0]
    assert row["counted"] == pytest.approx(row["planned"], rel=0.03)
    assert row["exact"] == pytest.approx(row["memory"], rel=0.03)
    assert "planned" in exact_table([row]).plain()


def test_what_cannot_be_counted_is_refused() -> None:
    mixture = plan("mixtral-8x7b", recipes=["bfloat16/word"], chip="H200", chips=8)
    with pytest.raises(DataError, match="--layout fsdp2"):
        exact_rows(mixture)


def test_the_command_adds_a_table_and_a_key() -> None:
    words = [
        "plan",
        "--model",
        "llama-1m",
        "--chip",
        "H100-SXM",
        "--recipe",
        "bfloat16/word",
        "--sequence-length",
        "128",
        "--exact",
    ]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0 and "One layer, counted" in result.output
    found = json.loads(CliRunner().invoke(main, [*words, "--json"]).output)
    assert found["exact"][0]["recipe"] == "bfloat16/word"
