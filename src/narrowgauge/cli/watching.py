"""The command ``watch``, and ``--watch`` of commands that train: a live page in a browser."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import click

from narrowgauge.distributed.launch.placement import read_placement
from narrowgauge.errors import RankError, RecordError

_FOLLOWS = "--until-closed"
_LAST_SECONDS = 5.0
"""The longest that a training which has ended waits for its page to be complete."""

flag = click.option(
    "--watch/--no-watch",
    "watched",
    default=False,
    help="Open a live page on the run in a browser (narrowgauge watch).  [default: no]",
)


@click.command("watch", short_help="A live page on runs that are being written.")
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Port on 127.0.0.1.  [default: a free one]"
)
@click.option("--notify", metavar="URL", help="POST each finding of weight to this address, as JSON.")
@click.option("--open/--no-open", "opens", default=True, help="Open the page in a browser.  [default: open]")
@click.option(
    _FOLLOWS, "follows", is_flag=True, hidden=True, help="End when standard input does; RUN need not exist yet."
)
def watch_command(runs: tuple[Path, ...], port: int, notify: str | None, opens: bool, follows: bool) -> None:
    """Show the report of runs that are being written, and keep it up to date: state, time left, curves, events, findings.

    Each RUN is a run folder, or a folder of runs such as that of a comparison. The page is served on 127.0.0.1 alone, at an
    address with a secret token; nothing is written into the run folders. On another machine, forward its port:

    ssh -L 8400:127.0.0.1:8400 HOST narrowgauge watch RUN --port 8400 --no-open
    """
    from narrowgauge.report.live.live_run import runs_in
    from narrowgauge.report.live.notifying import Webhook
    from narrowgauge.report.live.page_server import PageServer
    from narrowgauge.report.live.poll_loop import Watch

    for path in runs if not follows else ():
        if not path.is_dir():
            raise RecordError(f"No run in {path}: there is no such folder.", "Name a run folder, or a folder of runs.")
    if not follows and not runs_in(list(runs)):
        click.echo("note: no run is here yet; the page begins when one does.", err=True)
    hook = Webhook(notify, lambda line: click.echo(line, err=True)) if notify is not None else None
    watch = Watch(list(runs), hook.send if hook is not None else lambda rows: None)
    server = PageServer(watch, port)
    threads = [
        threading.Thread(target=server.serve_forever, daemon=True),
        threading.Thread(target=watch.run, daemon=True),
    ]
    for thread in threads:
        thread.start()
    click.echo(server.address, err=follows)
    try:
        with contextlib.suppress(KeyboardInterrupt), _opened(server.address, opens):
            _wait(follows, threads[1])
        if follows:
            watch.settle(_LAST_SECONDS)
    finally:
        watch.end()
        server.close()
        if hook is not None:
            hook.close()


@contextlib.contextmanager
def _opened(address: str, is_asked: bool) -> Iterator[None]:
    """Open an address in a browser of this desktop, if there is one.

    By a file that only this user can read: all users of a machine see its command lines, and so what a browser is told to open.
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


def _wait(follows: bool, thread: threading.Thread) -> None:
    """Wait until standard input ends, or until Ctrl-C."""
    if follows:
        sys.stdin.buffer.read()
        return
    while thread.is_alive():
        thread.join(3600)


@contextlib.contextmanager
def watching(folder: str | Path | None, is_asked: bool) -> Iterator[None]:
    """Watch a folder in a process of its own during the block, if that is asked; the process ends with this one.

    Of several ranks the first one watches.
    """
    if not is_asked or not read_placement().is_first:
        yield
        return
    if folder is None:
        raise RankError("--watch was requested of ranks that choose their folder together.", "Name it: give --out.")
    command = [sys.executable, "-m", "narrowgauge", "watch", str(folder), _FOLLOWS]
    # A group of its own: Ctrl-C stops the training, which then closes the pipe.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_SECONDS + 5)
        process.kill()
        process.wait()
