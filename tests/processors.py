"""A processor of other instruction sets than this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from narrowgauge import machine


@contextmanager
def pretending(*sets: str) -> Iterator[None]:
    """Multiply as a processor with these instruction sets alone."""
    with mock.patch.object(machine, "_usable", frozenset(sets)):
        yield
