"""What a part of a check found. The check adds its parts up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from narrowgauge.analysis.reading import Reading, words_of
from narrowgauge.errors import NarrowgaugeError


@dataclass
class Findings:
    """What was found, compared and not compared: the same on every rank.

    Args:
        judged: what was compared.
        unseen: what was not compared, with the reason.
        gradients: of the configured step, by name.
        loss: of the whole batch in one process; NaN if it was not read.
    """

    readings: list[Reading] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    unseen: dict[str, str] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    loss: float = math.nan

    def add(self, other: Findings) -> None:
        """Append what another part found."""
        self.readings += other.readings
        self.lines += other.lines
        self.judged += other.judged
        self.unseen |= other.unseen

    @contextmanager
    def reason_for_none(self, area: str) -> Iterator[None]:
        """Note why an area is not compared: a kernel that takes other formats, too little memory,
        no slope.
        """
        try:
            yield
        except NarrowgaugeError:
            raise
        except Exception as error:
            self.unseen[area] = words_of(error)
