"""The page of a plan: whole, inert, and with the figures of its options."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from narrowgauge.machine.processor import pretending
from narrowgauge.planner.inputs.clusters import cluster_of
from narrowgauge.planner.inputs.efficiency import Share, shares_of
from narrowgauge.planner.inputs.jobs import Job
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.inputs.model_configs import read_architecture
from narrowgauge.planner.measured.calibration import processor
from narrowgauge.planner.plan_report import Plan
from narrowgauge.planner.question import Option
from narrowgauge.planner.time.roofline import roof_of
from narrowgauge.report.page import digest_of
from narrowgauge.report.plan_page import figures_of, memory_bars, render_plan, scaling_curve, time_bars
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.notation import parse
from planner.made_plans import made_option, made_plan

EVIL = '</script><script>alert("1")</script><img src=x onerror=alert(1)>'


def options() -> tuple[Option, ...]:
    return (made_option(), made_option("bfloat16/master", memory=60e9), made_option("float8-row/word", memory=120e9))


def plan_of_state() -> Plan:
    """A plan without times."""
    plan = made_plan(*(dataclasses.replace(option, step=None) for option in options()))
    return dataclasses.replace(plan, question=dataclasses.replace(plan.question, clusters=()))


def test_a_page_has_its_answer_options_terms_and_figures() -> None:
    page = render_plan(made_plan(*options(), tokens=1e12))
    assert page.startswith("<!doctype html>") and page.count("<h2") == 4
    for text in (
        "bfloat16/word with shard 8",
        "1T tokens take",
        "needs 120 GB on a chip of 85.9 GB",
        "made up",
        "a paper",
    ):
        assert text in re.sub(r"<wbr>", "", page)
    for name in ("memory", "time", "roofline"):
        assert f'data-plot="{name}"' in page


def test_names_are_text_and_only_the_own_script_runs() -> None:
    plan = made_plan(*options(), model=EVIL)
    page = render_plan(plan)
    assert EVIL not in page and "&lt;/script&gt;" in page
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert policy and len(scripts) == 1
    assert digest_of(scripts[0]) in policy.group(1).replace("&#39;", "'").replace("&#43;", "+")


def test_bars_add_up_to_the_memory_and_the_time() -> None:
    found = memory_bars(options())
    bars = [trace for trace in found.data if trace["type"] == "bar"]
    assert [round(sum(trace["x"][place] for trace in bars), 3) for place in range(3)] == [40, 60, 120]
    (mark,) = [trace for trace in found.data if trace["type"] == "scatter"]
    assert all(round(x, 1) == 85.9 for x in mark["x"])
    timed = time_bars(options())
    seconds = 5.0 / (8 * 16 * 4096) * 1e6
    assert abs(sum(trace["x"][0] for trace in timed.data) - seconds) < 1e-3
    assert json.dumps([found.layout, timed.layout])


def test_a_scaling_curve_is_compared_with_proportional_growth() -> None:
    sizes = [made_option(layout=Layout(shard=size, micro_batches=16)) for size in (8, 16)]
    figure = scaling_curve(sizes)
    ideal, curve = (
        next(trace for trace in figure.data if trace.get("name") == name) for name in ("in proportion", "bfloat16/word")
    )
    assert ideal["y"] == curve["y"] and curve["x"] == [8, 16] and "efficiency 100%" in curve["customdata"][1]


def test_a_state_alone_has_no_figures_of_time() -> None:
    assert [figure.name for figure in figures_of(plan_of_state())] == ["memory"]
    assert "Only the state is counted" in render_plan(plan_of_state())


def test_a_roofline_has_the_shares_that_the_times_have() -> None:
    plan = made_plan(*options())
    own = shares_of(get_chip("H100-SXM")).replaced(
        {name: Share(0.25, 0.25, 0.25, "made up") for name in ("matmul.bfloat16", "bandwidth")}
    )
    plan = dataclasses.replace(plan, question=dataclasses.replace(plan.question, shares=own))
    [figure] = [figure for figure in figures_of(plan) if figure.name == "roofline"]
    line = next(trace for trace in figure.data if trace["mode"] == "lines")
    assert line["y"][1] == pytest.approx(0.25 * get_chip("H100-SXM").peak_tflops["bfloat16"], rel=1e-3)
    assert line["y"][0] / line["x"][0] == pytest.approx(0.25 * get_chip("H100-SXM").bandwidth_bytes_per_second / 1e12)
    assert all(max(trace["y"]) <= line["y"][1] for trace in figure.data)


def test_a_processor_without_bfloat16_has_the_roof_of_float32() -> None:
    """It converts both operands, and times are those of float32's share."""
    chip = processor("AVX2", 2)
    job = Job(read_architecture("llama-1m"), parse("bfloat16/word"), Layout(), cluster_of(chip, 1), 64)
    own = shares_of(chip).replaced({"matmul.float32": Share(0.5, 0.5, 0.5, "made up")})
    with pretending("avx2"):
        roof = roof_of(dataclasses.replace(job, shares=own))
    assert list(roof.peaks) == ["float32"] and roof.peaks["float32"] == pytest.approx(0.08, rel=1e-3)
