"""The examples of Accelerate and PEFT run as they stand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.frameworks

EXAMPLES = Path(__file__).parents[2] / "examples"


def lines_of(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    place = EXAMPLES / f"{name}.py"
    assert len(place.read_text().splitlines()) <= 60
    runpy.run_path(str(place), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_accelerate_loop_learns_and_resumes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    first, last, resumed = lines_of("accelerate_loop", capsys)
    assert float(last.split()[1]) < 0.5 * float(first.split()[1])
    assert resumed == "resumed with the same bits: True"


def test_peft_adapters_learn_over_every_base_and_merge(capsys: pytest.CaptureFixture[str]) -> None:
    *bases, merged = lines_of("peft_adapters", capsys)
    found = [line.split() for line in bases]
    assert [words[0] for words in found] == ["bfloat16", "int8-outlier-codes", "nvfp4"]
    assert all(float(words[4]) < float(words[2]) for words in found)
    assert len({words[-2] for words in found}) == 1
    sizes = [int(words[5].replace(",", "")) for words in found]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 0.6 * sizes[0]
    assert merged == "merged: LlamaForCausalLM, 0 adapters left"
