"""Flags of the command line: one per setting of a training run, and the flags that several commands
share.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

PATH = click.Path(path_type=Path)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

_METAVARS = {str: "TEXT", int: "N", float: "X"}
"""The name of a setting's type in the help."""


def of_settings(*, compared: bool = False) -> list[click.Parameter]:
    """Return a flag per setting. Flags default to ``None``, so that a run in the folder can set them.

    Those of ``compared`` runs lack the settings of a single run.
    """
    # Imported late, because the command line's top-level imports never need torch.
    from narrowgauge.trainer.settings import OF_A_RUN, Settings

    flags: list[click.Parameter] = []
    for field in dataclasses.fields(Settings):
        if compared and field.name in OF_A_RUN:
            continue
        name = field.name.replace("_", "-")
        kind = type(field.default)
        help = field.metadata["help"]
        if "[default" not in help:
            help += f"  [default: {field.default}]"
        words = [f"--{name}", field.name]
        flags.append(click.Option(words, type=kind, help=help, metavar=_METAVARS[kind]))
    return flags


def passed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were named on the command line."""
    return {name: value for name, value in settings.items() if value is not None}
