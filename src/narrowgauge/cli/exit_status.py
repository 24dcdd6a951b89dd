"""What every command shares: standard streams that can be written to, and one line and an exit status for every error.

Standard streams may be closed, belong to a terminal that shows only ASCII, or be a pipe whose reader has left. No command deals
with that: :func:`open_streams` repairs the first two before any command runs, and the last ends a command quietly.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import logging
import os
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from narrowgauge.cli.launching import OPTIONS
from narrowgauge.cli.option_hints import hint
from narrowgauge.errors import NarrowgaugeError, RankError, ReportedError, Terminated, shortened


class CommandGroup(click.Group):
    """Exits with status 2 for invalid input, 1 if a rank was lost, 130 after Ctrl-C, 143 after SIGTERM."""

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: object, **extra: Any
    ) -> NoReturn:
        open_streams()
        extra["standalone_mode"] = False
        # The words of the command line, for commands that start other processes with them.
        extra.setdefault("obj", list(sys.argv[1:] if args is None else args))
        try:
            status = super().main(args, prog_name, **extra)
        except ReportedError as error:
            status = error.status
        except NarrowgaugeError as error:
            status = _print_error(type(error).__name__, str(error), error.status if isinstance(error, RankError) else 2)
        except click.Abort as abort:
            is_terminated = isinstance(abort.__cause__, Terminated)
            status = _print_error(
                "Interrupted", str(abort) or "the command was stopped.", 143 if is_terminated else 130
            )
        except click.ClickException as error:
            status = _print_error("UsageError", _with_advice(error), 2)
        except OSError as error:
            status = _handle_os_error(error)
        try:
            sys.stdout.flush()
        except OSError as error:
            status = _handle_os_error(error)
        status = status if isinstance(status, int) else 0
        if (launch := _launch()) is not None and launch.is_open():
            logging.shutdown()
            sys.stderr.flush()
            os._exit(status)
        sys.exit(status)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        # click would print an empty line before it raises Abort.
        except KeyboardInterrupt as interruption:
            raise click.Abort(str(interruption)) from interruption


_ASCII = {
    "×": "x", "·": ".", "–": "-", "—": "-", "−": "-", "─": "-", "│": "|", "‖": "||", "…": "...", "→": "->", "←": "<-", "≤": "<=",
    "≥": ">=", "≠": "!=", "≈": "~", "±": "+-", "µ": "u", "√": "sqrt", "⟨": "<", "⟩": ">", "Σ": "sum",
}  # fmt: skip
"""What a terminal that cannot show a character shows instead."""


def open_streams() -> None:
    """Make the standard streams of this process usable, whoever started it.

    A closed one becomes the null device: otherwise the next file that is opened takes its number, and what is written to
    standard error ends in a run's rows. A character that a stream cannot encode becomes ASCII that reads like it.
    """
    codecs.register_error("narrowgauge", _in_ascii)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if not _is_open(number):
            # It takes the lowest number that is free, which is this one: those below it are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115  # for as long as the process runs
            setattr(sys, name, stream)
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="narrowgauge")


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    """An error handler for codecs: undecodable bytes of a path stay as they are, other characters become ASCII like them."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end]
    if all("\udc80" <= character <= "\udcff" for character in found):
        return found.encode("utf-8", "surrogateescape"), error.end
    return "".join(map(_ascii_of, found)), error.end


def _ascii_of(character: str) -> str:
    known = _ASCII.get(character)
    if known is not None:
        return known
    power = "^" if unicodedata.decomposition(character).startswith("<super>") else ""
    letters = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return power + letters if letters else "?"


def help_without_command(context: click.Context) -> None:
    """Print the help of a group that was called without one of its commands."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def say_former(old: str, new: str) -> None:
    """Say on standard error that a spelling of the command line is a former one, and what it is now."""
    click.echo(f"note: {old} is now {new}; the old spelling works until the next release.", err=True)


def _print_error(kind: str, message: str, status: int) -> int:
    if _is_reporter(kind == "Interrupted"):
        with contextlib.suppress(OSError):  # its reader has left
            _echo_error(kind, message)
    return status


def _is_reporter(is_interruption: bool) -> bool:
    """Whether this process prints its error: of several ranks one does or, before they have met, one on each host."""
    if (launch := _launch()) is not None and launch.has_met():
        return True
    if is_interruption and "NARROWGAUGE_AGENT_FOLDER" in os.environ:  # which was interrupted too
        return False
    local = os.environ.get("LOCAL_RANK") or (os.environ.get("SLURM_LOCALID") if "SLURM_STEP_ID" in os.environ else None)
    return local in (None, "", "0")


def _launch() -> Any:
    """The module that knows other ranks; None in a command that has not loaded it, and so has none."""
    return sys.modules.get("narrowgauge.distributed.launch.process_group")


def _echo_error(kind: str, message: str) -> None:
    click.echo(f"{kind}: {shortened(' '.join(message.split()))}", err=True)


def _handle_os_error(error: OSError) -> int:
    """Report an unwritable standard output or an invalid path; any other OSError is a bug and is raised."""
    if error.errno in _NO_PATHS:
        return _print_error("OSError", f"Cannot open '{error.filename}': {error.strerror}. Name another path.", 2)
    if error.filename is not None or error.errno not in _UNWRITABLE:
        raise error
    # Python flushes the buffer again on exit, which would print a traceback.
    sys.stdout = io.StringIO()
    # A closed pipe, such as to head, is not an error.
    if error.errno == errno.EPIPE:
        return 1
    return _print_error("OSError", f"Cannot write to standard output: {error.strerror}. Redirect it.", 2)


_NO_PATHS = (errno.ENAMETOOLONG, errno.ELOOP)
_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def _with_advice(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    if context is None:
        return error.format_message()
    message = error.format_message()
    # click suggests too many names.
    if isinstance(error, click.NoSuchOption) and error.option_name in OPTIONS.values():
        message = f"narrowgauge {context.command.name} runs in one process, and has no {error.option_name}."
        return f"{message} Leave it out: checkpoints of any number of ranks are read."
    if isinstance(error, click.NoSuchOption):
        flags = [flag for option in context.command.params for flag in (*option.opts, *option.secondary_opts)]
        message = f"No such option '{error.option_name}'. {hint(error.option_name, flags)}".rstrip()
    return f"{message} (See {context.command_path} --help.)"
