"""Parts on the host: they leave the chip's memory, and the link takes time for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from narrowgauge.planner.clusters import cluster_of
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.model import read_model
from narrowgauge.planner.program import DEFAULT, PARTS, with_parts
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.notation import parse

LAYOUTS = {"alone": Layout(micro_batches=4), "shards": Layout(shard=8), "replicas": Layout(data=8)}
STORED = ("host", "bfloat16+host", "bfloat16+lora16+host")


def job(
    part: str, stored: str, layout: Layout = LAYOUTS["alone"], chip: str = "H100-SXM"
) -> Estimate:
    model = read_model("mixtral-8x7b" if part == "experts" else "llama-8b")
    program = with_parts(DEFAULT, {part: stored})
    cluster = cluster_of(chip, layout.num_ranks)
    recipe = parse("bfloat16/word")
    return Estimate(model, recipe, layout, cluster, 4096, program=program)


def on_the_chip(stored: str) -> str:
    return stored.removesuffix("host").removesuffix("+") or "trained"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("part", PARTS)
def test_no_part_on_the_host_is_free(part: str, stored: str, layout: str) -> None:
    if part == "reference" and stored != "bfloat16+host":
        return
    away = job(part, stored, LAYOUTS[layout])
    near = job(part, on_the_chip(stored), LAYOUTS[layout])
    assert away.step.total > near.step.total
    assert away.host_bytes > near.host_bytes
    assert away.memory.of("a layer from the host") > 0


@pytest.mark.parametrize("chip", [name for name in CHIPS if "bfloat16" in CHIPS[name].peak_tflops])
def test_at_least_the_bytes_cross_the_link_that_nothing_hides(chip: str) -> None:
    """By hand: two bytes a weight, forward and backward, and the same once for its gradient."""
    away = job("mlp", "host", chip=chip)
    share = 1 - away.efficiency["overlap.shard"]
    number = sum(m.num_elements for m in away.architecture.matmuls if m.part == "mlp")
    rate = 1e9 * away.chip.host_gb_per_second * away.efficiency["host"]
    crossing = away.step.of("weights from the host", "update on the host")
    assert crossing >= 4 * share * (2 + 2 + 2) * number / rate


def test_a_slower_link_takes_longer() -> None:
    fast = job("attention", "host")
    chip = replace(fast.chip, host_gb_per_second=fast.chip.host_gb_per_second / 2)
    slow = replace(fast, cluster=replace(fast.cluster, chip=chip))
    name = "weights from the host"
    assert slow.step.of(name) >= 2 * fast.step.of(name) > 0
