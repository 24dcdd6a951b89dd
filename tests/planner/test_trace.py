"""A trace's time by group: kernels of a GPU, and what is refused."""

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
    ]
    for step in range(3):  # the time after the last kernel is not in the trace
        start = step * 100e4
        kernels += [{**row, "ts": row["ts"] + start} for row in kernels[:3] if step]
        kernels.append(event(f"ProfilerStep#{step}", start, 100e4, "user_annotation"))
    path = written(tmp_path / "trace.json", kernels)
    expected = {"matmuls": 0.5, "communication": 0.2, "gaps": 0.2,
                "unrecognized: nobody_knows": 0.1}  # fmt: skip
    assert seconds(path) == pytest.approx(expected)
    assert "a step of 1,000 ms" in read_trace(path).title
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    plan = tmp_path / "plan.json"
    option = {"step_seconds": {"matmuls": 2.0, "total": 2.0}}
    plan.write_text(json.dumps({"options": [option]}), encoding="utf-8")
    beside = read_trace(packed, plan)
    assert [row["plan"] for row in beside.rows if row["group"] == "matmuls"] == ["2 s"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": [3]}'])
def test_what_is_no_trace_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(RecordError):
        read_trace(path)
