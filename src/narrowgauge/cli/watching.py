"""The command ``watch``: a live page for a browser."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import click

from narrowgauge.errors import RecordError


@click.command("watch", short_help="A live page on runs that are being written.")
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Port on 127.0.0.1.  [default: a free one]"
)
def watch_command(runs: tuple[Path, ...], port: int) -> None:
    """Show the report of runs that are being written, rendered again as they grow.

    Each RUN is a run folder, or a folder of runs such as that of a comparison. The page is served on 127.0.0.1 alone, at the
    printed address with a secret token; nothing is written into the run folders. On another machine, forward its port:

    ssh -L 8400:127.0.0.1:8400 HOST narrowgauge watch RUN --port 8400
    """
    from narrowgauge.report.live import LivePage, PageServer, stamp_of

    for path in runs:
        if not path.is_dir():
            raise RecordError(f"No run in {path}: there is no such folder.", "Name a run folder, or a folder of runs.")
    if not stamp_of(runs):
        click.echo("note: no run is here yet; the page begins when one does.", err=True)
    page = LivePage(runs)
    page.poll()
    server = PageServer(page, port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    click.echo(server.address)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            page.run()
    finally:
        server.shutdown()
        server.server_close()
