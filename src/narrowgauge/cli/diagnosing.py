"""The commands of a diagnosis: ``diagnose`` a run, and ``show causes``.

What they print is made in :mod:`narrowgauge.diagnosis`, which needs no PyTorch and is loaded once a command runs.
"""

from __future__ import annotations

from pathlib import Path

import click

from narrowgauge.spec import tables


@click.command("diagnose")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("other", metavar="[OTHER]", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def diagnose_command(run: Path, other: Path | None, as_json: bool) -> None:
    """Name the cause of what the record of RUN shows: evidence, confidence, what else it could be, and what to measure next.

    With OTHER, a run that should have been equal: where the two part, and why.

    RUN is a run folder, finished or not, one in a zip file of report --pack, or the log of another framework, as for report.
    """
    from narrowgauge.diagnosis import diagnosis

    found = diagnosis.diagnose(run) if other is None else diagnosis.diagnose(run, other)
    if as_json:
        tables.write_object(found.to_dict())
    else:
        click.echo(found.text())


@click.command("causes")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects.")
def causes_command(as_json: bool) -> None:
    """Causes that diagnose names: what each does to a run, the signs that it predicts, and what to do."""
    from narrowgauge.diagnosis import cause_tables

    if as_json:
        tables.write_json(cause_tables.cause_rows())
    else:
        tables.write(cause_tables.cause_table())
