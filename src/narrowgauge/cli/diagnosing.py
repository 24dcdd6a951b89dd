"""The command ``diagnose``: print the readings of a run beyond their bounds, or the first difference of two runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from narrowgauge.cli import flags
from narrowgauge.errors import RecordError
from narrowgauge.runs.record import Run, read_run
from narrowgauge.spec import tables


@click.command("diagnose", short_help="What a run shows beyond its bounds, or where two runs first differ.")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("other", metavar="[OTHER]", required=False, type=click.Path(path_type=Path))
@flags.json_object
@click.option(
    "--replay",
    "step",
    metavar="STEP",
    type=int,
    help="Also compute this step of RUN again: as it was, in float32, and with each place of rounding alone.",
)
def diagnose_command(run: Path, other: Path | None, as_json: bool, step: int | None) -> None:
    """Print what the record of RUN shows beyond its bounds, earliest first, and what this record cannot show.

    With OTHER, a run that should have been equal: the first step, stage, tensor and rank in which they differ, and the recorded
    settings that differ and can act there.

    RUN is a run folder, finished or not, or the log of another framework, as for report.
    """
    from narrowgauge.analysis.diagnose import diagnose

    if other is not None and step is not None:
        raise click.UsageError("--replay repeats a step of one run, and two were named.", click.get_current_context())
    record = _record(run)
    diagnosis: Any = diagnose(record) if other is None else diagnose(record, _record(other))
    places = None
    if step is not None:
        from narrowgauge.trainer.rounding_places import rounding_places

        places = rounding_places(record.path, step, say=lambda line: click.echo(line, err=True))
    if as_json:
        tables.write_json(diagnosis.to_dict() | ({} if places is None else {"replay": dataclasses.asdict(places)}))
    else:
        click.echo(str(diagnosis))
        if places is not None:
            click.echo(f"\n{places}")


def _record(path: Path) -> Run:
    """Read the run at a path, or the only run in a folder."""
    from narrowgauge.report.publishing import run_folders

    places = run_folders([path])
    if len(places) > 1:
        names = ", ".join(place.name for place in places[:6]) + (", …" if len(places) > 6 else "")
        raise RecordError(
            f"One run was asked about, and {path} holds {len(places)}: {names}.",
            f"Name one: narrowgauge diagnose {places[0]}; narrowgauge report {path} has the readings of all.",
        )
    return read_run(places[0])
