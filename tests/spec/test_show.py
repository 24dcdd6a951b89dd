"""The tables: complete, equal to the words they are made of, and the same figures for every reader."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import pytest

from narrowgauge.errors import FormatError, NarrowgaugeError, RecipeError
from narrowgauge.spec import computes, formats, notation, propagation, recipes, show, tables
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.computes import COMPUTES, PLACES
from narrowgauge.spec.frameworks import FRAMEWORKS
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import ALIASES
from narrowgauge.spec.recipe_sets import RECIPE_SETS
from narrowgauge.spec.update_rules import UPDATE_RULES

NAMES = {
    "formats": list(formats.FORMATS),
    "recipes": notation.representative_names(),
    "aliases": list(ALIASES),
    "sets": list(RECIPE_SETS),
    "computes": computes.names(),
    "scales": list(propagation.RULES),
    "storages": list(recipes.STORAGES),
    "chips": list(CHIPS),
    "models": list(MODELS),
    "frameworks": list(FRAMEWORKS),
    "rules": list(UPDATE_RULES),
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
        recipe = notation.parse(row["name"])
        assert recipe.name == row["name"]
        assert recipe.bytes_per_param == row["bytes_per_param"]
        assert all(notation.parse(alias) == recipe for alias in row["aliases"])


def test_every_alias_of_a_recipe_is_marked_once() -> None:
    marked = [alias for row in show.rows("recipes") for alias in row["aliases"]]
    assert sorted(marked) == sorted(
        [*(row.name for row in ALIASES.values() if row.is_taken), *(n for n in COMPUTES if n not in ALIASES)]
    )


def test_each_compute_and_storage_is_described_once_and_named_elsewhere() -> None:
    table = show.table("recipes")
    cells = [{column.title: column.cell(row) for column in table.columns} for row in table.rows]
    assert list(cells[0]) == ["recipe", "also called", "B/param", "for", "loses", "native"]
    told = [cell["for"] for cell in cells if not cell["for"].startswith("as ")]
    assert told == [row.purpose for row in COMPUTES.values()]
    lost = [cell["loses"] for cell in cells if not cell["loses"].startswith("as ")]
    assert sorted(lost) == sorted(row.loses for row in recipes.STORAGES.values())
    by_name = {row["name"]: row for row in table.rows}
    for row, cell in zip(table.rows, cells, strict=True):
        for title, key in (("for", "purpose"), ("loses", "loses")):
            told_at = cell[title].removeprefix("as ") if cell[title].startswith("as ") else row["name"]
            assert by_name[told_at][key] == row[key]


def test_rows_of_computes_say_every_cast() -> None:
    rows = {row["name"]: row for row in show.rows("computes")}
    for name, row in rows.items():
        assert list(row["casts"]) == [f"{place}.{side}" for place in PLACES for side in ("left", "right")]
        assert notation.parse(f"{name}/{notation.default_storage(name)}").storage.name == row["storage"]
    cast = rows["float8-block"]["casts"]["output.right"]
    assert (cast["format"], cast["granularity"], cast["scale"]) == ("float8_e4m3fn", "128x128", "power-of-two")
    assert rows["nvfp4"]["casts"]["grad_weight.left"]["bits"] == 4.5
    assert (rows["int8-row"]["kept_bytes"], rows["float8-row"]["kept_bytes"], rows["float32"]["kept_bytes"]) == (
        1,
        2,
        4,
    )
    assert rows["mxfp6"]["native"] == "" and "nowhere: emulated" in show.table("computes").plain()
    lines = {line.split()[0]: line for line in show.table("computes").plain().splitlines()}
    assert (
        "float8_e4m3fn, per tensor  " in lines["float8-tensor-e5m2"]
        and "float8_e5m2, per" in lines["float8-tensor-e5m2"]
    )
    assert lines["bfloat16"].count("bfloat16") == 3  # its name, both operands at once, the gradients


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
    found = show.table(table)
    lines = found.plain().splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == NAMES[table]
    assert not any(line.endswith(" ") for line in lines)
    for line, row in zip(lines[1:], found.rows, strict=True):
        assert all(column.cell(row) in line for column in found.columns)


def test_right_aligned_figures_end_where_their_head_ends() -> None:
    lines = show.table("storages").plain().splitlines()
    end = lines[0].index("B/param") + len("B/param")
    figures = [str(int(row.bytes_per_param)) for row in recipes.STORAGES.values()]
    assert {"16", "7"} < set(figures)
    assert [line[:end].split()[-1] for line in lines[1:]] == figures


def test_a_bar_inside_a_cell_does_not_split_it() -> None:
    table = tables.Table((tables.Column("a", "a"),), [{"a": "x|y"}])
    assert table.markdown().splitlines()[2] == r"| x\|y |"


def test_latex_is_escaped_and_aligned() -> None:
    columns = (tables.Column("name", "name", code=True), tables.Column("a & b", "share", right=True))
    text = tables.Table(columns, [{"name": "a_b", "share": "5% ± 1"}]).latex()
    assert text.splitlines() == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"name & a \& b \\",
        r"\midrule",
        r"\texttt{a\_b} & 5\% $\pm$ 1 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_comma_separated_values_are_those_of_the_rows_in_full() -> None:
    rows = [{"name": "a,b", "loss": 0.1 + 0.2, "at": [1, 2]}, {"name": "c", "seeds": 3}]
    found = list(csv.DictReader(io.StringIO(tables.Table((tables.Column("name", "name"),), rows).csv())))
    assert [row["name"] for row in found] == ["a,b", "c"]
    assert float(found[0]["loss"]) == 0.1 + 0.2 and json.loads(found[0]["at"]) == [1, 2]
    assert found[1] == {"name": "c", "loss": "", "at": "", "seeds": "3"}


def test_parts_of_a_recipe_sum_to_its_bytes() -> None:
    for name in [
        *notation.representative_names(),
        "bfloat16/tail8+bfloat16+float32",
        "bfloat16/bfloat16-pair+e6m5+float32",
    ]:
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


def test_the_casts_of_a_recipe_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    detail = show.detail_recipe("fp8-tensor-e5m2/master")
    assert detail["casts"] == {
        "output.left": "float8_e4m3fn, per tensor", "output.right": "float8_e4m3fn, per tensor",
        "grad_input.left": "float8_e5m2, per tensor", "grad_input.right": "float8_e4m3fn, per tensor",
        "grad_weight.left": "float8_e5m2, per tensor", "grad_weight.right": "float8_e4m3fn, per tensor",
    }  # fmt: skip
    assert detail["accumulation"] == {"output": "fast", "grad_input": "promoted", "grad_weight": "promoted"}
    assert detail["kept_bytes"] == 1 and detail["linears_kept"] == ["lm_head", "*.lm_head", "*gate", "*router"]
    assert (detail["phases"], detail["evaluation"], detail["transform"]) == ([], None, "")
    tables.write(show.page_recipe("fp8-tensor-e5m2/master"))
    lines = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
    gradient = ["float8_e5m2, per tensor", "float8_e4m3fn, per tensor", "promoted"]
    assert ["output", *["float8_e4m3fn, per tensor"] * 2, "fast"] in lines and ["grad_weight", *gradient] in lines
    assert ["kept for backward", "float8_e4m3fn codes, 1 byte"] in lines
    assert ["linears left plain", "lm_head, *.lm_head, *gate, *router"] in lines
    assert ["native", COMPUTES["float8-tensor-e5m2"].native] in lines


def test_a_recipe_says_what_its_weights_take_without_training(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        name: show.detail_recipe(name)["inference_bytes"]
        for name in ("int8-outlier+threshold=4", "int8-outlier-codes", "nvfp4")
    }
    whole = 1 + 4 / 4096
    assert list(found.values()) == [
        {"weight": whole, "outlier_weight": 2},
        {"weight": whole, "outlier_weight": 0},
        None,
    ]
    tables.write(show.page_recipe("int8-outlier+threshold=4/word"))
    out = capsys.readouterr().out
    assert (
        "1.001 bytes a weight as codes (4,096 × 4,096); 2 more for each weight of a column that may hold outliers"
        in out
    )
    assert "columns from 4 on in 16 bits" in out and "int8-outlier+threshold=4/word" in out


def test_what_changes_within_a_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'recipe = "bf16/word"\nevaluation = "fp32"\n[[phase]]\nuntil = 0.1\ncompute = "fp16"\n'
        '[[phase]]\nuntil = 0.9\ncompute = "mxfp8"\n[[override]]\npattern = "*.up_proj"\ncompute = "int8-row"\n'
    )
    detail = show.detail_recipe(str(path))
    assert detail["phases"] == [{"until": 0.1, "compute": "float16"}, {"until": 0.9, "compute": "mxfp8"}]
    assert detail["evaluation"] == "float32"
    assert detail["overrides"] == [{"pattern": "*.up_proj", "storage": None, "compute": "int8-row"}]
    tables.write(show.page_recipe(str(path)))
    out = capsys.readouterr().out
    assert "float16 until 0.1, mxfp8 until 0.9, then bfloat16\n" in out
    assert re.search(r"^computed otherwise +\*\.up_proj in int8-row$", out, re.MULTILINE)
    assert re.search(r"^evaluated in +float32$", out, re.MULTILINE) and "stored otherwise" not in out


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
    assert detail["overrides"] == [{"pattern": "*.embed*", "storage": "split", "compute": None}]
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
    with pytest.raises(FormatError, match="is not a number"):
        show.detail_value(text)


@pytest.mark.parametrize("text", ["1e999", "-1e999"])
def test_what_float64_cannot_hold_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="outside the range of float64"):
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


@pytest.mark.parametrize("page", [show.page_format("int4"), show.page_value("0.1"), show.page_recipe("bf16/word")])
def test_pages_print_into_a_pipe(page: list[tables.Table], capsys: pytest.CaptureFixture[str]) -> None:
    tables.write(page)
    out = capsys.readouterr().out
    assert out.count("\n\n") == len(page) - 1
    assert "\x1b" not in out


PAGES = {name: [show.table(name)] for name in NAMES} | {
    "bfloat16/word": show.page_recipe("bfloat16/word"),
    "float8-block-e5m2/tail8+bfloat16+float32": show.page_recipe("float8-block-e5m2/tail8+bfloat16+float32"),
    "int4": show.page_format("int4"),
    "0.1": show.page_value("0.1"),
}


@pytest.mark.parametrize("columns", [60, 80, 100, 132, 250])
@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_cut_or_broken_within_a_word_in_a_terminal(
    page: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    tables.write(PAGES[page])
    written = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert max(map(len, written.splitlines())) <= columns
    words = set(written.split())
    cells = [column.cell(row) for part in PAGES[page] for row in part.rows for column in part.columns]
    assert {word for cell in cells for word in cell.split()} <= words


def test_a_table_fits_its_frame_into_any_width_that_holds_its_words() -> None:
    table = tables.Table(
        (tables.Column("name", "name", code=True), tables.Column("says", "says")),
        [{"name": "a" * 20, "says": "word " * 30}, {"name": "b", "says": "c" * 30}],
    )
    for width in range(20, 260):
        found = table.widths(width)
        assert bool(found) == (width >= 2 + 23 + 33)
        assert not found or (sum(found) + 6 <= width - 2 and found[0] == 20 and 30 <= found[1] <= 150)


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
