"""What the audit of a loop's data says of many orders of rows: nothing of healthy ones, and how soon of faults.

Rows are cut from text (Python's own library, as bytes and as words of a vocabulary of 4,096) or drawn from Zipf's law, and
handed over as loaders do: in epochs, with replacement, crops at random, small data sets, mixtures, text in its order, padded
rows, batches of one. Each stream runs for some hundred steps, and is asked every tenth. The faults are put into the same
streams from a drawn step on.

- *named*: streams in which something was named; of the healthy ones each is a false alarm.
- *right*: streams with a fault in which it was named first; *after*: steps from the fault to the name, median.

Baseline: the healthy streams.

Run: ``./dev bench data_streams [--quick]``.
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from timing import Report, Row, parser

from narrowgauge.recompute.piece_results import DEPARTS
from narrowgauge.recompute.pieces.data import DataHistory

LENGTH, ASKED = 64, 10
Batches = Iterator[np.ndarray]
Stream = Callable[[np.random.Generator, np.ndarray, int], Batches]


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def library() -> list[bytes]:
    """The files of Python's library, by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [file.read_bytes()[:40_000] for file in sorted(root.glob("*.py"))[:120]]


@cache
def text(kind: str) -> np.ndarray:
    """Tokens in the order of the text: ``"bytes"``, ``"words"`` or ``"zipf"``."""
    if kind == "zipf":
        return np.minimum(np.random.default_rng(0).zipf(1.3, 1 << 20), 4096) - 1
    if kind == "bytes":
        return np.frombuffer(b"".join(library()), dtype=np.uint8).astype(np.int64)
    numbers: dict[bytes, int] = {}
    words = [word for file in library() for word in file.split()]
    return np.array([min(numbers.setdefault(word, len(numbers)), 4095) for word in words], dtype=np.int64)


def rows(kind: str) -> np.ndarray:
    """Rows of a text that do not overlap."""
    tokens = text(kind)
    return tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)


# ── healthy streams ───────────────────────────────────────────────────────────────────────────────────────────────────


def epochs(
    draw: np.random.Generator, data: np.ndarray, batch: int, *, most: int = 1 << 30, drops: bool = True
) -> Batches:
    data = data[draw.permutation(len(data))[:most]]
    left = np.empty(0, dtype=np.int64)
    while True:
        order = np.concatenate([left, draw.permutation(len(data))])
        whole = len(order) // batch * batch
        for place in range(0, whole, batch):
            yield data[order[place : place + batch]]
        left = order[whole:] if not drops or not whole else left[:0]


def in_order(draw: np.random.Generator, data: np.ndarray, batch: int, *, most: int = 1 << 30) -> Batches:
    data = data[draw.permutation(len(data))[: max(most, batch)]]
    while True:
        for place in range(0, len(data) - batch + 1, batch):
            yield data[place : place + batch]


def replaced(draw: np.random.Generator, data: np.ndarray, batch: int, *, most: int = 1 << 30) -> Batches:
    data = data[draw.permutation(len(data))[:most]]
    while True:
        yield data[draw.integers(0, len(data), batch)]


def crops(draw: np.random.Generator, data: np.ndarray, batch: int) -> Batches:
    flat = data.reshape(-1)
    while True:
        yield np.stack([flat[at : at + LENGTH] for at in draw.integers(0, len(flat) - LENGTH, batch)])


def mixed(draw: np.random.Generator, data: np.ndarray, batch: int) -> Batches:
    """A tenth to a half of the rows from a small set, which comes again soon."""
    small, large = epochs(draw, data, 1, most=int(draw.integers(100, 400))), epochs(draw, data, 1)
    share = draw.uniform(0.1, 0.5)
    while True:
        yield np.concatenate([next(small if draw.random() < share else large) for _ in range(batch)])


def buffered(draw: np.random.Generator, data: np.ndarray, batch: int) -> Batches:
    """The text in its order, through a shuffle buffer of 1,000 rows."""
    place, held = int(draw.integers(len(data))), []
    while True:
        while len(held) < 1000:
            held.append(data[place % len(data)])
            place += 1
        yield np.stack([held.pop(int(draw.integers(len(held)))) for _ in range(batch)])


def read_through(draw: np.random.Generator, data: np.ndarray, batch: int) -> Batches:
    """Each row of the batch reads the text in its order from a place of its own."""
    places = int(draw.integers(len(data))) + np.arange(batch) * (len(data) // batch)
    while True:
        yield data[places % len(data)]
        places = places + 1


def padded(draw: np.random.Generator, data: np.ndarray, batch: int) -> Batches:
    """Rows of different lengths, those of a batch sorted by it."""
    for each in epochs(draw, data, batch):
        lengths = np.sort(draw.integers(LENGTH // 8, LENGTH, batch))
        yield np.where(np.arange(LENGTH) < lengths[:, None], each, 0)


def small(stream: Callable[..., Batches]) -> Stream:
    """A data set of half a batch to forty."""
    sizes = (0.5, 1, 1.5, 2, 3, 7, 20, 40)
    return lambda draw, data, batch: stream(draw, data, batch, most=max(1, int(batch * draw.choice(sizes))))


HEALTHY: dict[str, Stream] = {
    "epochs": epochs,
    "small epochs": small(epochs),
    "small epochs, joined": small(lambda *given, **options: epochs(*given, drops=False, **options)),
    "small epochs, not shuffled": small(in_order),
    "with replacement": replaced,
    "small, with replacement": small(replaced),
    "crops": crops,
    "mixture with a small set": mixed,
    "shuffle buffer": buffered,
    "read through": read_through,
    "padded": padded,
}


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def stuck(draw: np.random.Generator, batches: Batches, data: np.ndarray) -> Batches:
    """Only the last few batches again, or some rows of the last."""
    kept = [next(batches) for _ in range(int(draw.choice((1, 1, 2, 4))))]
    share = draw.choice((0.25, 0.5, 1.0))
    number = max(1, int(share * len(kept[0])))
    while True:
        for each in kept:
            new = next(batches).copy()
            new[:number] = each[:number]
            yield new


def shard(draw: np.random.Generator, batches: Batches, data: np.ndarray) -> Batches:
    """One shard of some batches, shuffled anew in each pass."""
    kept = np.concatenate([next(batches) for _ in range(int(draw.integers(3, 9)))])
    batch = len(next(batches))
    while True:
        order = draw.permutation(len(kept))
        for place in range(0, len(kept) - batch + 1, batch):
            yield kept[order[place : place + batch]]


def twice(draw: np.random.Generator, batches: Batches, data: np.ndarray) -> Batches:
    """The first part of the rows also in the place of the others."""
    parts = int(draw.choice((2, 4)))
    for each in batches:
        yield np.concatenate([each[: max(1, len(each) // parts)]] * parts)[: len(each)]


def by_key(draw: np.random.Generator, batches: Batches, data: np.ndarray) -> Batches:
    """Rows sorted by their first tokens or their mean."""
    key = data.mean(1) if draw.random() < 0.5 else data[:, 0] * 10_000 + data[:, 1]
    order, batch = np.argsort(key, kind="stable"), len(next(batches))
    while True:
        for place in range(0, len(order) - batch + 1, batch):
            yield data[order[place : place + batch]]


def other_tokens(draw: np.random.Generator, batches: Batches, data: np.ndarray) -> Batches:
    """A share of the rows from another text, a token that is often left out, or all tokens in other places of the table."""
    kind, share = draw.choice(("rows", "rows", "left out", "moved")), draw.choice((0.25, 0.5, 1.0))
    other = rows("bytes" if data.max() > 255 else "words") % (int(data.max()) + 1)
    often = np.bincount(data.reshape(-1)).argsort()[-3:]
    for each in batches:
        each = each.copy()
        if kind == "rows":
            number = max(1, int(share * len(each)))
            each[:number] = other[draw.integers(0, len(other), number)]
        elif kind == "left out":
            each = np.where(np.isin(each, often), (each + 1) % (data.max() + 1), each)
        else:
            each = (each + 7) % (data.max() + 1)
        yield each


FAULTS: dict[str, tuple[Callable[[np.random.Generator, Batches, np.ndarray], Batches], set[str]]] = {
    "stuck": (stuck, {"rows-again", "rows-few"}),
    "one shard": (shard, {"rows-again", "rows-few"}),
    "twice in a step": (twice, {"rows-twice"}),
    "sorted": (by_key, {"rows-sorted", "tokens-change"}),
    "other tokens": (other_tokens, {"tokens-change"}),
}


# ── the trial ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def named(batches: Batches, steps: int) -> tuple[str, int]:
    """What is named first, and at which step it was asked."""
    history = DataHistory()
    for step in range(1, steps + 1):
        history.add(torch.from_numpy(np.ascontiguousarray(next(batches))))
        history.end_step(step)
        if step % ASKED == 0:
            found = [each.cause for each in history.results(step) if each.status == DEPARTS]
            if found:
                return found[0], step
    return "", steps


def changed(
    draw: np.random.Generator, healthy: Batches, fault: Callable[..., Batches], data: np.ndarray, start: int
) -> Batches:
    for _ in range(start):
        yield next(healthy)
    yield from fault(draw, healthy, data)


def trials(stream: str, seeds: range, steps: int) -> Row:
    names: dict[str, int] = {}
    for seed in seeds:
        draw = np.random.default_rng(seed)
        kind, batch = draw.choice(("bytes", "words", "zipf")), int(draw.choice((1, 4, 8, 32)))
        name, _ = named(HEALTHY[stream](draw, rows(kind), batch), steps)
        if name:
            names[f"{name} ({kind}, {batch})"] = names.get(f"{name} ({kind}, {batch})", 0) + 1
    return {
        "stream": stream,
        "runs": len(seeds),
        "named": sum(names.values()),
        "which": ", ".join(f"{n} {c}" for n, c in names.items()),
    }


def faulty(fault: str, seeds: range, steps: int) -> Row:
    plant, right = FAULTS[fault]
    after, others = [], []
    for seed in seeds:
        draw = np.random.default_rng(seed)
        kind, batch = draw.choice(("bytes", "words", "zipf")), int(draw.choice((4, 8, 32)))
        stream = HEALTHY[str(draw.choice(("epochs", "with replacement", "crops")))]
        start, data = int(draw.integers(20, steps // 2)), rows(kind)
        name, step = named(changed(draw, stream(draw, data, batch), plant, data, start), steps)
        if name in right:
            after.append(step - start)
        elif name:
            others.append(name)
    return {
        "fault": fault, "runs": len(seeds), "right": len(after), "wrong": len(others),
        "silent": len(seeds) - len(after) - len(others),
        "after": statistics.median(after) if after else None, "which": ", ".join(others),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--first", type=int, default=0, help="the first seed")
    options.add_argument("--seeds", type=int, default=20, help="runs of each kind")
    options.add_argument("--steps", type=int, default=300, help="steps of a run")
    given = options.parse_args(arguments)
    torch.set_num_threads(1)
    report = Report("data streams", given)
    seeds = range(given.first, given.first + (2 if given.quick else given.seeds))
    report.add("healthy streams", [trials(stream, seeds, given.steps) for stream in HEALTHY])
    report.add("faults", [faulty(fault, seeds, given.steps) for fault in FAULTS])
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
