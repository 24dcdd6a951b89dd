"""The workflow and the issue forms are valid, and the commands and versions they name exist."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # transformers depends on it

from narrowgauge.cli.main import main

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


def test_the_workflow_may_only_read_and_cancels_what_is_out_of_date() -> None:
    found = workflow()
    assert found["permissions"] == {"contents": "read"}
    assert found["concurrency"]["cancel-in-progress"] is True
    # YAML 1.1 reads the key `on` as true.
    assert set(found[True]) == {"push", "pull_request", "workflow_dispatch"}


def test_the_kernels_that_are_cached_depend_on_files_that_there_are() -> None:
    [step] = [step for step in workflow()["jobs"]["ci"]["steps"] if step.get("name") == "Cache compiled kernels"]
    patterns = re.findall(r"'([^']+)'", step["with"]["key"])
    assert len(patterns) == 5 and all(any(ROOT.glob(pattern)) for pattern in patterns)
    assert step["with"]["path"] == "~/.cache/narrowgauge" and '$HOME/.cache/narrowgauge" >> "$GITHUB_ENV"' in commands()
