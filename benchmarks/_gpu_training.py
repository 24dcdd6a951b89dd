"""The training part of ``gpu.py``: every compute trains, gauges change no bit, and how fast whole models are.

Claim: the losses of some steps of a small model are finite, fall, and end where bfloat16's do, in every compute; a training that
gauges watch has the bits of one that they do not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import narrow_linear
import narrow_training
from _gpu_setting import Setting, Tables
from quality import over_word
from timing import Row

from narrowgauge.gauges.attach import Gauges
from narrowgauge.spec.models import get_model
from narrowgauge.spec.notation import parse
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import Dataset, prepare_data
from narrowgauge.trainer.session import build
from narrowgauge.trainer.step import train_step

MODEL = "llama-1m"
WATCHED_STEPS = 6
PEERS = ("torchao float8 tensorwise", "torchao float8 rowwise")


@contextmanager
def data_of(setting: Setting) -> Iterator[tuple[Path, Dataset]]:
    """A folder with the text that small models train on, and its tokens."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name), prepare_data(setting.extent.text, Path(name), vocab_size=get_model(MODEL).vocab_size)


def training_row(setting: Setting, compute: str, folder: Path, data: Dataset, base: float | None) -> Row:
    """Some steps in a compute; ``base`` is the last loss of bfloat16."""
    config = TrainConfig(
        model=MODEL,
        recipe=parse(over_word(compute)),
        steps=setting.extent.training_steps,
        sequence_length=128,
        warmup_steps=2,
    )
    session = build(config, folder, data)
    assert session.device.type == setting.device.type
    first, *_, last = [train_step(session)["loss"] for _ in range(setting.extent.training_steps)]
    fell, near = last < first - 0.3, base is None or abs(last - base) < 0.05 * base
    row = {"recipe": over_word(compute), "first loss": first, "last loss": last}
    return {**row, "passes": "yes" if fell and near else "NO"}


def check_training(setting: Setting) -> Tables:
    """A small model in every compute, bfloat16 first."""
    losses: dict[str, float] = {}
    with data_of(setting) as (folder, data):

        def made(compute: str) -> Row:
            row = training_row(setting, compute, folder, data, losses.get("bfloat16"))
            losses[compute] = row["last loss"]
            return row

        rows = setting.rows("training", setting.extent.computes, made)
    yield f"{setting.extent.training_steps} training steps of a {MODEL}", rows


def watched(
    recipe: str, every: int, compile: bool, data: Dataset, folder: Path
) -> tuple[list[float], str, Gauges | None]:
    """Losses, weights and gauges of some steps, watched every so many."""
    config = TrainConfig(model=MODEL, recipe=parse(recipe), steps=WATCHED_STEPS, sequence_length=128, warmup_steps=2,
                         gauges_every=every, compile=compile)  # fmt: skip
    session = build(config, folder, data)
    with session.watched():
        gauges = session.gauges
        losses = [train_step(session)["loss"] for _ in range(WATCHED_STEPS)]
    return losses, session.weights_fingerprint(), gauges


def gauge_row(recipe: str, compile: bool, folder: Path, data: Dataset) -> Row:
    """A watched training has the bits of one that is not, and every kind of tensor is read."""
    plain = watched(recipe, 0, compile, data, folder)
    seen = watched(recipe, 2, compile, data, folder)
    last = seen[2].last if seen[2] is not None and seen[2].last is not None else {}
    kinds = {key.partition(":")[0] for key in last.get("tensors", ())}
    same, whole = plain[:2] == seen[:2], kinds == {"input", "output_grad", "weight", "grad"}
    row = {"recipe": recipe, "compiled": compile, "same bits": same, "tensors": len(last.get("tensors", ()))}
    return {**row, "passes": "yes" if same and whole else "NO"}


def check_gauges(setting: Setting) -> Tables:
    """Watched trainings, eager and compiled."""
    with data_of(setting) as (folder, data):
        rows = setting.rows("gauges", setting.extent.watched, lambda item: gauge_row(*item, folder, data))
    yield f"{WATCHED_STEPS} training steps of a {MODEL}, watched and not", rows


def time_models(setting: Setting, rounds: int) -> None:
    """Whole training steps of a model, each in a process of its own, which looks for a GPU itself."""
    extent, report = setting.extent, setting.report
    size = [f"--{k}={v}" for k, v in zip(("model", "batch-size", "sequence-length"), extent.training, strict=True)]
    quick = ["--quick"] if report.options.quick else []
    options = narrow_training.flags().parse_args([*size, f"--rounds={rounds}", *quick])
    options.threads = report.options.threads
    peers = PEERS if narrow_linear.peer_names(report) else ()
    narrow_training.emit(report, setting.in_time("models", [*extent.recipes, *peers]), options)
