"""What every test stands on: one thread per worker, one cache of compiled code, no network.

Everything here is set through the environment, before PyTorch is imported anywhere, so that the processes which tests
start (trainings, ranks) stand on the same ground.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
# A forked worker warns about the tokenizers' threads unless told which it wants.
_QUIET = {"TOKENIZERS_PARALLELISM": "false"}
# Two workers with two threads each would take twice the time on two processors, and so would pools of compilers.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

_session_cache: Path | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="Run only the tests that read golden files, record these files again and print what moved.",
    )
    parser.addoption(
        "--cold",
        action="store_true",
        help="Compile everything from nothing, instead of using what earlier sessions compiled.",
    )


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether to record golden files instead of comparing with them."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def native_formats() -> Iterator[None]:
    """A processor that multiplies bfloat16 and int8 natively, whatever this one is."""
    from narrowgauge.machine.processor import pretending

    with pretending("avx512_bf16", "avx512_vnni"):
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for PyTorch: tensors as small as these wait for a second thread longer than they compute."""
    import torch  # after pytest_configure, which sets the variables that PyTorch reads

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--update-golden"):
        items[:] = [item for item in items if "update_golden" in getattr(item, "fixturenames", ())]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the curves that tests recorded; xdist calls this hook in its workers too, which see only their own."""
    if not config.getoption("--update-golden") or hasattr(config, "workerinput"):
        return
    from golden_files import CURVES, update_curves

    passed = terminalreporter.stats.get("passed", [])
    found = [value for report in passed for name, value in report.user_properties if name == "golden_curve"]
    if found:
        terminalreporter.section("golden curves")
        for line in update_curves(CURVES, found):
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    global _session_cache
    os.environ.update(_OFFLINE)
    os.environ.update(_QUIET)
    if hasattr(config, "workerinput"):
        os.environ.update(_ONE_THREAD)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
    elif (cold := config.getoption("--cold")) or "NARROWGAUGE_CACHE" not in os.environ:
        from kept_cache import open_cache

        # Workers inherit the variables; a caller's own folder is used as it is.
        _session_cache = open_cache(cold=cold)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _session_cache is not None:
        from kept_cache import close_cache

        close_cache(_session_cache)
