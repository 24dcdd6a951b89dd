"""Two launches compared: the term and the setting that made the step slower are named, whatever else is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowgauge.planner.launches import Launch, compare_launches, read_launch

LAUNCH = """
model = "llama-8b"
recipe = "bfloat16/word"
batch_size = 128
gradient_accumulation_steps = 128
sequence_length = 8192
lr = 1e-4  # settings that do not change a step's time may stand there

[cluster]
chip = "H100-SXM"
chips = 64
interconnect_gbit_per_second = 3200
"""


def launch(folder: Path, *edits: tuple[str, str], more: str = "", name: str = "launch.toml") -> Launch:
    text = LAUNCH
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    file = folder / name
    file.write_text(text + more, encoding="utf-8")
    return read_launch(file)


def test_a_launch_is_read(tmp_path: Path) -> None:
    started = launch(tmp_path)
    assert (
        started.job.layout.shard,
        started.job.layout.zero,
        started.job.layout.micro_batch,
        started.job.layout.micro_batches,
    ) == (
        64,
        3,
        1,
        2,
    )
    assert started.job.tokens_per_step == 128 * 8192 and started.job.num_chips == 64


@pytest.mark.parametrize(
    ("edit", "setting", "group"),
    [
        (("3200", "400"), "interconnect_gbit_per_second", "communication"),
        (("lr = 1e-4", "activation_checkpointing = true"), "recompute", "matmuls"),
        (("H100-SXM", "A100-SXM4-80GB"), "chip", "matmuls"),
        (("bfloat16/word", "bfloat16/float32"), "recipe", "communication"),
        (("chips = 64", 'chips = 64\nsoftware = "fsdp-2023"'), "software", "waiting"),
    ],
)
def test_one_slower_setting_is_found(tmp_path: Path, edit: tuple[str, str], setting: str, group: str) -> None:
    comparison = compare_launches(launch(tmp_path), launch(tmp_path, edit))
    [effect] = comparison.effects
    assert effect.name == setting
    assert effect.seconds == pytest.approx(comparison.explained) and comparison.explained > 0
    assert comparison.changes[0].group == group
    assert sum(change.difference for change in comparison.changes) == pytest.approx(comparison.explained)


def test_larger_batches_are_not_slower(tmp_path: Path) -> None:
    """Twice the micro-batches take twice the time, for twice the tokens."""
    twice = [("batch_size = 128", "batch_size = 256"), ("steps = 128", "steps = 256")]
    comparison = compare_launches(launch(tmp_path), launch(tmp_path, *twice))
    assert comparison.scale == 2
    assert abs(comparison.explained) < 0.02 * comparison.after_step.total


def test_what_no_setting_explains_is_left_over(tmp_path: Path) -> None:
    same = launch(tmp_path, more="[measured]\nstep_seconds = 2.0\n")
    slow = launch(tmp_path, more="[measured]\nstep_seconds = 3.0\n")
    comparison = compare_launches(same, slow)
    assert comparison.effects == () and comparison.explained == 0 and comparison.measured == pytest.approx(1.0)
    assert [row["difference"] for row in comparison.tables()[0].rows] == ["+0 s", "+1 s"]
