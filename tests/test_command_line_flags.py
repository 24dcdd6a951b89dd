"""The command line's flags are a promise: none appears, changes its name or goes without a line changing in a file.

``golden/flags.txt`` holds one line per flag (`train --recipe`) and per positional argument (`resume DIR`). After a
deliberate change, write it anew with ``./dev test --update-golden tests/test_command_line_flags.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from narrowgauge.cli.main import main

GOLDEN = Path(__file__).parent / "golden" / "flags.txt"
HOW_TO_UPDATE = "./dev test --update-golden tests/test_command_line_flags.py"


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, below in sorted(command.commands.items()):
            yield from commands(below, (*path, name))


def lines_of(path: tuple[str, ...], command: click.Command) -> list[str]:
    lines = []
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            lines += [" ".join([*path, flag]) for flag in (*parameter.opts, *parameter.secondary_opts)]
        else:
            lines.append(" ".join([*path, parameter.human_readable_name]))
    # A command without any parameter still counts: its name is part of the promise.
    if not lines and not isinstance(command, click.Group):
        lines.append(" ".join(path))
    return sorted(lines)


def frozen_lines(group: click.Command) -> list[str]:
    return [line for path, command in commands(group) for line in lines_of(path, command)]


def difference(before: list[str], now: list[str]) -> str:
    gone = [f"- {line}" for line in before if line not in now]
    added = [f"+ {line}" for line in now if line not in before]
    return "\n".join([*gone, *added])


def test_flags_are_those_in_the_file(update_golden: bool) -> None:
    assert isinstance(main, click.Group)
    now = frozen_lines(main)
    if update_golden:
        GOLDEN.write_text("\n".join(now) + "\n", encoding="utf-8")
    before = GOLDEN.read_text(encoding="utf-8").splitlines()
    changed = difference(before, now)
    if changed:
        pytest.fail(f"the command line's flags changed:\n{changed}\nIf this is meant: {HOW_TO_UPDATE}", pytrace=False)


def test_every_flag_and_command_says_what_it_is_for() -> None:
    silent = []
    for path, command in commands(main):
        name = " ".join(path) or "narrowgauge"
        if not command.help:
            silent.append(name)
        options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
        silent += [f"{name} {option.opts[0]}" for option in options if not (option.help or option.hidden)]
    assert not silent, f"no help text: {silent}"


def test_a_changed_flag_would_be_seen() -> None:
    @click.group()
    def group() -> None: ...

    @group.command()
    @click.argument("folder")
    @click.option("--compile/--no-compile")
    @click.option("-o", "--out")
    def train(folder: str, compile: bool, out: str) -> None: ...

    assert frozen_lines(group) == ["train --compile", "train --no-compile", "train --out", "train -o", "train FOLDER"]
    assert difference(["train --out"], ["train --output"]) == "- train --out\n+ train --output"


@pytest.mark.parametrize("flag", ["--model", "--data", "--recipe", "--steps", "--seed", "--out"])
def test_train_keeps_the_flags_everything_hangs_on(flag: str) -> None:
    assert f"train {flag}" in frozen_lines(main)
