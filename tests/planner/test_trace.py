"""A trace's time by group: kernels of a GPU, self times of a CPU's operations, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import RecordError
from narrowgauge.planner.trace import read_trace


def event(name: str, start: float, duration: float, kind: str, place: int = 0) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": duration, "tid": place,
            "args": {"device": place}}  # fmt: skip


def written(path: Path, events: list[Any]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    return path


def seconds(path: Path) -> dict[str, float]:
    return {row["group"]: row["seconds"] for row in read_trace(path).rows}


def test_kernels_are_summed_by_name_and_gaps_are_what_is_left(tmp_path: Path) -> None:
    kernels = [
        event("sm90_xmma_gemm_bf16", 0, 50e4, "kernel"),
        event("ncclDevKernel_AllReduce", 60e4, 20e4, "kernel"),
        event("nobody_knows", 80e4, 10e4, "kernel"),
        event("ProfilerStep#1", 0, 45e4, "user_annotation"),
        event("ProfilerStep#2", 45e4, 45e4, "user_annotation"),
        event("ProfilerStep#3", 90e4, 1, "user_annotation"),
    ]
    path = written(tmp_path / "trace.json", kernels)
    expected = {"matmuls": 0.25, "communication": 0.1, "gaps": 0.05, "unrecognized": 0.05,
                "unrecognized: nobody_knows": 0.05}  # fmt: skip
    assert seconds(path) == pytest.approx(expected)
    assert "2 × " in read_trace(path).title
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    plan = tmp_path / "plan.json"
    option = {"step_seconds": {"matmuls": 2.0, "total": 2.0}}
    plan.write_text(json.dumps({"options": [option]}), encoding="utf-8")
    beside = read_trace(packed, plan)
    assert [row["plan"] for row in beside.rows if row["group"] == "matmuls"] == ["2 s"]


def test_operations_count_without_those_that_they_call(tmp_path: Path) -> None:
    operations = [
        event("aten::linear", 0, 100, "cpu_op"),
        event("aten::addmm", 10, 80, "cpu_op"),
        event("Optimizer.step#AdamW.step", 200, 100, "user_annotation"),
        event("aten::mul", 210, 50, "cpu_op"),
    ]
    times = seconds(written(tmp_path / "trace.json", operations))
    assert times == pytest.approx({"matmuls": 100e-6, "optimizer": 100e-6})


def test_of_a_cpu_the_thread_of_the_steps_counts(tmp_path: Path) -> None:
    events = [
        event("ProfilerStep#1", 0, 100, "user_annotation"),
        event("FSDP::all_gather (layers.0)", 0, 60, "user_annotation"),
        event("aten::copy_", 10, 20, "cpu_op"),
        event("aten::mm", 60, 40, "cpu_op"),
        event("gloo:all_gather", 0, 90, "user_annotation", place=1),
    ]
    times = seconds(written(tmp_path / "trace.json", events))
    assert times == pytest.approx({"communication": 60e-6, "matmuls": 40e-6})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": [3]}'])
def test_what_is_no_trace_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(RecordError):
        read_trace(path)
