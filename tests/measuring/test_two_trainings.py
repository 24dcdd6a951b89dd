"""Two runs that trained: what was changed in one of them is what the diagnosis of both names, with
its step and tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.measuring.two_runs import TwoRuns
from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer import session
from narrowgauge.trainer.session import Session, train_step
from trainer.tiny_runs import trained

pytestmark = pytest.mark.usefixtures("one_thread")

AT = 4
"""The first step that is struck."""
WEIGHT = "model.layers.1.mlp.down_proj.weight"


@contextmanager
def struck(strike: Callable[[Session], None]) -> Iterator[None]:
    """Within it something is done to every run of the trainer before its step ``AT``."""

    def step(run: Session) -> Any:
        if run.step + 1 == AT:
            strike(run)
        return train_step(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "train_step", step)
        yield


def other_order(session: Session) -> None:
    """The batches from here on are those of ten steps later."""
    true_batch = session.tokens.batch
    later = lambda step, *arguments: true_batch(step + 10, *arguments)  # noqa: E731
    object.__setattr__(session.tokens, "batch", later)


def scaled_gradient(session: Session) -> None:
    """The gradient of one weight is 1.01 times what it should be, from here on."""
    session.model.get_parameter(WEIGHT).register_hook(lambda grad: grad * 1.01)


@torch.no_grad()
def flipped_bit(session: Session) -> None:
    """One exponent bit of one weight, as damaged memory flips it: no operation writes the tensor."""
    bits = session.model.get_parameter(WEIGHT).data.view(-1).view(torch.int16)
    bits[3] ^= 1 << 9


CASES: dict[str, tuple[Any, dict[str, Any], int, str, str, str]] = {
    "another seed": (None, {"seed": 1}, 0, "start", "weight:model.embed_tokens.weight", "seed 0 and 1"),
    "another order of the data": (other_order, {}, AT, "data", "tokens:batch", "No recorded setting differs."),
    "a gradient times 1.01": (scaled_gradient, {}, AT, "gradient", f"grad:{WEIGHT}", "No recorded setting differs."),
    "a flipped bit": (flipped_bit, {}, AT, "forward", f"output:{WEIGHT.removesuffix('.weight')}", "No recorded setting differs."),
}  # fmt: skip
"""By case: what strikes the second run, its settings, then step, stage and tensor of the first
difference, and a sentence.
"""


def run_with(place: Path, folder: Path, strike: Any, **changes: Any) -> Run:
    options = {
        "recipe": "float32/float32",
        "steps": 6,
        "fingerprints_every": 1,
        "eval_every": 0,
        "checkpoint_every": 0,
    }
    with struck(strike) if strike is not None else nullcontext():
        return read_run(trained(place, folder, **{**options, **changes}))


@pytest.fixture(scope="module")
def plain(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_with(place, tmp_path_factory.mktemp("plain") / "run", None)


@pytest.mark.parametrize("case", CASES)
def test_what_was_changed_is_located(case: str, place: Path, plain: Run, tmp_path: Path) -> None:
    strike, changes, step, stage, tensor, sentence = CASES[case]
    runs = TwoRuns(plain, run_with(place, tmp_path / "run", strike, **changes))
    first = runs.readings[0]
    assert first.step == step and first.stage == (stage or first.stage), str(runs)
    assert first.tensor == (tensor or first.tensor) and sentence in str(runs), str(runs)


def test_the_same_run_twice_is_the_same_and_hashes_change_no_bit(
    place: Path, plain: Run, tmp_path: Path
) -> None:
    again, unhashed = (
        run_with(place, tmp_path / name, None, fingerprints_every=every)
        for name, every in (("a", 1), ("b", 0))
    )
    assert TwoRuns(plain, again).verdict == "The same run, bit for bit to the last weight."
    assert again.fingerprints == plain.fingerprints
    assert [row["step"] for row in again.fingerprints] == list(range(7))
    assert TwoRuns(plain, unhashed).is_complete and unhashed.fingerprints == []
