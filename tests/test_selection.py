"""The choice of tests: what the covering part holds, what a loop reports, what a change asks for, what is owed."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import selection
import tiers
from covering import chosen, exhaustive
from optim.pairs import PAIRS, kind_of_rule
from optim.scenarios import kind_of_code

ROOT = Path(__file__).parents[1]


def test_every_row_and_every_pair_of_kinds_are_in_the_covering_part() -> None:
    few = [PAIRS[place] for place in chosen(PAIRS, (kind_of_rule, kind_of_code))]
    for column in (0, 1):
        assert {pair[column] for pair in few} == {pair[column] for pair in PAIRS}
    kinds, every_kind = (
        {(kind_of_rule(rule), kind_of_code(storage)) for rule, storage in pairs} for pairs in (few, PAIRS)
    )
    assert kinds == every_kind
    assert len(kinds) <= len(few) <= 1.2 * len(kinds)


def test_a_value_without_kinds_meets_every_value_of_the_others() -> None:
    rows = list(itertools.product("abc", range(4), (True, False)))
    few = [rows[place] for place in chosen(rows, (None, None, None))]
    assert {(a, b) for a, b, _ in few} == set(itertools.product("abc", range(4))) and len(few) < len(rows)


def test_a_loop_fails_once_with_the_first_rows_and_their_reasons() -> None:
    seen = []

    @exhaustive("number, word", itertools.product(range(30), ["odd"]))
    def looped(number: int, word: str) -> None:
        seen.append(number)
        assert number % 2, f"{number} is not {word}"

    with pytest.raises(AssertionError) as failed:
        looped()
    said = str(failed.value)
    assert seen == list(range(30)) and said.startswith("15 of 30 rows fail:\n[0-odd] AssertionError: 0 is not odd")
    assert said.count("AssertionError") == 10 and "18 is not odd" in said and "20 is not odd" not in said


def test_a_row_that_is_skipped_skips_no_other() -> None:
    seen = []

    @exhaustive("number", range(4))
    def looped(number: int) -> None:
        if number < 3:
            pytest.skip("too small")
        seen.append(number)
        assert number != 3

    with pytest.raises(AssertionError, match="1 of 4 rows fail"):
        looped()
    assert seen == [3]


@pytest.mark.parametrize(("bad", "match"), [([], "empty"), ([1], "1 of 1 rows fail")])
def test_a_loop_never_passes_for_nothing(bad: list[int], match: str) -> None:
    @exhaustive("number", bad)
    def looped(number: int) -> None:
        pytest.fail("no")

    with pytest.raises(AssertionError, match=match):
        looped()


def distance(test: str, *changed: str) -> int | None:
    return selection.changed_tests(changed).get(ROOT / "tests" / test)


def test_a_change_selects_its_room_and_who_imports_it() -> None:
    changed = "src/narrowgauge/spec/storages.py"
    assert distance("spec/test_formats.py", changed) == 1
    assert distance("optim/test_codec_packing.py", changed) == 2
    assert distance("runs/test_record.py", changed) is None
    assert selection.changed_tests([changed])[ROOT / changed] == 0  # its doctests
    assert distance("optim/test_codec_packing.py", "tests/optim/scenarios.py") == 0
    assert distance("test_readme.py", "README.md") == 2
    assert distance("test_github.py", ".github/workflows/ci.yml") == 2


def test_public_names_and_patched_names_are_imports() -> None:
    own = selection.imports("optim.test_kernel")
    assert "narrowgauge.spec.storages" in own and "optim.scenarios" in own
    audited = selection.imports("optim.test_audit")
    assert any(name.startswith("narrowgauge.optim") for name in audited)


def test_what_a_unit_proves_is_all_it_imports() -> None:
    units = selection.units()
    assert set(selection.ROOMS) < set(units) and "integrations/test_torchtitan.py" in units
    optim = selection.closure(units["optim"])
    assert "narrowgauge.spec.storages" in optim and "narrowgauge.errors" in optim
    assert not any(name.startswith(("narrowgauge.planner", "narrowgauge.trainer")) for name in optim)


def test_a_unit_holds_its_covering_tests_and_what_they_stand_on() -> None:
    units = selection.units()
    optim = selection.closure(units["optim"])
    assert {"optim.test_contracts", "optim.scenarios", "covering", "conftest"} <= optim
    assert all("conftest" in first for first in units.values())
    assert "integrations.conftest" in units["integrations/test_peft.py"]
    for room in selection.ROOMS:
        assert any(name.startswith(f"{room}.test_") for name in units[room]), room


def test_another_version_of_a_package_is_owed_by_the_frameworks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = selection.checksums()
    raised = selection.constraints().replace("lightning==", "lightning==9.")
    monkeypatch.setattr(selection, "constraints", lambda: raised)
    after = selection.checksums()
    assert {unit for unit in before if before[unit] == after[unit]} == set(selection.ROOMS)


@pytest.mark.parametrize(
    "path", ["tests/conftest.py", "tests/tiers.py", "tests/selection.py", "tests/covering.py", "conftest.py"]
)
def test_what_every_test_runs_under_selects_every_file_and_the_tests_of_the_choice_first(path: str) -> None:
    found = selection.changed_tests([path])
    assert set(selection.TESTS.rglob("test_*.py")) <= set(found)
    assert found[Path(__file__)] == 0 and found[ROOT / "tests" / "test_readme.py"] == 2
    assert selection.changed_plugins([path]) and not selection.changed_plugins(["tests/ranks.py"])


def test_a_conftest_of_a_folder_selects_its_files() -> None:
    found = selection.changed_tests(["tests/integrations/conftest.py"])
    assert found[selection.TESTS / "integrations" / "test_peft.py"] == 2
    assert selection.TESTS / "test_readme.py" not in found


OPTIONS_THAT_NARROW = (
    *(["-k", "a"], ["-m", "a"], ["--deselect", "a"], ["--ignore", "a"], ["--ignore-glob", "a"], ["--lf"]),
    *(["--stepwise"], ["--stepwise-skip"], ["--setup-only"], ["--setup-plan"], ["--collect-only"], ["--fixtures"]),
    *(["--fixtures-per-test"], ["-o", "xfail_strict=0"], ["-c", "a"], ["--doctest-ignore-import-errors"]),
)


@pytest.mark.parametrize("words", OPTIONS_THAT_NARROW, ids=" ".join)
def test_an_option_that_leaves_tests_out_records_nothing(words: list[str], pytestconfig: pytest.Config) -> None:
    def parsed(*words: str) -> Any:
        options = pytestconfig._parser.parse(list(words))
        return SimpleNamespace(getoption=lambda name, default=None: getattr(options, name, default))

    assert tiers.narrowed(parsed(*words))
    assert not tiers.narrowed(parsed(*pytestconfig.getini("addopts"), "--all", "-x", "-n", "2"))


def test_what_did_not_run_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proved = {"optim": "1", "integrations/test_peft.py": "2", "integrations/test_paths.py": "3"}
    monkeypatch.setattr(selection, "checksums", lambda: proved)
    monkeypatch.setattr(selection, "RECORD", tmp_path / "record.toml")
    missing = ""
    monkeypatch.setattr("narrowgauge.machine.cpp_compiler.compiler_missing", lambda: missing)
    said = tiers.record(proved, {"tests/integrations/test_peft.py", "tests/planner/test_paths.py"})
    assert said == "recorded in record.toml, without integrations/test_paths.py"
    found = selection.recorded()
    assert (found["optim"], found["integrations/test_peft.py"]) == ("1", "2")
    assert "integrations/test_paths.py" not in found and found["vectors"]
    missing = "no compiler"  # the variable as it is then
    assert tiers.record(proved, {f"tests/{unit}" for unit in proved}) == "recorded in record.toml, without optim"
    assert "optim" not in selection.recorded()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "module.py"
    monkeypatch.setattr(selection, "modules", lambda: {"module": path})
    return path


def test_words_about_code_owe_nothing_and_code_does(module: Path) -> None:
    def code(text: str) -> bytes:
        module.write_text(text)
        selection.read_again()
        return selection.written("module")

    first = code('"""One."""\n\n\ndef f(x):\n    """Two."""\n    return x + 1\n')
    assert first == code('"""Another."""\n\n# Why.\ndef f(x):\n    """More.\n\n    Lines."""\n\n    return x + 1\n')
    assert first != code('"""One."""\n\n\ndef f(x):\n    """Two."""\n    return x - 1\n')
    assert code('X = """\n# one\n"""\n') != code('X = """\n# two\n"""\n')
    selection.read_again()


def test_a_unit_is_owed_once_its_code_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "RECORD", selection.TESTS / "no such file")
    everything = [*selection.ROOMS, "integrations"]
    assert selection.owed() == (everything, "the whole product is owed: there is no tests/no such file")
    monkeypatch.setattr(selection, "RECORD", tmp_path / "record.toml")
    monkeypatch.setattr(selection, "torch_of_constraints", lambda: selection_torch())
    proved = {"optim": "1", "matmul": "2", "integrations/test_peft.py": "3"}
    monkeypatch.setattr(selection, "checksums", lambda: proved)  # the variable as it is then
    selection.record_whole_product(proved)
    assert selection.owed()[0] == []
    proved = {**proved, "matmul": "another", "integrations/test_trl.py": "4"}
    found, why = selection.owed()
    assert found == ["matmul", "integrations/test_trl.py"] and "matmul, integrations/test_trl.py is owed" in why
    monkeypatch.setattr(selection, "torch_of_constraints", lambda: "1.0.0")
    assert selection.owed()[0] == everything
    monkeypatch.setattr(selection, "torch_of_constraints", lambda: selection_torch())
    proved = dict.fromkeys(selection.units(), "new") | {"optim": "1"}
    assert selection.owed()[0] == [*selection.ROOMS[1:], "integrations"]


def selection_torch() -> str:
    import torch

    return torch.__version__.partition("+")[0]
