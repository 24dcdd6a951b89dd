"""Two launches compared: the term and the setting that made the step slower are named, whatever else is the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from narrowgauge.errors import ChipError, DataError, NarrowgaugeError
from narrowgauge.planner.measured.launches import LaunchedJob, layout_of, read_launch
from narrowgauge.planner.measured.regression import compare_launches, regression_dict, regression_lines
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.chips import get_chip

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


def launch(folder: Path, *edits: tuple[str, str], more: str = "", name: str = "launch.toml") -> LaunchedJob:
    text = LAUNCH
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    file = folder / name
    file.write_text(text + more, encoding="utf-8")
    return read_launch(file)


def test_a_launch_is_read(tmp_path: Path) -> None:
    found = launch(tmp_path)
    assert (
        found.job.layout.shard,
        found.job.layout.zero,
        found.job.layout.micro_batch,
        found.job.layout.micro_batches,
    ) == (
        64,
        3,
        1,
        2,
    )
    assert found.job.tokens_per_step == 128 * 8192 and found.job.cluster.num_chips == 64


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
    found = compare_launches(launch(tmp_path), launch(tmp_path, edit))
    [effect] = found.effects
    assert effect.name == setting
    assert effect.seconds == pytest.approx(found.explained) and found.explained > 0
    assert found.changes[0].group == group
    assert sum(change.difference for change in found.changes) == pytest.approx(found.explained)


def test_larger_batches_are_not_slower(tmp_path: Path) -> None:
    """Twice the micro-batches take twice the time, for twice the tokens."""
    twice = [("batch_size = 128", "batch_size = 256"), ("steps = 128", "steps = 256")]
    found = compare_launches(launch(tmp_path), launch(tmp_path, *twice))
    assert found.scale == 2
    assert abs(found.explained) < 0.02 * found.after_step.total
    assert "2 × the tokens" in regression_lines(found)[0]


def test_settings_that_hide_each_other_are_said(tmp_path: Path) -> None:
    edits = [("3200", "400"), ("lr = 1e-4", "activation_checkpointing = true")]
    found = compare_launches(launch(tmp_path), launch(tmp_path, *edits))
    assert {effect.name for effect in found.effects} == {"interconnect_gbit_per_second", "recompute"}
    assert any("hides part of the other" in line for line in regression_lines(found))


def test_what_no_setting_explains_is_left_over(tmp_path: Path) -> None:
    same = launch(tmp_path, more="[measured]\nstep_seconds = 2.0\n")
    slow = launch(tmp_path, more="[measured]\nstep_seconds = 3.0\n")
    found = compare_launches(same, slow)
    assert found.effects == () and found.explained == 0 and found.seen == pytest.approx(1.0)
    said = "\n".join(regression_lines(found))
    assert "By the settings: no difference. So 1 s more than they explain" in said and "a late rank" in said


def test_tokens_per_second_are_a_measured_step(tmp_path: Path) -> None:
    found = launch(tmp_path, more="[measured]\ntokens_per_second = 524288\n")
    assert found.measured is not None and found.measured.total == pytest.approx(2.0)


def test_other_layouts(tmp_path: Path) -> None:
    tensor = launch(tmp_path, more="[layout]\nshard = 8\ntensor = 8\nmicro_batches = 16\n")
    assert (tensor.job.layout.tensor, tensor.job.tokens_per_step) == (8, 128 * 8192)
    found = compare_launches(launch(tmp_path), tensor)
    assert {effect.name for effect in found.effects} >= {"parallelism", "micro_batches"}
    switches = "sequence_parallel = false\naccumulation_dtype = 'bfloat16'\nkeeps_gradients = true\nexpert_tensor = 1\n"
    other = launch(tmp_path, more=f"[layout]\nshard = 8\ntensor = 8\nmicro_batches = 16\n{switches}").job.layout
    assert other == replace(
        tensor.job.layout, sequence_parallel=False, accumulation_dtype="bfloat16", keeps_gradients=True, expert_tensor=1
    )
    with pytest.raises(DataError, match="sequence_parallel = 0"):
        launch(tmp_path, more="[layout]\nsequence_parallel = 0\n")


def test_expert_tensor_ranks_change_with_the_tensor_ranks(tmp_path: Path) -> None:
    edits = (("llama-8b", "mixtral-8x7b"),)
    before, after = (
        launch(
            tmp_path,
            *edits,
            more=f"[layout]\nshard = {64 // t}\nzero = 1\ntensor = {t}\nexpert_tensor = {t}\nexpert = 8\n",
        )
        for t in (4, 2)
    )
    found = compare_launches(before, after)
    assert {effect.name for effect in found.effects} == {"parallelism"}


def test_run_folders_are_launches(tmp_path: Path) -> None:
    config = {"model": "llama-1m", "recipe": "bfloat16/word", "batch_size": 4, "sequence_length": 64}
    config |= {"gradient_accumulation_steps": 2}
    folders = {"before": 0.5, "after": 0.75}
    for name, seconds in folders.items():
        with RunWriter.create(tmp_path / name, {"config": config}) as writer:
            for step in range(1, 11):
                writer.step({"step": step, "seconds": seconds})
    chip = get_chip("L40S")
    before, after = (read_launch(tmp_path / name, chip) for name in folders)
    assert before.job.layout.micro_batches == 2 and before.job.cluster.num_chips == 1
    assert compare_launches(before, after).seen == pytest.approx(0.25)
    with pytest.raises(ChipError, match="does not say on which chip"):
        read_launch(tmp_path / "before")


def test_the_values_are_those_of_the_sentences(tmp_path: Path) -> None:
    found = compare_launches(launch(tmp_path), launch(tmp_path, ("3200", "400")))
    values = regression_dict(found)
    assert values["sentences"] == regression_lines(found)
    assert values["settings"][0]["name"] == "interconnect_gbit_per_second"
    assert json.dumps(values)


@pytest.mark.parametrize(
    ("edits", "more", "what"),
    [
        ([('model = "llama-8b"\n', "")], "", "does not say its model"),
        ([("batch_size = 128", 'batch_size = "many"')], "", "'many' is not a whole number"),
        ([("steps = 128", "steps = 3")], "", "does not suit 64 ranks"),
        ([("chips = 64", "chips = 0")], "", "not a whole number above zero"),
        ([("chips = 64", "")], "", "does not say where it runs"),
        ([("interconnect", "internet")], "", "no key is named 'internet_gbit_per_second'"),
        ([("chips = 64", "chips = 64\ncount = 8")], "", "no key is named 'count'"),
        ([("chips = 64", "chips = 64\nspeed = 'half'")], "", "speed = 'half' is not a number"),
        ([('"H100-SXM"', "100")], "", "names no chip"),
        ([("H100-SXM", "H100")], "", "names begin with it"),
        ([], "[measured]\nstep_seconds = -1\n", "measured"),
        ([], "[measured]\nstep_seconds = 1\ntokens_per_second = 2\n", "measured"),
        ([], "[layout]\nsharp = 8\n", "'sharp'"),
        ([], '[layout]\nshard = "8"\n', "shard = '8'"),
        ([], "[", "cannot read the launch"),
        ([("llama-8b", "no-such-model")], "", "no-such-model"),
    ],
)
def test_what_is_no_launch_is_refused_in_one_line(
    tmp_path: Path, edits: list[tuple[str, str]], more: str, what: str
) -> None:
    with pytest.raises(NarrowgaugeError, match=what) as refused:
        launch(tmp_path, *edits, more=more)
    assert "\n" not in str(refused.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_launch(tmp_path / "none.toml")


def test_layouts_of_train() -> None:
    table = {"batch_size": 8, "gradient_accumulation_steps": 8}
    assert (layout_of(table, 1, "").shard, layout_of(table, 1, "").zero) == (1, 0)
    full = layout_of(table, 4, "")
    assert (full.data, full.shard, full.zero, full.micro_batches) == (1, 4, 3, 2)
    assert replace(full, data=4, shard=1, zero=0) == layout_of({**table, "shard": "none"}, 4, "")


def test_more_chips_come_with_their_layout(tmp_path: Path) -> None:
    found = compare_launches(launch(tmp_path), launch(tmp_path, ("chips = 64", "chips = 128")))
    assert [effect.name for effect in found.effects] == ["parallelism", "micro_batches"]
    assert all(effect.seconds is not None for effect in found.effects)
    assert found.before.name != found.after.name
