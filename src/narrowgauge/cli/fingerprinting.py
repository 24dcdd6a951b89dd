"""``narrowgauge fingerprint``: this machine's arithmetic, and what parts it from that of a run or of another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from narrowgauge.errors import ChipError
from narrowgauge.runs.arithmetic import Arithmetic, changed_settings, differences, not_compared, read_arithmetic
from narrowgauge.spec import tables
from narrowgauge.spec.tables import Column, Row, Table


@click.command("fingerprint")
@click.argument("others", metavar="[RUN|FILE]…", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="What to measure.  [default: the device that runs train on]"
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object, which fingerprint reads again as a FILE.")
def fingerprint_command(others: tuple[Path, ...], device: str | None, as_json: bool) -> None:
    """Measure this machine's arithmetic: orders of sums, roundings, last bits of functions. Takes some seconds.

    With a RUN folder, or a FILE of --json, print what differs between the two and how a run would feel it; with two of them,
    compare these, and measure nothing.
    """
    if len(others) > 2:
        raise click.UsageError("fingerprint compares two machines at most.", click.get_current_context())
    if len(others) == 2 and device is not None:
        raise click.UsageError("--device was given, and nothing is measured.", click.get_current_context())
    read = [read_arithmetic(path) for path in others]
    if len(read) < 2:
        read = [_measure(device), *read]
    names = (["this machine"] if len(others) < 2 else []) + [str(path) for path in others]
    if len(read) == 1:
        return tables.write_object(read[0].to_toml()) if as_json else click.echo(describe(read[0]))
    if as_json:
        return tables.write_object(comparison(read[0], read[1]))
    _write_comparison(read[0], read[1], names[0], names[1])
    return None


def _measure(device: str | None) -> Arithmetic:
    import torch

    from narrowgauge.machine.measured_arithmetic import measure_arithmetic

    if device == "cuda" and not torch.cuda.is_available():
        raise ChipError(
            'no CUDA device here, and device = "cuda" was asked for.', "Leave --device out to measure this CPU."
        )
    return measure_arithmetic(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))


def describe(found: Arithmetic) -> str:
    """The settings and the results as plain text, a line for each."""
    width = max(map(len, [*found.settings, *found.results]))
    parts = [
        "\n".join(f"{name.ljust(width)}  {text}" for name, text in entries.items())
        for entries in (found.settings, found.results)
    ]
    return "\n\n".join(parts)


def comparison(one: Arithmetic, other: Arithmetic) -> Row:
    """What differs, for JSON: ``differences`` (probe, both results, what a run feels, settings that may be why), ``settings``
    (all that differ) and ``not_compared``."""
    return {
        "differences": [
            {
                "probe": found.probe.name,
                "results": [found.one, found.other],
                "felt": found.probe.felt,
                "settings": _by_name(found.settings),
            }
            for found in differences(one, other)
        ],
        "settings": _by_name(changed_settings(one, other)),
        "not_compared": not_compared(one, other),
    }


def _by_name(settings: tuple[tuple[str, str, str], ...]) -> dict[str, list[str]]:
    return {name: [one, other] for name, one, other in settings}


def _write_comparison(one: Arithmetic, other: Arithmetic, name: str, other_name: str) -> None:
    found = comparison(one, other)
    rows: list[dict[str, Any]] = [
        {**row, "one": row["results"][0], "other": row["results"][1], "why": ", ".join(row["settings"])}
        for row in found["differences"]
    ]
    columns = (
        Column("probe", "probe", code=True), Column(name, "one"), Column(other_name, "other"),
        Column("a run feels", "felt"), Column("settings that differ", "why"),
    )  # fmt: skip
    if rows:
        tables.write(Table(columns, rows))
    compared = len(one.results.keys() & other.results.keys())
    click.echo(
        f"{len(rows)} of {compared} measured properties differ."
        if rows
        else f"All {compared} measured properties agree."
    )
    if found["settings"]:
        changed = "; ".join(f"{key} {left} and {right}" for key, (left, right) in found["settings"].items())
        click.echo(f"Settings that differ: {changed}.")
    if found["not_compared"]:
        click.echo(f"Measured on one of them only: {', '.join(found['not_compared'])}.")
