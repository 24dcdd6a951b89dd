"""Commands on the ranks of torchrun: as real processes, and what is refused before they start."""

import warnings

import pytest
import torch

from narrowgauge.distributed.process_group import joined, require_same, threads_of
from narrowgauge.errors import RankError
from ranks import run_ranks
from trainer.tiny_runs import call


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("show", "recipe", "nowhere"), "RecipeError: no recipe is named"),
        (
            ("compare", "--recipes", "bfloat16/word"),
            "RankError: Cannot run narrowgauge compare on 2 ranks.",
        ),
    ],
)
def test_rank_0_prints_the_error(words, line, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, expected in (("0", line), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        result = call(*words)
        assert result.exit_code == 2
        assert result.stderr.startswith(expected) and result.stderr.count("\n") == bool(expected)


def other_settings(rank: int) -> list[str]:
    require_same({"lr": 0.1})
    messages = []
    for settings in ({"lr": 0.1 + rank}, {"seed": 1} if rank else {}):
        with pytest.raises(RankError) as refused:
            require_same(settings)
        messages.append(refused.value.message)
    return messages


def test_ranks_with_other_settings_are_refused_on_all(tmp_path):
    for number, seed in run_ranks(other_settings, 2, tmp_path):
        assert number == "Cannot train: rank 1 has lr = 1.1, and rank 0 has 0.1."
        assert seed == "Cannot train: rank 1 has seed = 1, and rank 0 has None."


def test_an_order_invariant_run_takes_one_thread():
    before = torch.get_num_threads()
    seen = []
    torch.set_num_threads(2)
    for is_order_invariant in (True, False):
        with threads_of(is_order_invariant):
            seen.append(torch.get_num_threads())
    assert seen == [1, 2] and torch.get_num_threads() == 2
    torch.set_num_threads(before)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_shows_warnings(rank, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    for name in ("init_process_group", "barrier", "destroy_process_group"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: None)
    with joined():
        assert (warnings.filters[0][:3] == ("ignore", None, Warning)) == (rank == 1)
