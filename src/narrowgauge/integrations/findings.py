"""What a check found, one sentence and one line of advice each.

A list that prints: on a terminal as a table, in a pipe as a paragraph per finding.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, overload

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import RecipeError
from narrowgauge.runs.events import Event, emit
from narrowgauge.runs.finding import SEVERITIES, Finding
from narrowgauge.spec.tables import Table, name_columns, text_columns


class SetUpWarning(UserWarning):
    """Something is wrong in a training loop that :func:`narrowgauge.check` watched."""


class Findings(Sequence[Finding]):
    """What :func:`narrowgauge.check` found, and the handle of what it still watches.

    Iterates over :class:`Finding` (``name``, ``message``, ``advice``, ``where``, ``severity``), errors first. As a context
    manager it watches the loop inside.

    Args:
        found: the findings.
        set_up: a line for each optimizer that was checked: what it stores, and its options.
        begin: starts to watch, and returns what ends it and looks again.
        steps: optimizer steps to watch at most; 0 for all within ``with``.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(8, 8)
        >>> findings = ng.check(model, torch.optim.AdamW([model.bias]))
        >>> findings.ok, [finding.where for finding in findings]
        (False, ['weight'])
    """

    def __init__(
        self,
        found: Iterable[Finding],
        set_up: Iterable[str] = (),
        begin: Callable[[Findings], Callable[[], list[Finding]]] | None = None,
        steps: int = 0,
    ) -> None:
        self.set_up, self.steps = list(set_up), steps
        self._begin, self._end = begin, None if begin is None or not steps else begin(self)
        self._take(found)

    @property
    def ok(self) -> bool:
        """Whether nothing worse than a note was found."""
        return all(finding.severity == "note" for finding in self)

    @property
    def is_watching(self) -> bool:
        """Whether hooks are on the optimizer."""
        return self._end is not None

    def require(self) -> Findings:
        """Raise if anything worse than a note was found.

        Returns:
            The findings.
        Raises:
            RecipeError: with all that was found.
        """
        if not self.ok:
            serious = [finding for finding in self if finding.severity != "note"]
            lines = [f"{each.name}{f' ({each.where})' if each.where else ''}: {each.message}" for each in serious]
            raise RecipeError(f"the set-up has {len(serious)} faults. " + " ".join(lines), serious[0].advice)
        return self

    def close(self) -> Findings:
        """Stop watching, remove every hook, and take in what was seen; nothing if nothing is watched.

        Returns:
            The findings.
        """
        if self._end is not None:
            end, self._end = self._end, None
            self._take(end())
        return self

    def finish(self) -> None:
        """:meth:`close` after the last step to watch, and report by a warning and events, on the first rank."""
        self.close()
        if all_ranks().rank != 0:
            return
        for each in self:
            kind = "note" if each.severity == "note" else "warning"
            emit(Event.of(kind, self.steps, replace(each, message=f"{each.name}: {each.message}")))
        if not self.ok:
            warnings.warn(f"narrowgauge.check watched {self.steps} steps.\n{self.plain()}", SetUpWarning, stacklevel=2)

    def _take(self, found: Iterable[Finding]) -> None:
        rank = list(SEVERITIES)
        self._found = sorted(found, key=lambda each: rank.index(each.severity))

    def __enter__(self) -> Findings:
        if self._begin is not None and self._end is None:
            self._end = self._begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def __getitem__(self, index: int) -> Finding: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Finding]: ...

    def __getitem__(self, index: int | slice) -> Finding | Sequence[Finding]:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found)

    def __repr__(self) -> str:
        return f"Findings({[each.name for each in self]})"

    def __str__(self) -> str:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None where it is closed
        return self._on_terminal() if is_terminal else self.plain()

    def plain(self) -> str:
        """A line per optimizer and a paragraph per finding."""
        return "\n".join([*self.set_up, *(map(str, self) if len(self) else ["nothing was found"])])

    def _on_terminal(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), force_terminal=True, highlight=False, width=Console().width)
        for line in self.set_up:
            console.print(line, style="dim", markup=False)
        if not len(self):
            console.print("nothing was found", style="green")
            return _text(console)
        table = self._table()
        widths = table.widths(console.width)
        console.print(table.rich(widths) if widths else table.cards(console.width), markup=False)
        return _text(console)

    def _table(self) -> Table:
        heads = (*name_columns(check="name"), *text_columns(severity="severity", where="where"))
        prose = text_columns(what_was_found="message", what_to_do="advice")
        return Table((*heads, *prose), [asdict(each) for each in self])


def _text(console: Any) -> str:
    text: str = console.file.getvalue()
    return text.rstrip("\n")
