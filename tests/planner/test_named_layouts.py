"""Layouts and clusters as they are asked for."""

from __future__ import annotations

import pytest

from narrowgauge.errors import ChipError, NarrowgaugeError, RecipeError
from narrowgauge.planner.clusters import cluster_of
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.named_layouts import NAMED_LAYOUTS, read_layout
from narrowgauge.planner.places import clusters_asked_for, multiples_of, parts_of


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("tensr=2", "Did you mean 'tensor'"),
        ("tensor=0", "1 or more"),
        ("tensor=-1", "from 1 on"),
        ("zero=4", "0 to 3"),
        ("recompute=some", "none, selective, full"),
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
