"""What every test stands on: one thread per worker, one cache of compiled code, no network.

Everything here is set through the environment, before PyTorch is imported anywhere, so that the
processes which tests start (trainings, ranks) stand on the same ground.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
# A forked worker warns about the tokenizers' threads unless told which it wants.
_QUIET = {"TOKENIZERS_PARALLELISM": "false"}
# Two workers with two threads each would take twice the time on two processors, and so would pools
# of compilers.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
_CACHE = Path(__file__).parents[1] / ".cache" / "tests"
_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": _CACHE / "inductor",
    "NARROWGAUGE_CACHE": _CACHE / "steps",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="Run only the tests that read golden files, record these files again and print what moved.",
    )


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether to record golden files instead of comparing with them."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def native_formats() -> Iterator[None]:
    """A processor that multiplies bfloat16 and int8 natively, whatever this one is."""
    from processors import pretending

    with pretending("avx512_bf16", "avx512_vnni"):
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for PyTorch: tensors as small as these wait for a second thread longer than they
    compute.
    """
    import torch  # after pytest_configure, which sets the variables that PyTorch reads

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--update-golden"):
        items[:] = [item for item in items if "update_golden" in getattr(item, "fixturenames", ())]


def pytest_configure(config: pytest.Config) -> None:
    os.environ.update(_OFFLINE)
    os.environ.update(_QUIET)
    # Compiled code is found again in the next session, by workers and by the processes that tests
    # start.
    for name, folder in _CACHES.items():
        os.environ.setdefault(name, str(folder))
    if hasattr(config, "workerinput"):
        os.environ.update(_ONE_THREAD)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
