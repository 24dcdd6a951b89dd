"""Checkpoints: exact, and after every fault the last good one is there and is the one that loads."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge.checkpoints.saving as checkpoint_module
from narrowgauge.checkpoints import dcp_files
from narrowgauge.checkpoints.saving import Checkpoint, Saver, damage, latest_checkpoint
from narrowgauge.errors import RecordError
from tensors import assert_same_bits, tensors_in

STATE = {
    "step": 3,
    "seed": 2**63,
    "loss": 0.1,
    "worst": math.inf,
    "names": ["a", None, True],
    "text": "ü",
}


def tensors(step: int = 0) -> dict[str, torch.Tensor]:
    """Every kind of tensor an optimizer may keep, with bits that depend on the step."""
    words = torch.arange(24, dtype=torch.int32) * 0x01234567 + step
    return {
        "weight": words[:12].view(3, 4),
        "view": words[12:],
        "transposed": torch.arange(12.0).view(3, 4).t() + step,
        "bfloat16": torch.arange(7.0).bfloat16(),
        "float8": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "int16": torch.tensor([-1, 2], dtype=torch.int16),
        "step": torch.tensor(float(step)),
        "empty": torch.zeros(0, 3),
        "nan": torch.tensor([math.nan, -0.0, math.inf]),
    }


FILE = "shard-00001-model-00001-of-00001.safetensors"


def save(
    folder: Path, step: int, content: dict[str, torch.Tensor], state: dict[str, Any], keep: int = 2
) -> Path:
    saver = Saver(folder)
    path = saver.save(step, content, state, keep)
    saver.wait()
    return path


def names(folder: Path) -> list[str]:
    """The checkpoints, without the empty folder of one that failed."""
    return sorted(
        entry.name for entry in (folder / "checkpoints").iterdir() if any(entry.iterdir())
    )


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = save(tmp_path, 40, tensors(), STATE)
    assert path == tmp_path / "checkpoints" / "step-00000040"
    assert sorted(os.listdir(path)) == ["manifest.json", FILE, "state.json"]
    assert_same_bits(tensors_in(path), tensors())
    assert not damage(path) and Checkpoint(path, 40).state() == STATE


def test_a_checkpoint_has_the_bits_of_the_moment_when_it_was_asked_for(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    saver = Saver(tmp_path)
    path = saver.save(1, {"a": weight, "b": weight, "c": weight[1:]}, {})
    weight.add_(1)
    saver.wait()
    assert [tensors_in(path)[name].tolist() for name in "abc"] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [1, 2, 3],
    ]


def test_only_the_newest_are_kept_and_the_same_step_is_replaced(tmp_path: Path) -> None:
    for step in (1, 2, 10, 99_999_999, 123_456_789, 123_456_789):
        save(tmp_path, step, tensors(step), {}, keep=2)
    assert names(tmp_path) == ["step-123456789", "step-99999999"]
    latest, damaged = latest_checkpoint(tmp_path)
    assert not damaged
    assert latest is not None and latest.step == 123_456_789
    assert_same_bits(tensors_in(latest.path), tensors(123_456_789))


def full(*_: object) -> None:
    """Stand for a function that writes, where the disk is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-20] ^= 4
    file.write_bytes(data)


def change_manifest(path: Path, **changes: Any) -> None:
    """Change entries of a manifest, whose checksum then fits."""
    manifest = {**json.loads((path / "manifest.json").read_text()), **changes}
    manifest["blake2b"] = checkpoint_module._checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def change_schema(path: Path) -> None:
    """Flip the bit of the schema's digit that makes it a newer one."""
    content = (path / "manifest.json").read_text()
    assert '"schema_version": 5' in content
    (path / "manifest.json").write_text(
        content.replace('"schema_version": 5', '"schema_version": 7')
    )


FAULTS: dict[str, Callable[[Path], object]] = {
    r"shard-.*safetensors has [\d,]+ bytes of": lambda path: os.truncate(
        path / FILE, (path / FILE).stat().st_size - 1
    ),
    r"shard-.*safetensors does not match its checksum": lambda path: flip_a_bit(path / FILE),
    r"shard-.*safetensors is missing": lambda path: (path / FILE).unlink(),
    r"its manifest\.json is damaged": lambda path: os.truncate(path / "manifest.json", 30),
    r"its manifest\.json is damaged \(it does not match": change_schema,
    "its manifest is of step-00000001": lambda path: change_manifest(path, step=1),
}


@pytest.mark.parametrize(("word", "harm"), FAULTS.items())
def test_a_damaged_checkpoint_is_reported_and_passed_over(
    tmp_path: Path, word: str, harm: Any
) -> None:
    save(tmp_path, 1, tensors(1), {"n": 1})
    newest = save(tmp_path, 2, tensors(2), {"n": 2})
    harm(newest)
    latest, damaged = latest_checkpoint(tmp_path)
    assert len(damaged) == 1 and re.search(f"^{newest.name} is damaged .{word}", damaged[0])
    assert latest is not None and latest.step == 1
    assert_same_bits(tensors_in(latest.path), tensors(1))
    assert_same_bits(tensors_in(save(tmp_path, 2, tensors(3), {"n": 3})), tensors(3))


@pytest.mark.parametrize(
    ("keep", "step", "kept_steps"), [(1, 45, [45]), (2, 45, [40, 45]), (2, 60, [40, 60])]
)
def test_a_new_checkpoint_outlives_damaged_ones(
    keep: int, step: int, kept_steps: list[int], tmp_path: Path
) -> None:
    for earlier in (30, 40, 50):
        save(tmp_path, earlier, tensors(earlier), {}, keep=3)
    flip_a_bit(tmp_path / "checkpoints" / "step-00000050" / FILE)
    saver = Saver(tmp_path)
    saver.resumed_from = 40
    saver.save(step, tensors(step), {}, keep)
    saver.wait()
    assert names(tmp_path) == [f"step-{number:08d}" for number in kept_steps]


def test_a_checkpoint_of_another_schema_is_refused_and_not_called_damaged(tmp_path: Path) -> None:
    change_manifest(save(tmp_path, 2, tensors(), {}), schema_version=99, files=[])
    with pytest.raises(RecordError, match="step-00000002 because it has schema 99, not 5"):
        latest_checkpoint(tmp_path)


def test_a_full_disk_keeps_the_old_checkpoint_and_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, tensors(1), {"n": 1}, keep=1)
    writer = dcp_files.HuggingFaceStorageWriter
    for module, name in (
        (writer, "write_data"),
        (checkpoint_module, "_publish"),
        (checkpoint_module, "sync"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            with pytest.raises(
                RecordError, match=r"step-00000002: the disk is full \([\d,]+ bytes free\)"
            ) as caught:
                save(tmp_path, 2, tensors(2), {"n": 2}, keep=1)
        assert "the same command again" in caught.value.advice
        assert names(tmp_path) == ["step-00000001"]
    latest, damaged = latest_checkpoint(tmp_path)
    assert not damaged
    assert latest is not None and latest.state() == {"n": 1}


NURSERY = """
import os, random, signal, sys, threading
from pathlib import Path
import torch
from narrowgauge.checkpoints.saving import Saver

torch.set_num_threads(1)


def save(folder, step):
    saver = Saver(folder)
    saver.save(step, {"w": torch.full((1000,), float(step)), "m": torch.arange(5) + step}, {"step": step})
    saver.wait()


def in_child(work):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = work() or 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def saving_until_killed(folder, moment):
    # Each call and return of any function, Python's or C's, is a moment; die at the chosen one.
    passed = 0
    def count(*_):
        nonlocal passed
        passed += 1
        if passed == moment:
            os.kill(os.getpid(), signal.SIGKILL)
    threading.setprofile(count)
    for step in range(2, 6):
        save(folder, step)
    threading.setprofile(None)
    (folder / "moments").write_text(str(passed))


place, rounds = Path(sys.argv[1]), 30
generator, moments = random.Random(0), 0
for number in range(rounds + 1):
    folder = place / str(number)
    folder.mkdir()
    save(folder, 1)
    moment = int(moments * (number - generator.random()) / rounds)
    print(number, in_child(lambda: saving_until_killed(folder, moment)), flush=True)
    # The first child is let live and counts the moments; the others die at moments spread over all of them.
    moments = moments or int((folder / "moments").read_text())
"""


def test_kill_9_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(checkpoint_module.__file__).parents[2])}
    command = [sys.executable, "-c", NURSERY, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    exits = {}
    for line in done.stdout.splitlines():
        exits[line.split()[0]] = int(line.split()[1])
    killed = [name for name, status in exits.items() if status == -signal.SIGKILL]
    assert len(killed) >= 26
    steps = []
    for name in killed:
        latest, damaged = latest_checkpoint(tmp_path / name)
        assert not damaged
        saved = tensors_in(latest.path)
        state = latest.state()
        step = state["step"]
        assert_same_bits(
            saved, {"w": torch.full((1000,), float(step)), "m": torch.arange(5) + step}
        )
        # Nothing half-written or half-removed bears a checkpoint's name, and nothing else is left.
        for entry in names(tmp_path / name):
            assert not entry.startswith("step-") or not damage(
                tmp_path / name / "checkpoints" / entry
            )
        steps.append(step)
    # The moments were spread over all four saves, from before the first to after the last.
    assert set(steps) == {1, 2, 3, 4, 5}
