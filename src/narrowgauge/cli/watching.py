"""The command ``watch``: a live page in a browser."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import click

from narrowgauge.errors import RecordError


@click.command("watch", short_help="A live page on runs that are being written.")
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Port on 127.0.0.1.  [default: a free one]"
)
@click.option("--open/--no-open", "opens", default=True, help="Open the page in a browser.  [default: open]")
def watch_command(runs: tuple[Path, ...], port: int, opens: bool) -> None:
    """Show the report of runs that are being written, rendered again as they grow.

    Each RUN is a run folder, or a folder of runs such as that of a comparison. The page is served on 127.0.0.1 alone, at an
    address with a secret token; nothing is written into the run folders. On another machine, forward its port:

    ssh -L 8400:127.0.0.1:8400 HOST narrowgauge watch RUN --port 8400 --no-open
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
    threads = [threading.Thread(target=target, daemon=True) for target in (server.serve_forever, page.run)]
    for thread in threads:
        thread.start()
    click.echo(server.address)
    try:
        with contextlib.suppress(KeyboardInterrupt), _opened(server.address, opens):
            while threads[1].is_alive():
                threads[1].join(3600)
    finally:
        page.end()
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def _opened(address: str, is_asked: bool) -> Iterator[None]:
    """Open an address in a browser of this desktop, if there is one.

    Pass the address in a file that only this user can read. All users of a machine see its command lines.
    """
    has_desktop = sys.platform in ("win32", "darwin") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    if not is_asked or not has_desktop or "SSH_CONNECTION" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as folder:
        file = Path(folder) / "open.html"
        file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">', encoding="ascii")
        webbrowser.open(file.as_uri())
        yield
