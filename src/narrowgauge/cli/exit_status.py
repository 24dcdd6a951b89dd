"""One line and an exit status for every error of a command."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from narrowgauge.distributed import job
from narrowgauge.errors import NarrowgaugeError, ReportedError


class CommandGroup(click.Group):
    """Exits with status 2 for invalid input, 1 for a machine that fails, 130 after a signal."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        *_: object,
        **extra: Any,
    ) -> NoReturn:
        """Run a command and exit."""
        extra["standalone_mode"] = False
        try:
            status = super().main(args, prog_name, **extra)
            if sys.stdout is not None:  # else it was closed before
                sys.stdout.flush()
        except BrokenPipeError:  # a reader that leaves early, such as head, is not an error
            sys.stdout = io.StringIO()  # Python flushes again on exit
            status = 1
        except Exception as error:
            explained = _explained(error)
            if explained is None:
                raise  # a bug
            kind, message, status = explained
            # All ranks have this error. torchrun prints an error of one rank alone.
            if kind and job.rank() == 0:
                with contextlib.suppress(OSError):  # its reader has left
                    click.echo(f"{kind}: {' '.join(message.split())}", err=True)
        sys.exit(status if isinstance(status, int) else 0)


def help_without_command(context: click.Context) -> None:
    """Print the help of a group if no command is given."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _explained(error: Exception) -> tuple[str, str, int] | None:
    """Return the kind, the line and the exit status of an error; no kind if another process has
    printed it.
    """
    text = str(error)
    name = type(error).__name__
    if isinstance(error, ReportedError):
        return "", text, error.status
    if isinstance(error, NarrowgaugeError):
        return name, text, error.status
    if isinstance(error, click.Abort):
        return "Interrupted", "the command was stopped.", 130
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        advice = f" (See {context.command_path} --help.)" if context else ""
        return "UsageError", error.format_message() + advice, 2
    if isinstance(error, OSError):  # also of transformers, which says what it cannot find
        return "OSError", text, 2
    return None
