"""A start deletes nothing: over all states of a folder, every line of a record that was there is there
afterwards, in its file or beside it in ``FILE.cut``.
"""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import narrowgauge as ng
from narrowgauge.runs.record import read_run
from narrowgauge.runs.writer import Record
from narrowgauge.trainer import checkpoints
from narrowgauge.trainer.settings import OF_A_RUN
from trainer.tiny_runs import bytes_of, call, settings, trained, words_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

SHORT = {"recipe": "bfloat16/naive", "steps": 4, "eval_every": 2, "eval_sequences": 2}


@pytest.fixture(scope="module")
def base(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that finished and one that stopped after 3 of 4 steps, never to be changed."""
    folder = tmp_path_factory.mktemp("base")
    trained(place, folder / "finished", **SHORT)
    trained(place, folder / "stopped", **SHORT, stop_after=3)
    return folder


def prune(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")


def remove(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def prune_newest(folder: Path) -> None:
    shutil.rmtree(checkpoints.folders(folder)[0])


def keep_first_row(folder: Path) -> None:
    """As a kill leaves it before the first checkpoint."""
    prune(folder)
    for name in ("steps", "events"):
        file = folder / f"{name}.jsonl"
        file.write_text(file.read_text().splitlines(keepends=True)[0])
    (folder / "evals.jsonl").unlink()


def damage_settings(folder: Path) -> None:
    (folder / "run.toml").write_text("schema_version = ")


def make_settings_newer(folder: Path) -> None:
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace("schema_version = 2", "schema_version = 3"))


def record_of_a_loop(folder: Path) -> None:
    shutil.rmtree(folder)
    with Record.create(folder, {"config": {"recipe": "bfloat16/naive", "steps": 4}}) as record:
        for step in range(1, 5):
            record.append("steps", {"step": step, "loss": 2.5})
        record.summary({"steps": 4, "val_loss": 2.5})


def files_of_a_user(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "summary.json").write_text('{"mine": 1}')
    (folder / "notes.txt").write_text("mine")


def newest_checkpoint_damaged(folder: Path) -> None:
    next(checkpoints.folders(folder)[0].glob("*.distcp")).write_bytes(b"")


def every_checkpoint_damaged(folder: Path) -> None:
    for checkpoint in checkpoints.folders(folder):
        (checkpoint / "manifest.json").write_text("{}")


FINISHED = (0, "finished: 4 steps")
GONE = (2, "its checkpoints are gone")
NEWER = (2, "has record schema 3; this version reads 2. Read it with the version that wrote it.")
STATES = {
    "finished": ("finished", Path.exists, FINISHED),
    "finished, pruned": ("finished", prune, FINISHED),
    "finished, its newest checkpoint pruned": ("finished", prune_newest, FINISHED),
    "the last row, no summary, pruned": ("finished", both(prune, remove("summary.json")), FINISHED),
    "only rows and settings": (
        "finished", both(prune, remove("summary.json", "events.jsonl", "evals.jsonl")), FINISHED,
    ),
    "no summary": ("finished", remove("summary.json"), (0, "Finished after 4")),
    "stopped": ("stopped", Path.exists, (0, "Finished after 4")),
    "stopped, newest checkpoint damaged": ("stopped", newest_checkpoint_damaged, (0, "damaged-checkpoint")),
    "stopped, every checkpoint damaged": (
        "stopped", every_checkpoint_damaged, (2, "are damaged: step-00000003, step-00000002"),
    ),
    "stopped, settings damaged": ("stopped", damage_settings, (0, "Finished after 4")),
    "stopped, pruned": ("stopped", prune, GONE),
    "stopped, pruned, events lost": ("stopped", both(prune, remove("events.jsonl")), (0, "begins again")),
    "stopped, pruned, settings damaged": ("stopped", both(prune, damage_settings), (2, "is damaged")),
    "stopped, pruned, settings lost": ("stopped", both(prune, remove("run.toml")), (2, "not to be overwritten")),
    "finished, newer settings": ("finished", make_settings_newer, NEWER),
    "stopped, newer settings": ("stopped", make_settings_newer, NEWER),
    "stopped, pruned, newer settings": ("stopped", both(prune, make_settings_newer), NEWER),
    "no checkpoint yet": ("stopped", keep_first_row, (0, "begins again")),
    "a record of a user's loop": ("finished", record_of_a_loop, (2, "not to be overwritten")),
    "files of a user": ("finished", files_of_a_user, (2, "not to be overwritten")),
}  # fmt: skip
"""By state: the run before, what happened to it, and the status and words of the next start."""


def lines_of(folder: Path) -> Counter[bytes]:
    """Count the lines of records, and the content of summaries and of a user's files."""
    lines = Counter()
    for path, content in bytes_of(folder).items():
        if (
            path.suffix == ".jsonl"
            or path.name.endswith((".jsonl.cut", ".json.cut"))
            or path.name in ("summary.json", "notes.txt")
        ):
            lines.update(content.splitlines())
    return lines


def by_train(place: Path, folder: Path) -> tuple[int, str]:
    result = call(*words_of(settings(place, folder, **SHORT, checkpoint_every=2)))
    return result.exit_code, result.output


def by_compare(place: Path, folder: Path) -> tuple[int, str]:
    command = ["compare", "--recipes", "bfloat16/naive", "--out", str(folder.parent)]
    chosen = settings(place, folder, **SHORT, checkpoint_every=2)
    result = call(*words_of(chosen, *command, but=OF_A_RUN))
    return result.exit_code, result.output


def by_a_loop(place: Path, folder: Path) -> tuple[int, str]:
    """A user's loop whose own checkpoint is gone: it begins again."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        recorder = ng.RunRecorder(folder, model, optimizer, resume=True)
    except ng.errors.RecordError as error:
        return 2, str(error)
    with recorder:
        recorder.go_back(0)
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        recorder.step(1.0)
    return 0, ""


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("start", [by_train, by_compare, by_a_loop])
def test_a_start_deletes_nothing(
    start,
    state,
    base,
    place,
    tmp_path,
):
    name, change, expected = STATES[state]
    folder = Path(shutil.copytree(base / name, tmp_path / "all" / "bfloat16-naive-seed0"))
    change(folder)
    lines = lines_of(folder)
    before = bytes_of(folder)
    status, text = start(place, folder)
    assert not lines - lines_of(folder)
    if start is not by_a_loop:
        assert status == expected[0], text
    if start is by_train:
        assert expected[1] in text
    if status == 2 or (expected is FINISHED and start is by_train):
        assert bytes_of(folder) == before
    if start is by_train and status == 0 and expected is not FINISHED:
        assert read_run(folder).summary["steps"] == 4
