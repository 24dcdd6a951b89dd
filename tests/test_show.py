"""The tables: complete, equal to the words they are made of, and the same figures for every reader."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest

from narrowgauge import formats, recipes, show, tables
from narrowgauge.chips import CHIPS
from narrowgauge.errors import FormatError, NarrowgaugeError, RecipeError
from narrowgauge.models import MODELS

NAMES = {
    "formats": list(formats.FORMATS),
    "recipes": recipes.full_names(),
    "storages": list(recipes.STORAGES),
    "chips": list(CHIPS),
    "models": list(MODELS),
}


class Terminal(io.StringIO):
    """A standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("table", NAMES)
def test_each_table_holds_every_row_of_its_words(table: str) -> None:
    rows = show.rows(table)
    assert [row["name"] for row in rows] == NAMES[table]
    assert len({tuple(row) for row in rows}) == 1, "every row has the same keys"


@pytest.mark.parametrize("table", NAMES)
def test_json_holds_nothing_that_json_cannot_say(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    tables.write_json(show.rows(table))
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == NAMES[table]


def test_an_unknown_table_names_the_nearest() -> None:
    with pytest.raises(NarrowgaugeError, match="Did you mean 'storages'"):
        show.rows("storage")


def test_recipe_rows_parse_back_and_carry_the_words_figures() -> None:
    for row in show.rows("recipes"):
        recipe = recipes.parse(row["name"])
        assert recipe.name == row["name"]
        assert recipe.bytes_per_param == row["bytes_per_param"]
        assert all(recipes.parse(alias) == recipe for alias in row["aliases"])


def test_every_alias_of_a_recipe_is_marked_once() -> None:
    marked = [alias for row in show.rows("recipes") for alias in row["aliases"]]
    assert sorted(marked) == sorted([*recipes.ALIASES, *recipes.COMPUTES])


def test_bytes_of_the_flagship_are_those_of_naive_bfloat16() -> None:
    found = {row["name"]: row["bytes_per_param"] for row in show.rows("storages")}
    assert found["word"] == found["naive"] == 8
    assert found["float32"] == found["master"] == 16
    assert (found["exact"], found["split"]) == (14, 12)


@pytest.mark.parametrize("table", NAMES)
def test_markdown_has_a_cell_for_each_row_and_column(table: str) -> None:
    lines = show.markdown(table).splitlines()
    assert len(lines) == 2 + len(NAMES[table])
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    assert len({len(line) for line in cells}) == 1
    assert [line[0].strip() for line in cells[2:]] == [f"`{name}`" for name in NAMES[table]]


@pytest.mark.parametrize("table", NAMES)
def test_plain_text_is_aligned_and_uncut(table: str) -> None:
    lines = show.table(table).plain().splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == NAMES[table]
    assert not any(line.endswith(" ") or "…" in line for line in lines)


def test_right_aligned_figures_end_where_their_head_ends() -> None:
    lines = show.table("storages").plain().splitlines()
    end = lines[0].index("B/param") + len("B/param")
    figures = [str(int(row.bytes_per_param)) for row in recipes.STORAGES.values()]
    assert {"16", "7"} < set(figures)
    assert [line[:end].split()[-1] for line in lines[1:]] == figures


def test_a_bar_inside_a_cell_does_not_split_it() -> None:
    table = tables.Table((tables.Column("a", "a"),), [{"a": "x|y"}])
    assert table.markdown().splitlines()[2] == r"| x\|y |"


def test_parts_of_a_recipe_sum_to_its_bytes() -> None:
    for name in [*recipes.full_names(), "bfloat16/tail8+bfloat16+float32", "bfloat16/bfloat16-pair+e6m5+float32"]:
        detail = show.detail_recipe(name)
        assert sum(part["bytes"] for part in detail["stored"]) == detail["bytes_per_param"], name
        assert detail["example_memory_bytes"] == detail["bytes_per_param"] * detail["example_parameters"]


def test_a_recipe_in_full() -> None:
    detail = show.detail_recipe("bf16/word")
    assert detail["name"] == "bfloat16/word"
    assert detail["vectors"] == {"storage": "master", "bytes_per_param": 16}
    assert {"norms", "softmax", "rotary buffers", "residual", "logits", "loss"} <= set(detail["dtypes"])
    rounding = {part["what"]: part["rounding"] for part in detail["stored"]}
    assert rounding["weight that the model sees"] == "nearest"
    assert rounding["tail of the weight"] == rounding["first moment"] == "stochastic"


def test_what_is_not_cut_is_not_rounded() -> None:
    assert {part["rounding"] for part in show.detail_recipe("float32/float32")["stored"]} == {""}
    master = {part["what"]: part for part in show.detail_recipe("bfloat16/master")["stored"]}
    assert master["full copy of the weight"]["bytes"] == 4
    assert "tail of the weight" not in master


def test_each_part_of_an_expansion_is_shown() -> None:
    stored = {part["what"]: part for part in show.detail_recipe("float8/collage-plus")["stored"]}
    assert [what for what in stored if what.startswith("low part of the second moment")]
    kahan = {part["what"]: part["bytes"] for part in show.detail_recipe("bf16/kahan")["stored"]}
    assert kahan["low part of the weight"] == 2
    row = next(row for row in show.rows("storages") if row["name"] == "compact")
    assert (row["bytes_per_row"], row["stochastic"], row["arithmetic"]) == (8, True, "float32")
    assert row["state_bits"] == {"tail": 8, "exp_avg": 8, "exp_avg_sq": 8}


def test_a_recipe_file_shows_its_exceptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'recipe = "bfloat16/word"\nkeep = ["lm_head"]\n[[override]]\npattern = "*.embed*"\nstorage = "split"\n'
    )
    detail = show.detail_recipe(str(path))
    assert detail["keep"] == ["lm_head"]
    assert detail["overrides"] == [{"pattern": "*.embed*", "storage": "split"}]
    tables.write(show.page_recipe(str(path)))
    assert "*.embed* as split" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.1", 0.1), ("1e-8", 1e-8), ("0x1p-3", 0.125), ("-0x1.8p1", -3.0), (" 2 ", 2.0), ("-inf", -math.inf)],
)
def test_values_are_read_as_written(text: str, value: float) -> None:
    assert {row["name"]: row["value"] for row in show.detail_value(text)}["float64"] == value


def test_nan_stays_nan_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["name"]: row["value"] for row in show.detail_value("nan")}
    assert math.isnan(found["float8_e4m3fn"])
    assert found["float4_e2m1fn"] == 0
    tables.write_json(show.detail_value("nan"))
    assert {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)}["bfloat16"] == "nan"


@pytest.mark.parametrize("text", ["", "abc", "0x", "1/3", "--json"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="is no number"):
        show.detail_value(text)


@pytest.mark.parametrize("text", ["1e999", "-1e999"])
def test_what_float64_cannot_hold_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="beyond float64"):
        show.detail_value(text)


def test_one_tenth_as_known() -> None:
    found = {row["name"]: (row["hex"], row["value"]) for row in show.detail_value("0.1")}
    assert found["bfloat16"] == ("0x3dcd", 0.10009765625)
    assert found["float8_e4m3fn"] == ("0x1d", 0.1015625)


def test_formats_are_found_by_any_of_their_names() -> None:
    assert show.detail_format("bf16") == show.detail_format("torch.bfloat16")
    assert show.detail_format("e4m3")["max"] == 448
    assert "e4m3" in show.detail_format("float8_e4m3fn")["aliases"]
    with pytest.raises(FormatError, match="Did you mean"):
        show.detail_format("bfloat17")


def test_unknown_recipes_name_the_nearest() -> None:
    with pytest.raises(RecipeError, match="Did you mean 'word'"):
        show.detail_recipe("bfloat16/wrod")


@pytest.mark.parametrize("page", [show.page_format("int4"), show.page_value("0.1"), show.page_recipe("bf16")])
def test_pages_print_into_a_pipe(page: list[tables.Table], capsys: pytest.CaptureFixture[str]) -> None:
    tables.write(page)
    out = capsys.readouterr().out
    assert out.count("\n\n") == len(page) - 1
    assert "\x1b" not in out


@pytest.mark.parametrize(("columns", "framed"), [(140, True), (70, False)])
def test_a_terminal_shows_every_digit_whatever_its_width(
    columns: int, framed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    tables.write(show.page_value("0.1"))
    written = terminal.getvalue()
    assert ("──" in written) is framed
    for row in show.detail_value("0.1"):
        assert row["hex"] in written and repr(row["value"]) in written
