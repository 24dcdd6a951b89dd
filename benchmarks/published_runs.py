"""Ask the planner for training runs that others measured and published, by name, as a reader of
their pages would, and compare.

Claim: three rows of errors. Held-out runs are planned within a median of 10 % and a mean of 16 %,
75 to 85 % inside the interval; with one measured run of the same source, in its layout, within a
median of 10 %, 60 % of them within 15 %. ``published.toml`` has the runs with which the numbers of the planner were
fitted, ``published_held_out.toml`` those that were set aside.

A memory is right within 10 %, a speed or a length within 15 %. Each run is asked by model, chip,
chips, length, precision and the program's name; ``--stated`` adds its layout and batch. ``--next``
plans each run from every other one of its publication, chip and program. ``ends`` are those of the
planner's table: the 10 and 90 % quantiles of measured over planned. Those of memories (in the layout
that is stated), which few publish, are widened until the other publications' hold 80 %.

Run: ``./dev bench published_runs [--held-out] [--stated] [--next]``; a minute. The summaries are
written into ``benchmarks/published_runs.jsonl``.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.built_models import of_config
from narrowgauge.planner.estimate import ERRORS
from narrowgauge.planner.measured_run import SAME, MeasuredRun
from narrowgauge.planner.memory import outside_bytes
from narrowgauge.planner.plan import plan
from narrowgauge.spec.chips import Chip, get_chip
from narrowgauge.spec.toml import load_toml

HERE = Path(__file__).parent
FILE = HERE / "published_runs.jsonl"


class Fact(NamedTuple):
    """One fact: what was measured, planned, and the ends of the interval; ``kind`` is a row of
    errors, ``source`` of runs or questions.
    """

    name: str
    publication: str
    source: str
    kind: str
    what: str
    measured: float
    planned: float
    ends: Sequence[float]

    @property
    def error(self) -> float:
        return abs(self.planned / self.measured - 1)

    @property
    def is_right(self) -> bool:
        return self.error <= (0.10 if self.what == "memory" else 0.15)

    @property
    def is_inside(self) -> bool:
        return self.ends[0] <= self.measured <= self.ends[1]


def load(*, held_out: bool, stated: bool = False):
    """Return the runs and questions of a file, each with its question for the planner."""
    name = "published_held_out.toml" if held_out else "published.toml"
    table = load_toml((HERE / name).read_text(encoding="utf-8"))
    models = {name: of_config(config, name) for name, config in table["models"].items()}
    rows = []
    for source in ("run", "question"):
        for row in table[source]:
            ask = row["ask"]
            ask["model"] = models.get(ask["model"], ask["model"])
            ask.setdefault("chips", 1)
            if isinstance(ask["chip"], dict):
                ask["chip"] = chip_of(**ask["chip"])
            if stated and "layout" in row:
                ask["layout"] = row["layout"]
            rows.append({**row, "names": (row["name"], row["publication"], f"{source}s")})
    return rows


_CHIPS = {}
"""Chips by what a run says of them: equal ones are one object."""


def chip_of(like: str, **fields) -> Chip:
    """Return a chip that differs so from one of the table."""
    return _CHIPS.setdefault(f"{like} {fields}", replace(get_chip(like), **fields))


def facts_of(rows):
    """Yield the planner's answers beside the facts of runs."""
    for row in rows:
        fact = row["fact"]
        if "longest" in fact:
            length = longest(row["ask"])
            ends = length, length
            yield Fact(*row["names"], "dense", "length", fact["longest"], length, ends)
            continue
        job = plan(**row["ask"], advise=False).best
        reserved = job.peak_bytes - outside_bytes(job.layout.num_ranks)  # by the allocator
        bytes_of = {"allocated_gb": job.allocated_bytes, "reserved_gb": reserved}
        for name in bytes_of.keys() & fact.keys():
            planned = bytes_of[name]
            ends = [1e-9 * planned / job.peak_bytes * end for end in job.memory_interval]
            yield Fact(*row["names"], job.kind, "memory", fact[name], planned / 1e9, ends)
        if "rate" in fact:
            rates = fact["rate"] * job.cluster.chips, job.tokens_per_second, job.rate_interval
            yield Fact(*row["names"], job.kind, "speed", *rates)


def longest(asked) -> int:
    """Return the tokens of the longest sequence that fits, to 128."""
    least, most = 1, 1 << 13
    while most - least > 1:
        middle = (least + most) // 2
        if plan(**asked, sequence_length=128 * middle, advise=False).best.fits:
            least = middle
        else:
            most = middle
    return 128 * least


def pairs_of(rows, *, stated: bool):
    """Plan each run from every other one of its publication, chip and program: in the known run's
    layout, or in the one that its source states.
    """
    groups = defaultdict(list)
    for row in rows:
        asked = row["ask"]
        fact = row["fact"]
        if "rate" not in fact or "layout" not in asked:
            continue
        rate = fact["rate"] * asked["chips"]
        peak = fact.get("allocated_gb", fact.get("reserved_gb", 0.0))
        with contextlib.suppress(NarrowgaugeError):
            run = MeasuredRun(tokens_per_second=rate, peak_gb=peak, **asked)
            tuning = run.job.tuning.base, run.job.tuning.lora > 0
            loop = run.job.chip.name, run.job.program, run.job.kind
            groups[row["publication"], loop, tuning].append((row["names"], run))
    for runs in groups.values():
        for (_, known), (names, wanted) in permutations(runs, 2):
            changes = dict(wanted.asked)
            if not stated:
                changes.pop("layout")
                changes["tokens_per_step"] = wanted.job.tokens_per_step
            with contextlib.suppress(NarrowgaugeError):
                told = known.next(**changes)
                if told.rate_interval is None or told.difference == SAME:
                    continue  # no interval, or two measurements of one question
                rates = wanted.tokens_per_second, told.tokens_per_second, told.rate_interval
                yield Fact(*names, told.difference, "speed", *rates)
                if wanted.peak_gb and known.peak_gb and told.peak_interval:
                    peaks = wanted.peak_gb, told.peak_gb, told.peak_interval
                    yield Fact(*names, told.difference, "memory", *peaks)


def summary(facts) -> str:
    """Summarize errors; each run has the weight one, whatever the number of its facts."""
    count = Counter(fact.name for fact in facts)
    median = mean = right = inside = passed = 0.0
    for fact in sorted(facts, key=lambda fact: fact.error):
        weight = 1 / count[fact.name] / len(count)
        if passed < 0.5 - 1e-9:
            median = fact.error
        passed += weight
        mean += weight * fact.error
        right += weight * fact.is_right
        inside += weight * fact.is_inside
    return (
        f"{len(count)} runs: median error {median:.1%}, mean {mean:.1%}; {right * len(count):.0f} "
        f"right; {inside:.0%} inside the interval"
    )


def ends_of(facts, wider: float = 1.0):
    """Return the 10 and 90 % quantiles of measured over planned values, as far from the median as
    the power ``wider`` says.
    """
    ratios = [fact.measured / fact.planned for fact in facts]
    low, *_, middle, _, _, _, high = statistics.quantiles(ratios, n=10, method="inclusive")
    return middle * (low / middle) ** wider, middle * (high / middle) ** wider


def held_by_others(facts, wider: float = 1.0) -> float:
    """Return the share of facts inside the interval of the other publications' facts."""
    inside = 0
    for fact in facts:
        others = [other for other in facts if other.publication != fact.publication]
        low, high = ends_of(others, wider)
        inside += low <= fact.measured / fact.planned <= high
    return inside / len(facts)


def main() -> int:
    """Print every fact and the summaries."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    for name in ("held-out", "stated", "next"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    rows = load(held_out=options.held_out, stated=options.stated or options.next)
    facts = pairs_of(rows, stated=options.stated) if options.next else facts_of(rows)
    groups = defaultdict(list)
    for fact in facts:
        print(f"{fact.name:55} {fact.what:7} {fact.measured:12,.1f} {fact.planned:12,.1f}")
        for group in (fact.kind, "all kinds", fact.source):
            if fact not in groups[fact.what, group]:
                groups[fact.what, group].append(fact)
        groups["all", fact.source].append(fact)
    asked = [name for name, is_set in vars(options).items() if is_set]
    records = []
    for (what, group), chosen in sorted(groups.items()):
        records.append({"row": ", ".join([*asked, what, group]), "errors": summary(chosen)})
        print(f"{what}, {group}: {records[-1]['errors']}")
        is_wide = what == "memory" and group == "all kinds"
        if options.held_out or not (is_wide or group in ERRORS["speed"]):
            continue
        wider = 1.0
        while is_wide and held_by_others(chosen, wider) < 0.8:
            wider += 0.05
        ends = ", ".join(f"{end:.3f}" for end in ends_of(chosen, wider))
        print(f"ends = [{ends}] runs = {len(chosen)}")
    from _conditions import keep_newest  # the tests of the planner do without PyTorch

    keep_newest(FILE, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
