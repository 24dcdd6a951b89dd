"""Options that other programs have lead to ours, by meaning and not by letters."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from narrowgauge.cli.main import main
from narrowgauge.cli.option_hints import _OTHERS, _WITHOUT, hint


def commands(group: click.Group = main) -> Iterator[dict[str, str | None]]:
    """The flags of each command, and the parameter that each sets."""
    for command in group.commands.values():
        if isinstance(command, click.Group):
            yield from commands(command)
        yield {flag: option.name for option in command.params for flag in option.opts}


def test_each_name_of_others_means_one_option_of_a_command() -> None:
    taken = set()
    for flags in commands():
        mine = {ours: others.split() for ours, others in _OTHERS.items() if ours in flags}
        taken |= mine.keys()
        for name in {name for others in mine.values() for name in others if f"--{name}" not in flags}:
            meant = {ours for ours, others in mine.items() if name in others}
            assert len({flags[ours] for ours in meant}) == 1, name
            assert hint(f"--{name}", flags) in {f"Did you mean '{ours}'?" for ours in meant}
    assert taken == _OTHERS.keys(), "an option that no command has any more"


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--learning-rate", "Did you mean '--lr'?"),
        ("--learning_rate", "Did you mean '--lr'?"),
        ("--batch_size", "Did you mean '--batch-size'?"),
        ("--optimizer", "Did you mean '--rule'?"),
        ("--recpie", "Did you mean '--recipe'?"),
        ("--device", _WITHOUT["--device"]),
        ("--xyzzy", ""),
    ],
)
def test_what_train_lacks_is_named_by_meaning(option: str, advice: str) -> None:
    flags = [flag for parameter in main.commands["train"].params for flag in parameter.opts]
    assert hint(option, flags) == advice
