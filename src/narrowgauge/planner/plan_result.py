"""A plan in tables of at most 120 columns and eight fixed sentences: options, what fits instead,
and the step of the best option. 1 GB is 10^9 bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from narrowgauge.planner.estimate import ERRORS, Ends, Estimate
from narrowgauge.planner.memory import Groups
from narrowgauge.spec.matmul_kernels import multiplies
from narrowgauge.spec.tables import Row, Table, table_of

_NOT_OF_CHANGES = ("B/param", "80 %", "tensors", "80 % of rates")
_UNITS = ((1.75 * 86_400, 86_400, "d"), (7200, 3600, "h"), (120, 60, "min"), (1, 1, "s"), (0, 1e-3, "ms"))  # fmt: skip
"""The least value, the size and the name of units of time."""


def bytes_text(num_bytes: float) -> str:
    """Write bytes in gigabytes.

    Example:
        >>> bytes_text(26.28e9), bytes_text(5.7e12)
        ('26.3 GB', '5,700.0 GB')
    """
    return f"{num_bytes / 1e9:,.1f} GB"


def duration_text(seconds: float) -> str:
    """Write a time in the largest unit with a value of at least two, to three digits.

    Example:
        >>> duration_text(864000), duration_text(93600), duration_text(0.0123)
        ('10 d', '26 h', '12.3 ms')
    """
    size, unit = next((size, unit) for least, size, unit in _UNITS if abs(seconds) >= least)
    style = ",.0f" if abs(seconds) >= 100 * size else ".3g"
    return f"{seconds / size:{style}} {unit}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold the answer of :func:`narrowgauge.plan`.

    Args:
        options: best first. Jobs that do not fit come last, the nearest to fitting first.
        tokens: of the whole run; None if not asked.
        left_out: rows that cannot be planned, and why.
        instead: if nothing fits, changes of the question that do, each with its job.
    """

    options: tuple[Estimate, ...]
    tokens: float | None
    left_out: dict[str, str]
    instead: tuple[tuple[str, Estimate], ...]

    @property
    def best(self) -> Estimate:
        """Return the best option, or the nearest to fitting."""
        return self.options[0]

    def row(self) -> Row:
        """Return the question, the options and the answer as plain values, for JSON."""
        return {
            "model": self.best.architecture.name,
            "num_parameters": self.best.architecture.num_parameters,
            "trained_parameters": self.best.trained_parameters,
            "tokens": self.tokens,
            "options": [job.row(self.tokens) for job in self.options],
            "instead": [{"change": text, **job.row(self.tokens)} for text, job in self.instead],
            "left_out": self.left_out,
            "answer": self.sentences(),
        }

    def sentences(self) -> list[str]:
        """Return the conclusions, the most important first."""
        best = self.best
        cluster = best.cluster
        lines = []
        if best.headroom_bytes < 0:
            lines.append(
                f"Nothing fits: the closest is too large by {bytes_text(-best.headroom_bytes)}."
            )
        if best.host_bytes:
            on_host, memory = map(bytes_text, (best.host_bytes, cluster.host_memory_bytes))
            verb = "holds" if best.host_bytes <= cluster.host_memory_bytes else "lacks room:"
            lines.append(f"The host of a node {verb} {on_host} of {memory}.")
        for row, reason in self.left_out.items():
            lines.append(f"Left out: {row}: {reason}")
        return [
            *lines,
            f"80 % intervals: of {ERRORS['speed'][best.kind]['runs']} published speeds of {best.kind} models, asked by "
            "name. A measured run of yours makes them smaller: narrowgauge plan next.",
            f"Assumed: {best.program} (--program); steps of {best.tokens_per_step:,} tokens (--tokens-per-step).",
        ]

    def __str__(self) -> str:
        """Return the tables and sentences as text."""
        parts = [table.plain() for table in self.tables()]
        return "\n".join([*parts, *self.sentences()])

    def tables(self) -> list[Table]:
        """Return the options, their layouts, what fits instead, the whole run, and the time and
        memory of the best option by group.
        """
        best = self.best
        a = best.architecture
        title = f"{a.name}: {a.num_parameters / 1e9:.3g}B parameters"
        if best.tuning.lora:
            title += f", {best.trained_parameters / 1e9:.3g}B trained"
        title += f"; {best.sequence_length:,} tokens; {best.cluster.name}"
        tables = [table_of([_option(job) for job in self.options], title)]
        if self.instead:
            rows = [{"change": text, **_option(job)} for text, job in self.instead]
            title = "Nothing fits as asked. With a change it does"
            tables.append(table_of(rows, title, hidden=_NOT_OF_CHANGES))
        title = f"A run of {self.tokens / 1e9:,.6g}B tokens" if self.tokens else ""
        tables.append(table_of([_layout(job, self.tokens) for job in self.options], title))
        tables.append(_groups("a step", best.step, duration_text))
        return [*tables, _groups("memory of the worst rank", best.memory, bytes_text)]


def _groups(title: str, groups: Groups, text: Callable[[float], str]) -> Table:
    """Return a table of the groups that are not zero, the largest first."""
    rows = []
    for name in sorted(groups, key=groups.__getitem__, reverse=True):
        if groups[name]:
            rows.append({title: name, "": text(groups[name])})
    return table_of(rows)


def _ends(interval: Ends, scale: float, style: str) -> str:
    """Write an interval."""
    return "–".join(format(end / scale, style) for end in interval)


def _option(job: Estimate) -> Row:
    """Return the row of a job. ``tensors`` is what ``torch.cuda.max_memory_allocated`` prints."""
    fits = "no"
    if job.fits:
        fits = "yes" if job.has_room else "barely"
    return {
        "recipe": job.recipe.name,
        "B/param": f"{job.bytes_per_param:.3g}",
        "a chip": bytes_text(job.peak_bytes),
        "80 %": _ends(job.memory_interval, 1e9, ".3g"),
        "tensors": bytes_text(job.allocated_bytes),
        "fits": fits,
        "tokens/s": f"{job.tokens_per_second:,.0f}",
        "80 % of rates": _ends(job.rate_interval, 1, ",.0f"),
        "MFU": f"{job.mfu:.0%}",
        "our matmuls": "" if multiplies(job.recipe.compute, job.chip) else "emulated",
    }


def _layout(job: Estimate, tokens: float | None) -> Row:
    """Return the row of a job's layout, and of a whole run of so many tokens."""
    row = {"recipe": job.recipe.name}
    if tokens is not None:
        days = job.days(tokens)
        row["days"] = f"{days:,.1f}"
        row["80 %"] = _ends(job.days_interval(tokens), 1, ",.1f")
        row["chip hours"] = f"{24 * job.cluster.chips * days:,.0f}"
    row["loses"] = "" if job.recipe.storage.keeps_updates else "small updates"
    return {**row, "layout": str(job.layout)}
