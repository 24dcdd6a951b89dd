"""One line and an exit status for every error of a command."""

import contextlib
import io
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from narrowgauge.distributed import process_group
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
        status: Any = 0
        try:
            status = super().main(args, prog_name, **extra)
            if sys.stdout is not None:  # else it was closed before
                sys.stdout.flush()
        except BrokenPipeError:  # a reader that leaves early, such as head, is not an error
            sys.stdout = io.StringIO()  # Python flushes again on exit
            status = 1
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
        except (NarrowgaugeError, click.Abort, click.ClickException, OSError) as error:
            status = _report(error)
        sys.exit(status if isinstance(status, int) else 0)


def _report(error: Exception) -> int:
    """Print an error in one line, if no other process does, and return the exit status."""
    kind = type(error).__name__
    text = str(error)
    status = getattr(error, "status", 2)
    if isinstance(error, click.Abort):
        kind, text, status = "Interrupted", "the command was stopped.", 130
    elif isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        advice = f" (See {context.command_path} --help.)" if context else ""
        kind, text = "UsageError", error.format_message() + advice
    # All ranks have this error. torchrun prints an error of one rank alone.
    if process_group.rank() == 0 and not isinstance(error, ReportedError):
        with contextlib.suppress(OSError):  # its reader has left
            click.echo(f"{kind}: {' '.join(text.split())}", err=True)
    return status
