"""Layouts and clusters as they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.clusters import read_cluster
from narrowgauge.planner.layouts import NAMED_LAYOUTS, Layout, read_layout
from narrowgauge.planner.plan import plan


def test_a_layout_by_name_is_one_that_runs_here() -> None:
    assert Layout(**NAMED_LAYOUTS["fsdp2"]).is_fsdp and Layout(**NAMED_LAYOUTS["ddp"]).is_fsdp
    assert read_layout("ddp, micro_batch=4") == {**NAMED_LAYOUTS["ddp"], "micro_batch": 4}


def test_rotary_positions_go_on_and_the_answer_says_what_train_needs() -> None:
    """131,072 tokens of an 8B model on eight chips ran; the preset has 8,192 positions."""
    answer = plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8, sequence_length=131_072)
    assert answer.best.fits and answer.best.is_certain
    assert any("8,192" in line and "max_position_embeddings" in line for line in answer.sentences())
    with pytest.raises(NarrowgaugeError, match="1,024 positions"):
        plan("gpt2-124m", chip="H100-SXM", sequence_length=2048)


def test_a_cluster_file_names_its_software(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('chip = "A100-SXM4-80GB"\nchips = 8\nsoftware = "fsdp-2023"\n')
    assert read_cluster(file).software == "fsdp-2023"
    for value, says in (("3", "is not str"), ('"fsdp-2032"', "Did you mean 'fsdp-2023'")):
        file.write_text(f'chip = "A100-SXM4-80GB"\nchips = 8\nsoftware = {value}\n')
        with pytest.raises(NarrowgaugeError) as caught:
            read_cluster(file)
        assert says in f"{caught.value} {caught.value.advice}"
