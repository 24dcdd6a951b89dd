"""The data: rows that come again, are sorted or change; and every healthy order of rows, of which nothing is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.recompute.departures import unchecked
from narrowgauge.recompute.piece_results import DEPARTS, PieceResult
from narrowgauge.recompute.pieces.data import DataHistory, check_ranks
from narrowgauge.recompute.seen_rows import SeenRows, digest_of, read_rows
from narrowgauge.recompute.step_watcher import StepWatcher
from narrowgauge.recompute.task import task
from ranks import run_ranks
from recompute.audited_loop import LENGTH, VOCABULARY, Loop, batches

STEPS, ROWS = 60, 8


def drawn(number: int, seed: int = 0, most: int = VOCABULARY) -> Tensor:
    return torch.randint(0, most, (number, LENGTH), generator=torch.Generator().manual_seed(seed))


def named(batches: Iterator[Tensor], steps: int = STEPS, declared: str = "", passes: int = 2) -> list[PieceResult]:
    """What is named of a stream, whose steps have some batches each, and are asked every tenth."""
    history, found = DataHistory(declared), []
    for step in range(1, steps + 1):
        for part in next(batches).chunk(passes):
            history.add(part)
        history.end_step(step)
        if step % 10 == 0:
            found += [each for each in history.results(step) if each.status == DEPARTS]
    return found


def fresh(seed: int = 0) -> Iterator[Tensor]:
    while True:
        yield drawn(ROWS, seed)
        seed += 1


def epochs(number: int, is_shuffled: bool = True) -> Iterator[Tensor]:
    data, generator = drawn(number), torch.Generator().manual_seed(1)
    left = torch.empty(0, dtype=torch.int64)
    while True:
        order = torch.randperm(number, generator=generator) if is_shuffled else torch.arange(number)
        left = torch.cat([left, order])
        while len(left) >= ROWS:
            yield data[left[:ROWS]]
            left = left[ROWS:]


def with_replacement(number: int) -> Iterator[Tensor]:
    data, generator = drawn(number), torch.Generator().manual_seed(1)
    while True:
        yield data[torch.randint(0, number, (ROWS,), generator=generator)]


def padded() -> Iterator[Tensor]:
    """Rows of different lengths, sorted in each batch; some are nothing but padding."""
    for number, each in enumerate(fresh()):
        lengths = (torch.arange(ROWS) + number % 3).clamp_max(LENGTH)
        yield torch.where(torch.arange(LENGTH) < lengths[:, None], each, 0)


def mixed() -> Iterator[Tensor]:
    """A quarter of the rows are of a small set, which comes again soon."""
    few = iter(row for batch in epochs(3 * ROWS) for row in batch)
    for each in fresh():
        yield torch.cat([each[ROWS // 4 :], torch.stack([next(few) for _ in range(ROWS // 4)])])


HEALTHY: dict[str, Callable[[], Iterator[Tensor]]] = {
    "new rows": fresh,
    "a second epoch": lambda: epochs(30 * ROWS),
    "a second epoch in the same order": lambda: epochs(30 * ROWS, is_shuffled=False),
    "many epochs": lambda: epochs(5 * ROWS + 3),
    "a data set of three rows": lambda: epochs(3),
    "a data set of one batch": lambda: epochs(ROWS, is_shuffled=False),
    "draws with replacement": lambda: with_replacement(10 * ROWS),
    "draws from ten rows": lambda: with_replacement(10),
    "padding": padded,
    "a mixture with a small set": mixed,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_named_of_a_healthy_order(name: str) -> None:
    assert not named(HEALTHY[name](), 100)


def after(steps: int, fault: Callable[[Iterator[Tensor]], Iterator[Tensor]]) -> Iterator[Tensor]:
    healthy = fresh()
    for _ in range(steps):
        yield next(healthy)
    yield from fault(healthy)


def cycled(number: int) -> Callable[[Iterator[Tensor]], Iterator[Tensor]]:
    def fault(healthy: Iterator[Tensor]) -> Iterator[Tensor]:
        kept = [next(healthy) for _ in range(number)]
        while True:
            yield from kept

    return fault


def shuffled_shard(healthy: Iterator[Tensor]) -> Iterator[Tensor]:
    kept, generator = torch.cat([next(healthy) for _ in range(5)]), torch.Generator().manual_seed(0)
    while True:
        yield from kept[torch.randperm(len(kept), generator=generator)].split(ROWS)


def one_row_stays(healthy: Iterator[Tensor]) -> Iterator[Tensor]:
    first = next(healthy)[:1]
    for each in healthy:
        yield torch.cat([first, each[1:]])


def overlapping(healthy: Iterator[Tensor]) -> Iterator[Tensor]:
    last = next(healthy)
    while True:
        last = torch.cat([last[ROWS // 2 :], next(healthy)[ROWS // 2 :]])
        yield last


def anew(_: Iterator[Tensor]) -> Iterator[Tensor]:
    healthy = fresh()
    return healthy


def four_times(healthy: Iterator[Tensor]) -> Iterator[Tensor]:
    """As four workers give that drew the same order."""
    for each in healthy:
        yield from (each.clone() for _ in range(4))


def twice(healthy: Iterator[Tensor]) -> Iterator[Tensor]:
    for each in healthy:
        yield torch.cat([each[: ROWS // 2]] * 2)


def one_row_twice(healthy: Iterator[Tensor]) -> Iterator[Tensor]:
    for each in healthy:
        yield torch.cat([each[:-1], each[:1]])


def by_first_token(_: Iterator[Tensor]) -> Iterator[Tensor]:
    data = drawn(STEPS * ROWS, 5, most=10_000)
    yield from data[data[:, 0].argsort()].split(ROWS)


def by_mean_of_batches(_: Iterator[Tensor]) -> Iterator[Tensor]:
    parts = drawn(STEPS * ROWS, 5).split(ROWS)
    yield from sorted(parts, key=lambda part: -float(part.double().mean()))


def one_token(healthy: Iterator[Tensor]) -> Iterator[Tensor]:
    for each in healthy:
        yield torch.zeros_like(each)


def other_frequencies(healthy: Iterator[Tensor]) -> Iterator[Tensor]:
    for each in healthy:
        yield torch.where(each % 3 == 0, 1, each)


FAULTS: dict[str, tuple[int, Callable[[Iterator[Tensor]], Iterator[Tensor]], str, dict[str, object]]] = {
    "one batch again and again": (12, cycled(1), "rows-again", {"lag": 1, "share": 1.0}),
    "each batch four times": (12, four_times, "rows-again", {"lag": 1}),
    "three batches again and again": (30, cycled(3), "rows-few", {"rows": 24, "seen": 264, "since": 34}),
    "one shard, shuffled": (40, shuffled_shard, "rows-few", {"rows": 40, "seen": 360, "since": 46}),
    "one row stays": (30, one_row_stays, "rows-again", {"lag": 1, "share": 0.125}),
    "batches that overlap": (20, overlapping, "rows-again", {"lag": 1, "share": 0.5}),
    "a reader that begins anew": (20, anew, "rows-anew", {"since": 21, "until": 40}),
    "one micro-batch twice": (4, twice, "rows-twice", {"share": 0.5, "since": 5}),
    "one row twice": (4, one_row_twice, "rows-twice", {"share": 0.125}),
    "sorted rows": (2, by_first_token, "rows-sorted", {"key": "start", "what": "rows"}),
    "sorted batches": (2, by_mean_of_batches, "rows-sorted", {"key": "mean", "what": "steps"}),
    "one token alone": (12, one_token, "tokens-change", {"since": 13}),
    "other frequencies": (30, other_frequencies, "tokens-change", {"since": 31}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_data_is_named_once_with_what_shows_it(name: str) -> None:
    start, fault, cause, values = FAULTS[name]
    found = named(after(start, fault), 2 * STEPS if name == "a reader that begins anew" else STEPS)
    assert [each.cause for each in found] == [cause], found
    for key, value in values.items():
        now = found[0].values[key]
        assert abs(now - value) < 1e-9 if isinstance(value, float) else now == value, (key, now)  # type: ignore[operator]


def test_each_change_of_tokens_is_named_once() -> None:
    def twice_changed(healthy: Iterator[Tensor]) -> Iterator[Tensor]:
        for number, each in enumerate(healthy):
            yield torch.where(each % 3 == 0, 1, each) if number < 30 else torch.where(each % 3 == 1, 2, each)

    found = named(after(30, twice_changed), 100)
    assert [(each.cause, each.values["since"]) for each in found] == [("tokens-change", 31), ("tokens-change", 61)]


def test_a_drift_is_no_change() -> None:
    def drifting() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        for number, each in enumerate(fresh()):
            chosen = torch.rand(each.shape, generator=generator) < number / 100
            yield torch.where(chosen & (each % 3 == 0), 1, each)

    assert not named(drifting(), 100)


def test_what_is_declared_is_not_judged() -> None:
    assert not named(after(2, by_first_token), declared="curriculum")
    assert not named(after(30, other_frequencies), declared="curriculum")
    assert [each.cause for each in named(after(12, cycled(1)), declared="curriculum")] == ["rows-again"]
    assert not named(after(12, cycled(1)), declared="own")
    with pytest.raises(ng.NarrowgaugeError, match="data 'curiculum'"):
        task(data="curiculum")


# ── what is kept ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_are_told_apart_and_padding_is_left_out() -> None:
    tokens = torch.cat([drawn(200), drawn(200), torch.full((3, LENGTH), 5)])
    tokens[0, 0], tokens[0, 1] = tokens[0, 1].item(), tokens[0, 0].item()
    rows = read_rows(1, [digest_of(tokens[:300]), digest_of(tokens[300:])])
    assert (
        len(rows.hashes) == 400 and len(set(rows.hashes)) == 201 and [len(part) for part in rows.passes] == [300, 100]
    )
    assert float(rows.counts.sum()) == tokens.numel()
    assert rows.keys[7][1] == int(tokens[7].sum()) and [k[2] for k in rows.keys[-3:]] == [0, 0, 0]
    order = sorted(range(400), key=lambda row: tokens[row, :3].tolist())
    assert [rows.keys[row][0] for row in order] == sorted(key[0] for key in rows.keys[:400])


def test_of_many_rows_a_sample_is_kept_by_their_hashes() -> None:
    seen = SeenRows(most=100)
    hashes = [row[0] for row in digest_of(drawn(1000)).rows.tolist()]
    for step, start in enumerate(range(0, 1000, 10)):
        seen.add(step, hashes[start : start + 10])
        assert len(seen) <= 100
    kept = seen.chosen(hashes)
    assert 20 < len(kept) <= 100 and all(seen.last[h] == hashes.index(h) // 10 for h in kept)


# ── in a loop ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_loop_whose_micro_batches_are_one_batch_is_named_and_no_bit_changes() -> None:
    def again() -> Iterator[Tensor]:
        while True:
            batch = next(source)
            yield from (batch, batch)

    loop, plain = Loop(every=4), Loop(every=0)
    for each in (loop, plain):
        each.run(2)
        source = each.data
        each.data = again()
        each.run(6)
    assert [each.name for each in loop.findings()] == ["rows-twice"]
    assert loop.bits().equal(plain.bits())


def test_what_takes_a_batch_twice_by_design_is_not_named() -> None:
    loop = Loop(every=4)
    backward = loop.backward

    def sharpness_aware(tokens: Tensor, number: int) -> None:
        backward(tokens, number)
        with torch.no_grad():
            for p in loop.model.parameters():
                p.add_(p.grad, alpha=1e-3)  # type: ignore[arg-type]
        backward(tokens, number)

    loop.micro_batches = 1
    loop.backward = sharpness_aware  # type: ignore[method-assign]
    loop.run(8)
    assert "rows-twice" not in loop.names()


def test_an_error_of_the_audit_ends_no_run_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("of its own")

    monkeypatch.setattr(DataHistory, "add", fail)
    loop = Loop(every=2).run(3)
    assert unchecked(loop.results[2])["data"] == "ValueError: of its own" and not loop.findings()


def test_inputs_that_are_no_tokens_are_not_checked() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer, found = torch.optim.SGD(model.parameters()), list[PieceResult]()
    watcher = StepWatcher(model, optimizer, 1, lambda _, results: found.extend(results), first=1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    watcher.remove()
    assert "data" in unchecked(found)


def test_a_run_that_goes_back_may_have_its_rows_again(tmp_path: Path) -> None:
    loop = Loop(every=0)
    with ng.RunRecorder(tmp_path / "run", loop.model, loop.optimizer, audit_every=4) as recorder:
        batches = [next(loop.data) for _ in range(40)]
        for start, end in ((0, 10), (4, 20)):
            loop.data = iter(batches[2 * start : 2 * end])
            if start:
                recorder.go_back(start)
            for _ in range(start, end):
                loop.run(1)
                recorder.step(1.0)
    assert not [each for each in ng.read_run(tmp_path / "run").events if "rows" in str(each.get("detector"))]


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ranks_with_the_same_rows_and_weights_are_named() -> None:
    found = check_ranks(7, [(1, b"a"), (2, b"a"), (1, b"a"), (1, b"b"), (None, b"a"), (None, b"a")])
    assert [(each.cause, each.values) for each in found] == [("ranks-same-rows", {"ranks": "0, 2"})]
    assert not check_ranks(7, [(1, b"a"), (1, b"b"), (2, b"a"), (None, b""), (None, b"")])


def told_by_ranks(rank: int, seeds: tuple[int, int]) -> set[str]:
    """What is named where each rank has the rows of its seed, and gradients are summed over ranks."""
    loop, results = Loop(every=0), list[PieceResult]()
    StepWatcher(loop.model, loop.optimizer, 2, lambda _, found: results.extend(found), gather=all_ranks().gather)
    loop.data = iter(batches(seeds[rank]))

    def summed() -> None:
        for p in loop.model.parameters():
            torch.distributed.all_reduce(p.grad)

    loop.after_backward = summed  # type: ignore[method-assign]
    loop.run(3)
    return {each.cause for each in results if each.piece == "data" and each.status == DEPARTS}


def test_two_ranks_compare_their_rows(tmp_path: Path) -> None:
    assert run_ranks(told_by_ranks, 2, tmp_path / "same", (1, 1)) == [{"ranks-same-rows"}] * 2
    assert run_ranks(told_by_ranks, 2, tmp_path / "other", (1, 2)) == [set()] * 2
