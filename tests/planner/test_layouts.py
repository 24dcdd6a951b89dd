"""Layouts and clusters as they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowgauge.errors import ChipError, NarrowgaugeError, RecipeError
from narrowgauge.planner.formatting import layout_text
from narrowgauge.planner.inputs.clusters import cluster_of, clusters_asked_for, multiples_of, parts_of, read_cluster
from narrowgauge.planner.inputs.layouts import NAMED_LAYOUTS, Layout, read_layout
from narrowgauge.planner.plan import plan
from narrowgauge.planner.plan_report import train_settings


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("tensr=2", "Did you mean 'tensor'"),
        ("tensor=0", "1 or more"),
        ("tensor=-1", "from 1 on"),
        ("zero=4", "0 to 3"),
        ("recompute=some", "none, selective, full"),
        ("accumulation_dtype=bf16", "float32, bfloat16"),
        ("sequence_parallel=perhaps", "true or false"),
        ("tensor=4,expert_tensor=3", "divisor of tensor"),
        ("fsdp", "Did you mean 'fsdp2'"),
        ("tensor=2,tensor=4", "tensor = 2 and tensor = 4"),
    ],
)
def test_a_wrong_layout_costs_one_line(text: str, advice: str) -> None:
    with pytest.raises(RecipeError, match=advice):
        read_layout(text)


def test_a_layout_by_name_is_one_that_runs_here() -> None:
    assert Layout(**NAMED_LAYOUTS["fsdp2"]).runs_here and Layout(**NAMED_LAYOUTS["ddp"]).runs_here
    assert read_layout("ddp, micro_batch=4") == {**NAMED_LAYOUTS["ddp"], "micro_batch": 4}


def test_switches_are_taken_as_asked_for_and_said() -> None:
    found = read_layout("tensor=2, sequence_parallel=off, accumulation_dtype=bfloat16, expert_tensor=1")
    assert found == {"tensor": 2, "sequence_parallel": False, "accumulation_dtype": "bfloat16", "expert_tensor": 1}
    asked = "shard=4,zero=1,tensor=2,sequence_parallel=false,accumulation_dtype=bfloat16"
    planned = plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8, layout=read_layout(asked))
    assert all(not option.layout.sequence_parallel for option in planned.options)
    text = layout_text(planned.best.layout)
    assert "no sequence parallelism" in text and "gradients summed in bfloat16" in text
    assert planned.best.row()["parallelism"]["accumulation_dtype"] == "bfloat16"


def test_rotary_positions_go_on_and_the_answer_says_what_train_needs() -> None:
    """131,072 tokens of an 8B model on eight chips ran; the preset has 8,192 positions."""
    found = plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8, sequence_length=131_072)
    assert found.best.fits and found.best.is_certain
    assert any("8,192 positions" in line and "max_position_embeddings" in line for line in found.sentences())
    with pytest.raises(NarrowgaugeError, match="8,192 positions"):
        train_settings(plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8, sequence_length=131_072,
                            layout={**NAMED_LAYOUTS["fsdp2"], "offload": "none"}))  # fmt: skip
    with pytest.raises(NarrowgaugeError, match="1,024 positions"):
        plan("gpt2-124m", chip="H100-SXM", sequence_length=2048)


def test_a_cluster_file_names_its_software(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[[nodes]]\nchip = "A100-SXM4-80GB"\nchips = 8\nsoftware = "fsdp-2023"\n')
    assert read_cluster(file).groups[0].software == "fsdp-2023"
    for value, says in (("3", "is no name"), ('"fsdp-2032"', "Did you mean 'fsdp-2023'")):
        file.write_text(f'[[nodes]]\nchip = "A100-SXM4-80GB"\nchips = 8\nsoftware = {value}\n')
        with pytest.raises(NarrowgaugeError) as caught:
            read_cluster(file)
        assert says in f"{caught.value} {caught.value.advice}"


def test_every_chip_comes_in_every_number() -> None:
    found = clusters_asked_for((), ["H100-SXM", "A100-SXM4-40GB"], [8, 16], None)
    assert [(place.groups[0].chip.memory_gb, place.num_chips) for place in found] == [
        (80, 8),
        (80, 16),
        (40, 8),
        (40, 16),
    ]
    assert clusters_asked_for((), "H100-SXM", (), None)[0].num_chips == 1


def test_a_cluster_and_chips_contradict_each_other() -> None:
    with pytest.raises(ChipError, match="together"):
        clusters_asked_for(cluster_of("H100-SXM", 8), "H100-SXM", (), None)
    with pytest.raises(NarrowgaugeError, match="0 chips"):
        clusters_asked_for((), "H100-SXM", 0, None)


def test_parts_of_a_cluster_are_powers_of_two_and_all_of_it() -> None:
    whole = cluster_of("H100-SXM", 24)
    assert [part.num_chips for part in parts_of(whole)] == [1, 2, 4, 8, 16, 24]
    assert [part.num_chips for part in multiples_of(whole)] == [48, 96]
    assert {part.groups[0].chip.name for part in parts_of(whole)} == {"H100-SXM5-80GB"}
