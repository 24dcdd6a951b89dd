"""The exceptions that a user can cause.

Every message states what was asked, what was found and where; ``advice`` says what to do. The
command line prints both on one line, without a traceback, and exits with ``status``.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterable


def _one_stop(stops: re.Match[str]) -> str:
    return stops[0][1:]


class NarrowgaugeError(Exception):
    """Base class of the package's errors; ``advice`` says what to do, ``status`` is 2 for wrong
    input and 1 for a machine.
    """

    status = 2

    def __init__(self, message: str, advice: str = "", *, status: int | None = None) -> None:
        # A reason that is quoted may end with a stop of its own.
        message = re.sub(r"(?<=\w)\.\.(?=\s|$)|(?<=[?!])\.(?=\s|$)", _one_stop, message)
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.status = self.status if status is None else status

    def __str__(self) -> str:
        return f"{self.message} {self.advice}".strip()


class FormatError(NarrowgaugeError):
    """A value or shape does not suit a number format or a cast."""


class RecipeError(NarrowgaugeError, ValueError):
    """A recipe contradicts itself, the model or the optimizer.

    It is a ``ValueError``, as ``torch.optim`` raises.
    """


class ChipError(NarrowgaugeError):
    """This machine cannot do what the caller asks."""


class DataError(NarrowgaugeError):
    """A text, tokenizer or model folder cannot be used."""


class RecordError(NarrowgaugeError):
    """A run folder or checkpoint is missing, damaged, occupied, or newer than this version."""


class RankError(NarrowgaugeError):
    """The ranks of a run contradict each other or do not fit."""


class MissingPackageError(NarrowgaugeError, ImportError):
    """A package of an extra is not installed."""


class ReportedError(NarrowgaugeError):
    """Another process has printed why the command ends.

    This one exits with ``status`` and prints nothing.
    """

    def __init__(self, status: int = 2) -> None:
        super().__init__("another process has reported the error.")
        self.status = status


def suggestion(name: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ``"Did you mean 'compact'?"`` for the nearest known name, ignoring case, or an empty string.

    >>> suggestion("compat", ["compact", "word"])
    "Did you mean 'compact'?"
    """
    by_lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.strip().lower(), by_lower, n=1, cutoff=cutoff)
    return f"Did you mean '{by_lower[near[0]]}'?" if near else ""


def suggestion_or_all(name: str, names: Iterable[str]) -> str:
    """Return the nearest known name, as :func:`suggestion` does, or all of them."""
    choices = list(names)
    return suggestion(name, choices) or f"Known: {', '.join(choices)}."


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line that led here: the nearest one outside this package and PyTorch."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("narrowgauge", "torch"):
            break
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)


_EXTRAS = {"transformers": "narrowgauge[train]", "tokenizers": "narrowgauge[train]"}


def require_package(name: str) -> None:
    """Raise a one-line error if a package of an extra is not installed."""
    is_there = False
    with contextlib.suppress(ImportError, ValueError):  # ValueError: a stand-in without a spec
        is_there = importlib.util.find_spec(name) is not None
    if not is_there:
        raise MissingPackageError(
            f"This needs the package {name}, which is not installed.",
            f'pip install "{_EXTRAS.get(name, name)}"',
        )
