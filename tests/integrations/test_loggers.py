"""Each logger in its real package, offline: what was written is read back, once for a run that was killed and resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.events import Event
from narrowgauge.runs.loggers.logger import LOGGERS, Delivery, require_loggers

MISSING = "narrowgauge[loggers] is not installed: ./dev test integrations installs it"
Points = dict[str, dict[int, float]]
"""Tag to step to value; where a step came twice, the value of the second time."""


def row(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 3.0 / step, "lr": 1e-3, "tokens": 128 * step, "skipped": False}


def deliver(name: str, folder: Path, steps: range, went_back: bool = False, ends: bool = False) -> None:
    """A sitting of a run: some steps, and where it ends an evaluation, a sample of the gauges and the last event."""
    settings = {"recipe": "bfloat16/word", "lr": 1e-3, "betas": [0.9, 0.95], "compile": False}
    make = LOGGERS[name].load()
    logger = Delivery(name, lambda: make(folder, settings, 0))
    if went_back:
        logger.send("go_back", steps.start - 1)
    for step in steps:
        logger.send("step", row(step))
    if ends:
        logger.send("evaluation", {"step": 6, "val_loss": 2.5})
        logger.send(
            "gauge", {"step": 6, "logits": {"max": 4.0}, "updates": {"model.norm.weight": [0.75, 0, 0, 0, 0, 0]}}
        )
        logger.send("event", Event("loss_spike", 5, "the loss jumped", value=math.inf, advice="Look at the data."))
        logger.send("event", Event("finish", 6, "validation loss 2.5000"))
    logger.close()
    assert logger.failure == ""


def read_tensorboard(folder: Path) -> tuple[Points, list[str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    points = {tag: {point.step: point.value for point in found.Scalars(tag)} for tag in found.Tags()["scalars"]}
    kinds = [tag for tag in found.Tags()["tensors"] if tag.startswith("events/")]
    return points, [found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in kinds]


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of an offline run: after a header of 7 bytes LevelDB's log format, in blocks of 32 KiB."""
    data, place, whole = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # the rest of a block is padding
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, or the last of several
            yield whole
            whole = b""


def read_wandb(folder: Path) -> tuple[Points, list[str]]:
    from wandb.proto.wandb_internal_pb2 import Record

    points: Points = {}
    told: list[str] = []
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1, "the second sitting has another identifier"
    for record in (Record.FromString(data) for file in files for data in wandb_records(file)):
        if record.HasField("run"):
            assert record.run.run_group == folder.parent.name
        items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for tag, value in items.items():
            if tag.startswith("events/"):
                told.append(value)
            elif not tag.startswith("_") and tag != "step":
                points.setdefault(tag, {})[items["step"]] = value
    return points, told


def read_mlflow(folder: Path) -> tuple[Points, list[str]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == "narrowgauge"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["recipe"] == "bfloat16/word" and run.info.status == "FINISHED"
    assert run.data.tags["comparison"] == folder.parent.name
    history = {tag: client.get_metric_history(run.info.run_id, tag) for tag in run.data.metrics}
    points = {
        tag: {m.step: m.value for m in sorted(values, key=lambda m: m.timestamp)} for tag, values in history.items()
    }
    return points, [value.partition(": ")[2] for tag, value in run.data.tags.items() if tag.startswith("event.")]


def read_aim(folder: Path) -> tuple[Points, list[str]]:
    import aim
    from aim.storage.context import Context

    (identifier,) = aim.Repo(str(folder / "aim")).list_all_runs()
    # Opened for writing: read-only runs come from an index that Aim builds later.
    run = aim.Run(identifier, repo=str(folder / "aim"), system_tracking_interval=None, log_system_params=False)
    assert run["settings"]["betas"] == [0.9, 0.95] and run.name == folder.name
    assert run["comparison"] == folder.parent.name
    points = {}
    for metric in run.metrics():
        steps, (values, *_) = metric.data.numpy()
        points[metric.name] = dict(zip(map(int, steps), map(float, values), strict=True))
    texts = [run.get_text_sequence(f"events/{kind}", Context({})) for kind in ("loss_spike", "finish")]
    told = [text.data for sequence in texts for text in sequence.values.values_list()]
    run.close()
    return points, told


READERS: dict[str, Callable[[Path], tuple[Points, list[str]]]] = {
    "tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "aim": read_aim,
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home in which no package should write."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("MLFLOW_TRACKING_URI", "AIM_REPO", "WANDB_CACHE_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(home)
    yield home


@pytest.mark.parametrize("name", LOGGERS)
def test_what_a_logger_was_sent_is_read_back_after_a_resume(name: str, tmp_path: Path, home: Path) -> None:
    pytest.importorskip(LOGGERS[name].package, reason=MISSING)
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "compare.toml").touch()  # so it is one of a comparison's runs
    deliver(name, folder, range(1, 5))
    deliver(name, folder, range(3, 7), went_back=True, ends=True)
    points, told = READERS[name](folder)
    assert points["train/loss"] == {step: pytest.approx(3.0 / step, rel=1e-6) for step in range(1, 7)}
    assert points["validation/loss"] == {6: 2.5} and points["logits/max"] == {6: 4.0}
    assert points["edq/model.norm.weight"] == {6: 0.75}
    assert sorted(told) == ["the loss jumped. Look at the data", "validation loss 2.5000"]
    assert [path.name for path in folder.iterdir()] == [name], "it wrote outside its own folder"
    assert [path for path in home.rglob("*") if path.is_file()] == []


def test_nobody_logged_in_is_told_and_not_asked(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason=MISSING)
    monkeypatch.setattr(wandb.setup().settings, "mode", "online")
    monkeypatch.setattr(wandb, "login", lambda prompt: False)
    make = LOGGERS["wandb"].load()
    logger = Delivery("wandb", lambda: make(tmp_path, {}, 0))
    logger.close()
    assert "wandb login, or WANDB_MODE=offline" in logger.failure


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgauge.runs.loggers.logger.find_spec", lambda name: None)
    for name, known in LOGGERS.items():
        with pytest.raises(NarrowgaugeError) as caught:
            require_loggers([name])
        assert known.title in caught.value.message and "narrowgauge[loggers]" in caught.value.advice


class Silent:
    """A server that does not answer until the test ends."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def step(self, row: dict[str, Any]) -> None:
        self.answer.wait()

    def close(self) -> None:
        pass


def test_a_logger_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from narrowgauge.runs.loggers import logger

    monkeypatch.setattr(logger, "MOST_WAITING", 10)
    answer = threading.Event()
    waiting = Delivery("silent", lambda: Silent(answer))
    for step in range(1, 101):
        waiting.send("step", row(step))
    assert waiting.failure == "10 rows wait for it"
    late = Delivery("late", lambda: Silent(answer))
    late.send("step", row(1))
    late.close(patience=0.0)
    assert late.failure == "it has not ended after 0 s"
    answer.set()
    waiting.close()
