"""Two runs that trained: what was changed in one of them is what the diagnosis of both names, with its step and tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.analysis.diagnosis.diagnosis import diagnose
from narrowgauge.analysis.diagnosis.pairs.two_runs import compare_two
from narrowgauge.errors import CorruptionError
from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer import loop
from narrowgauge.trainer.micro_batches import SkippedBatches
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.step import train_step
from ranks import run_ranks
from trainer.tiny_runs import settings

pytestmark = pytest.mark.usefixtures("one_thread")

AT = 4
"""The first step that is struck."""
WEIGHT = "model.layers.1.mlp.down_proj.weight"


@contextmanager
def struck(strike: Callable[[Session], None]) -> Iterator[None]:
    """Within it something is done to every run of the trainer before its step ``AT``."""

    def step(session: Session, *arguments: Any) -> Any:
        if session.step + 1 == AT:
            strike(session)
        return train_step(session, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", step)
        yield


def other_order(session: Session) -> None:
    """The batches from here on are those of ten steps later."""
    session.skipped_batches = [SkippedBatches(session.step, 10)]


def scaled_gradient(session: Session) -> None:
    """The gradient of one weight is 1.01 times what it should be, from here on."""
    session.model.get_parameter(WEIGHT).register_hook(lambda grad: grad * 1.01)


@torch.no_grad()
def flipped_bit(session: Session) -> None:
    """One exponent bit of one weight, as damaged memory flips it: no operation writes the tensor."""
    bits = session.model.get_parameter(WEIGHT).data.view(-1).view(torch.int16)
    bits[3] ^= 1 << 9


def dropped_clip(session: Session) -> None:
    """The gradients are no longer clipped, and no setting says so."""
    session.optimizer.max_grad_norm = float("inf")


CASES: dict[str, tuple[Any, dict[str, Any], str, int, str]] = {
    "another seed": (None, {"seed": 1}, "random-numbers", 0, "weight:model.embed_tokens.weight"),
    "another order of the data": (other_order, {}, "data-order", AT, "tokens:batch"),
    "another recipe": (None, {"recipe": "int8-row/word"}, "format", 1, "output:model.embed_tokens"),
    "another rate": (None, {"lr": 6e-3}, "optimizer-settings", 1, ""),
    "two micro-batches": (None, {"gradient_accumulation_steps": 2}, "order-of-sums", 1, ""),
    "a gradient times 1.01": (scaled_gradient, {}, "bug", AT, f"grad:{WEIGHT}"),
    "a flipped bit": (flipped_bit, {}, "silent-corruption", AT, f"held:{WEIGHT}"),
    "another limit of the norm": (None, {"max_grad_norm": 0.1}, "optimizer-settings", 1, ""),
}  # fmt: skip


def run_with(place: Path, folder: Path, strike: Any, **changes: Any) -> Run:
    given = {
        "recipe": "float32/word",
        "steps": 6,
        "fingerprints_every": 1,
        "eval_every": 0,
        "checkpoint_every": 0,
        **changes,
    }
    with struck(strike) if strike is not None else nullcontext():
        return read_run(loop.train(settings(place, folder, **given)))


@pytest.fixture(scope="module")
def plain(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_with(place, tmp_path_factory.mktemp("plain") / "run", None)


@pytest.mark.parametrize("case", CASES)
def test_what_was_changed_is_named_with_its_step_and_tensor(case: str, place: Path, plain: Run, tmp_path: Path) -> None:
    strike, changes, reason, step, tensor = CASES[case]
    found = compare_two(plain, run_with(place, tmp_path / "run", strike, **changes))
    assert found.reason is not None and found.reason.name == reason, found.text()
    assert found.alignment.first_difference is not None and found.alignment.first_difference.step == step, found.text()
    assert found.alignment.first_difference.tensor == tensor or not tensor, found.text()


def test_the_same_run_twice_is_the_same_and_hashes_change_no_bit(place: Path, plain: Run, tmp_path: Path) -> None:
    again, unhashed = (
        run_with(place, tmp_path / name, None, fingerprints_every=every) for name, every in (("a", 1), ("b", 0))
    )
    assert compare_two(plain, again).verdict == "The same run, bit for bit to the last weight."
    assert again.fingerprints == plain.fingerprints and [row["step"] for row in again.fingerprints] == list(range(7))
    assert compare_two(plain, unhashed).alignment.is_complete and unhashed.fingerprints == []


def test_a_clip_that_is_dropped_without_a_setting_is_a_bug_in_the_clip(place: Path, tmp_path: Path) -> None:
    runs = [
        run_with(place, tmp_path / name, strike, max_grad_norm=0.1)
        for name, strike in (("a", None), ("b", dropped_clip))
    ]
    found = compare_two(*runs)
    assert found.reason is not None and found.reason.name == "bug", found.text()
    assert found.alignment.first_difference is not None
    assert (found.alignment.first_difference.step, found.alignment.first_difference.stage) == (AT, "clip")
    assert found.alignment.first_difference.tensor == "clip:factor"


def on_ranks(rank: int, place: Path, folder: Path, shard: str) -> list[str]:
    """What is said of a run on two ranks and of one on whose rank 1 gradients are not clipped from step ``AT`` on."""
    given = {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2, "shard": shard, "recipe": "bfloat16/word"}
    torch.set_num_threads(1)
    plain = run_with(place, folder / shard / "plain", None, **given)

    def only_here(session: Session) -> None:
        if rank == 1:
            dropped_clip(session)

    with pytest.raises(CorruptionError, match="rank 1 applied no clip"):
        run_with(place, folder / shard / "dropped", only_here, **given)
    found = compare_two(plain, read_run(folder / shard / "dropped"))
    alone = diagnose(folder / shard / "dropped")
    return [found.text(), alone.findings[0].cause.name if alone.findings else "", alone.text()]


@pytest.mark.parametrize("shard", ["none", "full"])
def test_a_clip_that_one_rank_leaves_out_is_named_with_step_and_rank(shard: str, place: Path, tmp_path: Path) -> None:
    """On replicas, whose weights drift apart, and on shards, where no other rank holds what the update spoiled."""
    said, cause, alone = run_ranks(on_ranks, 2, tmp_path / "meeting", place, tmp_path, shard)[0]
    assert f"first differ at step {AT}, in clip:factor (the factor that clips the gradients) of rank 1" in said, said
    assert "(one-rank)." in said and "rank 1 applied no clip" in said
    assert cause == "rank-divergence" and f"since step {AT}" in alone, alone


@torch.no_grad()
def rounded_gradients(session: Session) -> None:
    """Gradients off by less than rounding, from here on, as another order of their sums makes them."""
    for parameter in session.model.parameters():
        parameter.register_hook(lambda grad: grad + grad.flip(0) * 2.0**-22)


def test_training_amplifies_rounding_and_stays_within_the_envelope(place: Path, tmp_path: Path) -> None:
    """Twelve steps after gradients began to differ by an ulp or so, nothing is taken for more than rounding."""
    given = {"steps": 16, "recipe": "float32/float32"}
    runs = [
        run_with(place, tmp_path / name, strike, **given) for name, strike in (("a", None), ("b", rounded_gradients))
    ]
    found = compare_two(*runs)
    assert found.alignment.rounded is None and found.alignment.first_difference is not None, found.text()
    assert (
        found.alignment.first_difference.step == AT
        and found.reason is None  # nothing was repeated, so that nothing is known to vary
        and found.reasons[0][0].name == "nondeterminism"
    )
