"""A trace's time by group: kernels of a GPU, and what is refused."""

import gzip
import json

import pytest

from narrowgauge.errors import RecordError
from narrowgauge.planner.trace import read_trace

KERNELS = (("sm90_xmma_gemm_bf16", 0, 50e4), ("ncclDevKernel_AllReduce", 60e4, 20e4), ("nobody_knows", 70e4, 20e4))  # fmt: skip


def test_kernels_are_summed_by_name_and_gaps_are_what_is_left(tmp_path):
    events = [
        {"name": "ProfilerStep#1", "ts": 0},
        {"name": "ProfilerStep#2", "ts": 45e4},
        {"name": "ProfilerStep#2", "ts": 46e4},
        {"name": "process_name"},
    ]
    for name, start, duration in KERNELS:
        row = {"name": name, "cat": "kernel", "ts": start, "dur": duration, "args": {"device": 0}}
        events.append(row)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    plan = tmp_path / "plan.json"
    plan.write_text('{"options": [{"step_seconds": {"matmuls": 2.0, "total": 2.0}}]}')
    table = read_trace(path, plan)
    seconds = {row["group"]: row["seconds"] for row in table.rows}
    expected = {"matmuls": 0.25, "communication": 0.1, "gaps": 0.05, "unrecognized: nobody_knows": 0.1}  # fmt: skip
    assert seconds == pytest.approx(expected) and "a step of 450 ms" in table.title
    assert {row["group"]: row["plan"] for row in table.rows}["matmuls"] == 2.0


@pytest.mark.parametrize("content", ["", "{}", '{"traceEvents": []}', '{"traceEvents": [3]}'])
def test_what_is_no_trace_is_refused(content, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(RecordError):
        read_trace(path)
