"""Which tests run: the covering part on each push, the whole product where it is owed or asked for, or what a change needs.

A test that carries the mark ``whole`` (``covering.py``) or stands in a file of tests inside a framework is left out, and
counted, unless ``--all``, ``--whole UNIT`` or the command line names it. ``--changed`` takes the files that stand nearest to a
change, the nearest first (``selection.py``). The controller of xdist decides, and its workers are told.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import selection

SECONDS_OF_CHANGED = 150
"""After which ``--changed`` starts no further test, counted from the first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection of tests")
    group.addoption(
        "--all",
        action="store_true",
        help="the whole products of tables and the tests inside frameworks too; tests/last_whole_product.toml records a pass",
    )
    group.addoption(
        "--whole",
        action="append",
        default=[],
        metavar="UNIT",
        help="the whole products of a room (optim, matmul, …), or tests inside frameworks (integrations, integrations/test_x.py)",
    )
    group.addoption(
        "--changed",
        nargs="?",
        const="",
        metavar="BASE",
        help="what stands nearest to the changes since BASE (a commit; by default where the branch left main)",
    )


class Selection:
    """What the options choose.

    Args:
        config: pytest's, of the controller or of a worker.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.all, self.whole = bool(config.getoption("--all")), tuple(config.getoption("--whole"))
        self.named = {name for name in config.args if config.args != config.getini("testpaths")}
        self.distances: dict[str, int] | None = None
        self.ends: float | None = None
        self.why = "everything" if self.all else "the covering part of each product, and no framework's tests"
        self.proved: dict[str, str] = {}
        self.left_out = self.not_started = 0
        if hasattr(config, "workerinput"):
            self.distances = config.workerinput["selection"]
            return
        if unknown := set(self.whole) - {selection.INTEGRATIONS, *selection.units()}:
            known = ", ".join([selection.INTEGRATIONS, *selection.units()])
            raise pytest.UsageError(f"--whole takes one of {known}; it was given {', '.join(sorted(unknown))}")
        if self.whole:
            self.why += f", but all of {', '.join(self.whole)}"
        if (base := config.getoption("--changed")) is not None:
            self.choose_by_change(base)
        elif self.all and not self.named and not narrowed(config):
            self.proved = selection.checksums()

    def choose_by_change(self, base: str) -> None:
        try:
            since = selection.base_of(base)
            paths = selection.changed_paths(since)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        self.distances = {str(path): far for path, far in selection.changed_tests(paths).items()}
        first, second, third = (list(self.distances.values()).count(far) for far in range(3))
        self.why = (
            f"{len(paths)} files changed since {since[:12]}: {first} that are or hold such tests themselves, then {second} of "
            f"their rooms, then {third} that import or name what changed"
            f"{', or run under it as all do' if selection.changed_plugins(paths) else ''}; {self.why}"
        )

    def takes(self, item: pytest.Item) -> bool:
        if self.distances is not None and str(item.path) not in self.distances:
            return False
        if self.all or any("::" in name and item.nodeid.startswith(name) for name in self.named):
            return True
        inside = selection.TESTS in item.path.parents
        place = item.path.relative_to(selection.TESTS).as_posix() if inside else ""
        if item.path in selection.framework_files():
            asked = {place, selection.INTEGRATIONS} & set(self.whole)
            return bool(asked) or any(selection.INTEGRATIONS in name for name in self.named)
        return item.get_closest_marker("whole") is None or place.partition("/")[0] in self.whole


def narrowed(config: pytest.Config) -> bool:
    """Whether an option of pytest leaves tests out, or does not run them."""
    return any(config.getoption(name, None) for name in NARROWING)


NARROWING = (
    *("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise", "stepwise_skip", "stepwise_reset"),
    *("collectonly", "setuponly", "setupplan", "showfixtures", "show_fixtures_per_test"),
    *("doctest_ignore_import_errors", "override_ini", "inifilename", "looponfail", "update_golden"),
)
CHOSEN = pytest.StashKey[Selection]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CHOSEN] = Selection(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["selection"] = node.config.stash[CHOSEN].distances


def pytest_report_header(config: pytest.Config) -> str:
    return f"selection: {config.stash[CHOSEN].why}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    distances = config.stash[CHOSEN].distances
    return (
        True if distances is not None and collection_path.is_file() and str(collection_path) not in distances else None
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--update-golden", False):
        return
    chosen = config.stash[CHOSEN]
    taken = [chosen.takes(item) for item in items]
    left_out = [item for item, is_taken in zip(items, taken, strict=True) if not is_taken]
    chosen.left_out = len(left_out)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item, is_taken in zip(items, taken, strict=True) if is_taken]
    if chosen.distances is not None:
        items.sort(key=lambda item: (chosen.distances or {})[str(item.path)])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    chosen = item.config.stash[CHOSEN]
    if chosen.distances is None:
        return None
    if chosen.ends is None:
        chosen.ends = time.monotonic() + SECONDS_OF_CHANGED
    if time.monotonic() < chosen.ends:
        return None
    chosen.not_started += 1
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        chosen = session.config.stash[CHOSEN]
        session.config.workeroutput["selection"] = (chosen.left_out, chosen.not_started)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    left_out, not_started = getattr(node, "workeroutput", {}).get("selection", (0, 0))
    chosen = node.config.stash[CHOSEN]
    chosen.left_out = max(chosen.left_out, left_out)  # every worker leaves out the same
    chosen.not_started += not_started


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    chosen = config.stash[CHOSEN]
    if hasattr(config, "workerinput") or config.getoption("--update-golden", False):
        return
    if chosen.left_out:
        terminalreporter.write_line(f"selection: {chosen.left_out} tests left out ({chosen.why})")
    if chosen.not_started:
        terminalreporter.write_line(
            f"selection: {chosen.not_started} tests were not started after {SECONDS_OF_CHANGED} s, the farthest from the change"
        )
    if chosen.proved and not exitstatus:
        passed, failed = (
            {report.nodeid.partition("::")[0] for kind in kinds for report in terminalreporter.stats.get(kind, [])}
            for kinds in (("passed",), ("failed", "error"))
        )
        terminalreporter.write_line(f"selection: {record(chosen.proved, passed - failed)}")


def record(proved: dict[str, str], passed: set[str]) -> str:
    """Write the file, but for what does not run here; returns what was done.

    Args:
        proved: the units with their checksums before the tests ran.
        passed: test files, as paths in the checkout, of which tests passed and none failed. Of a framework that is not
            installed none did. Rooms are left out where no C++ compiler is, since tests of their kernels are skipped.
    """
    from narrowgauge.machine.cpp_compiler import compiler_missing

    selection.read_again()
    if selection.checksums() != proved:
        return "not recorded as a whole product: code changed while the tests ran"
    skipped = {unit for unit in proved if unit not in selection.ROOMS and f"tests/{unit}" not in passed}
    if compiler_missing():
        skipped |= set(selection.ROOMS) & set(proved)
    selection.record_whole_product({unit: code for unit, code in proved.items() if unit not in skipped})
    return f"recorded in {selection.RECORD.name}" + (f", without {', '.join(sorted(skipped))}" if skipped else "")
