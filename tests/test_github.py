"""The workflow and the issue forms are valid, and the commands and versions they name exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # transformers depends on it
from packaging.requirements import Requirement

from kept_cache import FOLDER
from narrowgauge.cli.main import main
from narrowgauge.spec.frameworks import TESTED_TORCH
from selection import RECORD

ROOT = Path(__file__).parents[1]
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
COMMAND = "narrowgauge show environment"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def workflow() -> Any:
    return read(ROOT / ".github" / "workflows" / "ci.yml")


def commands() -> str:
    return "\n".join(step.get("run", "") for step in workflow()["jobs"]["ci"]["steps"])


def test_there_are_three_forms() -> None:
    assert [path.stem for path in FORMS] == ["bug", "feature", "numbers"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_valid_and_requests_the_environment(path: Path) -> None:
    form = read(path)
    assert form["name"] and form["description"]
    fields = form["body"]
    assert len({field["id"] for field in fields}) == len(fields)
    for field in fields:
        assert field["type"] in {"textarea", "input", "dropdown", "checkboxes"}
        assert field["attributes"]["label"]
        assert field["type"] != "dropdown" or len(field["attributes"]["options"]) > 1
    [environment] = [field for field in fields if field["id"] == "environment"]
    assert f"`{COMMAND}" in environment["attributes"]["description"]


def test_commands_that_are_named_exist() -> None:
    for path in FORMS:
        for words in re.findall(r"`narrowgauge ([^`]+)`", path.read_text(encoding="utf-8")):
            command: Any = main
            for word in words.split():
                if word not in getattr(command, "commands", {}):
                    break
                command = command.commands[word]
            assert command is not main, words
            flags = {flag for option in command.params for flag in option.opts}
            assert {word for word in words.split() if word.startswith("--")} <= flags, words
    assert f".venv/bin/{COMMAND}" in commands()


def test_the_workflow_runs_the_first_and_the_last_python_that_is_allowed() -> None:
    allowed = re.search(
        r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert allowed
    first, after = map(int, allowed.groups())
    assert workflow()["jobs"]["ci"]["strategy"]["matrix"]["python"] == [f"3.{first}", f"3.{after - 1}"]
    assert "./dev ci" in commands() and os.access(ROOT / "dev", os.X_OK)


def test_the_workflow_runs_the_oldest_and_the_newest_torch_that_is_tested() -> None:
    """One table says which, and pyproject.toml, constraints.txt, the workflow and CONTRIBUTING.md agree with it."""
    oldest, installed, newest = TESTED_TORCH
    dependencies, constraints = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "constraints.txt")
    )
    assert f'"torch>={oldest}",' in dependencies
    assert re.search(rf"^torch=={re.escape(installed)}\.\d+$", constraints, re.MULTILINE)
    job = workflow()["jobs"]["torch"]
    found = [(row["torch"].rpartition(".")[0], row["python"]) for row in job["strategy"]["matrix"]["include"]]
    pythons = workflow()["jobs"]["ci"]["strategy"]["matrix"]["python"]
    assert {python for _, python in found} == set(pythons)
    assert {(oldest, python) for python in pythons} | {(newest, pythons[-1])} <= set(found)
    assert "./dev test --torch ${{ matrix.torch }}" in [step.get("run") for step in job["steps"]]
    assert f"./dev test --torch {newest}.0" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_python_has_one_version_of_each_package() -> None:
    """So that setting up a checkout takes a known PyTorch, and neither gigabytes nor what was released this morning."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    pythons = ("3.10", "3.11", "3.12", "3.13")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.scripts]")[0]
    named = re.findall(r'"([A-Za-z][\w.-]*)(?:\[\w+\])?[<>=]=?\d', project.partition("dependencies = [")[2])
    wanted = {name.lower().replace("_", "-") for name in named} - {
        "torchtitan",
        "aim",
        "tomli",
        "triton",
    }  # not for every Python, or pinned already
    assert len(wanted) > 25
    for python in pythons:
        valid = [pin for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
        names = [pin.name for pin in valid]
        assert len(names) == len(set(names)), python
        assert all(len(pin.specifier) == 1 and str(pin.specifier).startswith("==") for pin in valid)
        assert wanted <= set(names), python


FAKE_PYTHON = """#!/bin/sh
echo "$@" >> "{log}"
case "$1 $3" in "-c any") echo here ;; "-m config") cat "{folder}/pip_configuration" ;; esac
case "$1" in tests/selection.py) cat "{folder}/owed" ;; esac
"""


def fake_checkout(folder: Path, *files: str) -> Path:
    """A folder with ./dev and a Python and a uv that only write down how they are called; returns where."""
    log = folder / "log"
    for program in (folder / ".venv" / "bin" / "python", folder / "uv"):
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(FAKE_PYTHON.format(log=log, folder=folder))
        program.chmod(0o755)
    for name in ("dev", "pyproject.toml", "constraints.txt", *files):
        shutil.copy(ROOT / name, folder)
    (folder / "pip_configuration").write_text("")
    (folder / "owed").write_text("")
    return log


def calls_of_dev(folder: Path, *words: str, uv: str = "") -> list[str]:
    (folder / "log").write_text("")
    subprocess.run([folder / "dev", *words], check=True, cwd=folder, capture_output=True, env={**os.environ, "UV": uv})
    return (folder / "log").read_text().splitlines()


@pytest.mark.skipif(os.name == "nt", reason="./dev is a shell script")
def test_dev_installs_by_the_constraints_once_and_again_when_they_change(tmp_path: Path) -> None:
    fake_checkout(tmp_path)

    def installed() -> int:
        calls = calls_of_dev(tmp_path, "test", "-k", "some")
        assert calls[-1] == "-m pytest -n 2 -k some"
        installs = [call for call in calls if call.startswith("-m pip install")]
        assert all("--constraint constraints.txt --editable .[test]" in call for call in installs)
        return len(installs)

    assert [installed(), installed()] == [1, 0]
    with (tmp_path / "constraints.txt").open("a") as stream:
        stream.write("# changed\n")
    assert [installed(), installed()] == [1, 0]


@pytest.mark.skipif(os.name == "nt", reason="./dev is a shell script")
def test_dev_installs_with_uv_from_where_pip_looks(tmp_path: Path) -> None:
    fake_checkout(tmp_path)
    (tmp_path / "pip_configuration").write_text(
        "global.index-url='https://a.example/simple'\n:env:.index-url='https://b.example/simple'\n"
        "global.find-links='/wheels'\n:env:.extra-index-url='https://c.example https://d.example'\nglobal.timeout='9'\n"
    )
    calls = calls_of_dev(tmp_path, "test", uv=str(tmp_path / "uv"))
    (call,) = [call for call in calls if call.startswith("pip install")]
    assert not any(call.startswith("-m pip install") for call in calls)
    assert call == (
        f"pip install --quiet --python {tmp_path}/.venv/bin/python --index-strategy unsafe-best-match --find-links /wheels "
        "--index https://c.example --index https://d.example --default-index https://b.example/simple "
        "--constraint constraints.txt --editable .[test]"
    )
    (tmp_path / "uv").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / ".venv" / ".dev-test").unlink()
    calls = calls_of_dev(tmp_path, "test", uv=str(tmp_path / "uv"))
    assert len([call for call in calls if call.startswith("-m pip install")]) == 1


@pytest.mark.skipif(os.name == "nt", reason="./dev is a shell script")
@pytest.mark.parametrize("owed", ["", "--whole optim --whole integrations/test_peft.py"])
def test_dev_ci_runs_what_is_owed_beyond_the_readme_s_command(owed: str, tmp_path: Path) -> None:
    fake_checkout(tmp_path, "README.md")
    (tmp_path / "owed").write_text(owed)
    calls = calls_of_dev(tmp_path, "ci")
    assert calls.index("tests/selection.py") < calls.index("-m mypy")
    assert calls[-1] == f"-m pytest -n 2 {owed}".strip()


@pytest.mark.skipif(os.name == "nt", reason="./dev is a shell script")
@pytest.mark.parametrize(
    ("words", "extras"),
    [
        (["--all"], "integrations,cuda-proof"),
        (["--whole", "integrations/test_peft.py"], "integrations"),
        (["tests/cuda"], "cuda-proof"),
        ([], ""),
    ],
)
def test_dev_installs_frameworks_where_their_tests_run(words: list[str], extras: str, tmp_path: Path) -> None:
    fake_checkout(tmp_path)
    installs = [call for call in calls_of_dev(tmp_path, "test", *words) if call.startswith("-m pip install")]
    assert [call.split()[-1] for call in installs] == [".[test]", *([f".[{extras}]"] if extras else [])]


@pytest.mark.skipif(os.name == "nt", reason="./dev is a shell script")
def test_dev_tests_another_torch_beside_and_leaves_the_first_alone(tmp_path: Path) -> None:
    log, python = tmp_path / "log", tmp_path / ".venv-torch-2.15.0" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON.format(log=log, folder=tmp_path))
    python.chmod(0o755)
    (tmp_path / ".ci").mkdir()
    for name in ("dev", "pyproject.toml", "constraints.txt", ".ci/other_torch.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    run = [tmp_path / "dev", "test", "--torch"]
    for _ in range(2):
        subprocess.run([*run, "2.15.0", "tests/optim"], check=True, cwd=tmp_path, capture_output=True)
    calls = log.read_text().splitlines()
    assert calls.count(".ci/other_torch.py 2.15.0") == 1 and calls.count("-m pytest -n 2 tests/optim") == 2
    assert not (tmp_path / ".venv").exists()
    refused = subprocess.run([*run, "newest"], check=False, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2 and "one is named like 2.15.0" in refused.stderr


def test_the_workflow_may_only_read_and_cancels_what_is_out_of_date() -> None:
    found = workflow()
    assert found["permissions"] == {"contents": "read"}
    assert found["concurrency"]["cancel-in-progress"] is True
    # YAML 1.1 reads the key `on` as true.
    assert set(found[True]) == {"push", "pull_request", "workflow_dispatch", "schedule"}


def test_the_workflow_runs_everything_each_night_and_what_is_owed_on_each_push() -> None:
    jobs = workflow()["jobs"]
    nightly = {name for name, job in jobs.items() if "== 'schedule'" in job["if"]}
    assert nightly == {"whole", "cold"}
    assert all(jobs[name]["if"] == "github.event_name != 'schedule'" for name in jobs.keys() - nightly)
    steps = jobs["whole"]["steps"]
    assert "./dev test --all" in [step.get("run") for step in steps]
    assert steps[-1]["with"]["path"] == RECORD.relative_to(ROOT).as_posix()


def test_the_workflow_keeps_compiled_code_where_tests_leave_it_but_in_one_job() -> None:
    [step] = [step for step in workflow()["jobs"]["ci"]["steps"] if step.get("uses", "").startswith("actions/cache@")]
    [folder, *left_out] = step["with"]["path"].split()
    assert f'{FOLDER}={folder.replace("~", "$HOME")}" >> "$GITHUB_ENV"' in commands()
    assert all(path.startswith(f"!{folder}/") for path in left_out)
    assert workflow()["jobs"]["cold"]["steps"][-1]["run"] == "./dev test --cold"
