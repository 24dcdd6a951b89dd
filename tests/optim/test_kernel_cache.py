"""Compiled kernels on the disk: native code, loaded only where it is whole, our own, and killed nobody before."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from covering import whole
from narrowgauge._torch import inductor
from narrowgauge.machine.cpp_compiler import compiler_missing, compiler_version
from narrowgauge.optim import compilation, kernel_cache

needs_compiler = pytest.mark.skipif(bool(compiler_missing()), reason=f"{compiler_missing()}: nothing is compiled here")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no locks that end with a process")
KEY = "0123456789abcdef01234567"


def doubled(x: Tensor, out: Tensor) -> Tensor:
    out.copy_(x * 2)
    return x.new_zeros(0)


DOUBLED = compilation.Definition(doubled, [torch.ones(8), torch.ones(8)], [(0,), (0,)])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One real package, compiled once."""
    path = tmp_path_factory.mktemp("made") / "made.pt2"
    inductor.compile_ahead(inductor.trace(doubled, DOUBLED.example, DOUBLED.lengths), path)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    monkeypatch.setattr(compilation, "trace", lambda *_: SimpleNamespace(key=lambda compiler: KEY))
    compilation._warn_once.cache_clear()
    return tmp_path / "kernels"


@pytest.fixture
def kernel(cache: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Gets the kernel as a new process would, and tries it; whether it was compiled for that."""

    def get() -> bool:
        compiled: list[Path] = []

        def compile_ahead(program: object, path: Path) -> None:
            compiled.append(path)
            shutil.copy(made, path)

        monkeypatch.setattr(compilation, "compile_ahead", compile_ahead)
        monkeypatch.setattr(compilation, "_KERNELS", {})
        run = compilation.compiled("doubled", torch.device("cpu"), lambda: DOUBLED)
        assert run is not None
        out = torch.zeros(5)
        run([torch.arange(5.0), out])
        assert out.tolist() == [0, 2, 4, 6, 8]
        return bool(compiled)

    return get


def package_in(cache: Path) -> Path:
    (path,) = cache.glob(f"{KEY}-*.pt2")
    return path


def test_a_process_gets_a_kernel_once_for_each_name_and_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needs it: a step, the norm of the gradients, an accumulator. One that cannot be compiled is not tried again."""
    made: list[str] = []
    monkeypatch.setattr(compilation, "_KERNELS", {})
    monkeypatch.setattr(compilation, "_load_or_compile", lambda name, definition: made.append(name))
    cpu, threads = torch.device("cpu"), torch.get_num_threads()
    for name in ("one", "other", "one"):
        assert compilation.compiled(name, cpu, lambda: DOUBLED) is None
    assert made == ["one", "other"]
    try:
        torch.set_num_threads(threads + 1)
        compilation.compiled("one", cpu, lambda: DOUBLED)
    finally:
        torch.set_num_threads(threads)
    assert made == ["one", "other", "one"]


@needs_compiler
def test_a_package_is_made_once_and_for_its_owner_alone(kernel: Callable[[], bool], cache: Path) -> None:
    mask = os.umask(0)
    try:
        assert [kernel(), kernel()] == [True, False]
    finally:
        os.umask(mask)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert not package_in(cache).stat().st_mode & 0o022
    assert {path.suffix or path.name for path in cache.iterdir()} == {
        ".pt2",
        ".lock",
        "aliases",
    }  # nothing half written


@needs_compiler
@pytest.mark.parametrize("place", [0.0, 0.1, 0.35, 0.6, 0.85, 1.0])
def test_one_flipped_bit_is_never_loaded(kernel: Callable[[], bool], cache: Path, place: float) -> None:
    kernel()
    damaged = package_in(cache)
    data = bytearray(damaged.read_bytes())
    data[int(place * (len(data) - 1))] ^= 4
    damaged.write_bytes(data)
    assert [kernel(), kernel()] == [True, False]


@needs_compiler
def test_a_package_cut_short_is_never_loaded(kernel: Callable[[], bool], cache: Path) -> None:
    kernel()
    with package_in(cache).open("r+b") as stream:
        stream.truncate(4096)
    assert [kernel(), kernel()] == [True, False]


@needs_compiler
def test_what_others_may_have_written_is_never_loaded(kernel: Callable[[], bool], cache: Path, tmp_path: Path) -> None:
    kernel()
    package_in(cache).chmod(0o666)
    assert [kernel(), kernel()] == [True, False]
    own = package_in(cache)
    elsewhere = own.rename(tmp_path / "elsewhere.pt2")
    own.symlink_to(elsewhere)
    assert [kernel(), kernel()] == [True, False]


@pytest.mark.parametrize(
    ("mode", "owner", "trusted"),
    [
        (stat.S_IFREG | 0o644, 1000, True),
        (stat.S_IFREG | 0o600, 0, True),  # root could do anything anyway
        (stat.S_IFREG | 0o600, 1001, False),
        (stat.S_IFREG | 0o664, 1000, False),
        (stat.S_IFREG | 0o602, 1000, False),
        (stat.S_IFLNK | 0o600, 1000, False),
    ],
)
def test_a_file_is_trusted_by_owner_mode_and_kind(
    monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, trusted: bool
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000, raising=False)
    found = SimpleNamespace(st_mode=mode, st_uid=owner)
    assert kernel_cache.is_trusted(found) is trusted  # type: ignore[arg-type]


def test_a_folder_that_others_could_write_is_closed(cache: Path) -> None:
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    assert kernel_cache.packages_folder() == cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    real = Path.stat
    foreign = SimpleNamespace(st_mode=stat.S_IFDIR | 0o755, st_uid=os.getuid() + 1)
    monkeypatch.setattr(Path, "stat", lambda self, **options: foreign if self == cache else real(self, **options))
    with pytest.warns(UserWarning, match=r"belongs to another user; set NARROWGAUGE_CACHE.* run uncompiled"):
        assert compilation._load_or_compile("doubled", DOUBLED) is None


@needs_compiler
def test_a_package_of_a_machine_with_other_libraries_is_made_anew(
    kernel: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel()
    real, tries = compilation.load_ahead, []

    def load(path: Path) -> object:
        tries.append(path)
        if len(tries) == 1:
            raise RuntimeError("version `GLIBC_9.99' not found")
        return real(path)

    monkeypatch.setattr(compilation, "load_ahead", load)
    assert [kernel(), kernel()] == [True, False]


@needs_compiler
def test_a_folder_that_can_only_be_read_serves_what_it_has(
    kernel: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel()
    real = os.open

    def open_(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and KEY in str(path):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", open_)
    assert kernel() is False


def test_a_full_disk_leaves_the_definition_running_and_nothing_behind(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_ahead(program: object, path: Path) -> None:
        path.write_bytes(b"half a package")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compilation, "compile_ahead", compile_ahead)
    monkeypatch.setattr(compilation, "compiler_missing", lambda: "")
    with pytest.warns(UserWarning, match=r"No space left.*same bits in weights and states.*last digits"):
        assert compilation._load_or_compile("doubled", DOUBLED) is None
    assert sorted(path.name for path in cache.iterdir()) == [f"{KEY}.lock", "aliases"]


def in_child(work: Callable[[], None]) -> int:
    """Do something in a forked process, which then ends at once."""
    if child := os.fork():
        return child
    try:
        work()
    finally:
        os._exit(0)


def store(data: bytes) -> Path:
    with kernel_cache.alone(KEY) as path:
        path.write_bytes(data)
        return kernel_cache.add_package(KEY, path)


@pytest.fixture
def loader(cache: Path) -> Iterator[int]:
    """A process that is loading the package."""
    path, (reader, writer) = store(b"package"), os.pipe()

    def load() -> None:
        with kernel_cache.marked(path):
            os.write(writer, b"loading")
            signal.pause()

    child = in_child(load)
    assert os.read(reader, 7) == b"loading"
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)


@needs_fork
def test_others_may_load_a_package_that_is_being_loaded(loader: int, cache: Path) -> None:
    assert kernel_cache.find_package(KEY) == package_in(cache)
    with kernel_cache.marked(package_in(cache)):
        assert kernel_cache.find_package(KEY) == package_in(cache)
    assert kernel_cache.find_package(KEY) == package_in(cache)


@needs_fork
def test_a_package_whose_loading_killed_a_process_is_made_anew(cache: Path) -> None:
    path = store(b"package")

    def die() -> None:
        with kernel_cache.marked(path):
            os.kill(os.getpid(), signal.SIGKILL)

    _, status = os.waitpid(in_child(die), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert kernel_cache.find_package(KEY) is None
    assert [left.suffix for left in cache.iterdir()] == [".lock"]
    assert kernel_cache.find_package(KEY) is None and store(b"package") == kernel_cache.find_package(KEY)


@needs_fork
def test_two_processes_make_a_package_once(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def make() -> None:
        with kernel_cache.alone(KEY) as path:
            if kernel_cache.find_package(KEY) is None:
                with log.open("a") as stream:
                    stream.write("made\n")
                path.write_bytes(os.urandom(1 << 16))
                kernel_cache.add_package(KEY, path)

    for child in [in_child(make) for _ in range(4)]:
        os.waitpid(child, 0)
    assert log.read_text() == "made\n"
    assert kernel_cache.find_package(KEY) == package_in(cache)


@needs_fork
def test_what_a_killed_compilation_left_is_removed(cache: Path) -> None:
    def die() -> None:
        with kernel_cache.alone(KEY) as path:
            path.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(in_child(die), 0)
    assert [path for path in cache.iterdir() if path.suffix == ".pt2"]
    path = store(b"whole")
    assert [left for left in cache.iterdir() if left.suffix == ".pt2"] == [path]


# ── what a package is named after ───────────────────────────────────────────────────────────────────────────────────────


def key_of(
    function: Callable[..., Tensor] = doubled, length: int = 8, one_loop: bool = True, compiler: str = "g++ 12"
) -> str:
    return inductor.trace(function, [torch.ones(length)] * 2, DOUBLED.lengths, one_loop).key(compiler)


def test_a_key_is_of_the_graph_and_of_nothing_else_in_the_source() -> None:
    def renamed(values: Tensor, to: Tensor) -> Tensor:
        twice = values * 2  # on another line, under other names
        to.copy_(twice)
        return values.new_zeros(0)

    assert key_of() == key_of(renamed)


def tripled(x: Tensor, out: Tensor) -> Tensor:
    out.copy_(x * 3)
    return x.new_zeros(0)


def added(x: Tensor, out: Tensor) -> Tensor:
    out.copy_(x * 2)
    return x.new_zeros(0) + 1


def by_table(x: Tensor, out: Tensor, factor: float = 2.0) -> Tensor:
    out.copy_(x * torch.tensor([factor]))
    return x.new_zeros(0)


def by_other_table(x: Tensor, out: Tensor) -> Tensor:
    return by_table(x, out, -2.0)


def test_a_key_is_another_for_another_graph_or_another_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        key_of(),
        *map(key_of, (tripled, added, by_table, by_other_table)),
        key_of(length=16),
        key_of(one_loop=False),
    ]
    keys.append(key_of(compiler="g++ 13"))
    wide = [torch.ones(8, dtype=torch.float64)] * 2
    keys += [inductor.trace(doubled, wide, DOUBLED.lengths).key("g++ 12")]
    keys += [inductor.trace(doubled, DOUBLED.example, [(), ()]).key("g++ 12")]  # no dynamic length
    with monkeypatch.context() as patch:
        patch.setitem(inductor._ONE_LOOP, "realize_opcount_threshold", 7)
        keys.append(key_of())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9.9")
        keys.append(key_of())
    for capability in {"AVX2", "AVX512"} - {torch.backends.cpu.get_cpu_capability()}:
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
            keys.append(key_of())
    with monkeypatch.context() as patch:
        patch.setattr(inductor, "own_code", lambda device_type: "other instructions")
        keys.append(key_of())
    assert len(set(keys)) == len(keys)


def test_what_changes_inductor_is_hashed_without_its_comments() -> None:
    text, for_gpu = inductor.own_code("cpu"), inductor.own_code("cuda")
    assert "_mask" in text and "srli" in text and "_takes_table" not in text
    assert "_mask" in for_gpu and "_takes_table" in for_gpu
    assert all('"""' not in each and "  # " not in each for each in (text, for_gpu))


@pytest.mark.parametrize("error", [ValueError("a graph with a subgraph"), AttributeError("no range_constraints")])
def test_a_graph_without_a_text_is_found_by_its_source(
    error: Exception, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(compiler: str) -> str:
        raise error

    monkeypatch.setattr(compilation, "trace", lambda *_: SimpleNamespace(key=key))
    monkeypatch.setattr(compilation, "compile_ahead", lambda program, path: path.write_bytes(b"code"))
    monkeypatch.setattr(compilation, "load_ahead", lambda path: lambda arguments: [doubled(*arguments)])
    monkeypatch.setattr(compilation, "compiler_missing", lambda: "")
    assert compilation._load_or_compile("doubled", DOUBLED) is not None
    assert list(cache.glob(f"{compilation.alias_of('doubled', DOUBLED.example)}-*.pt2"))


def branched(x: Tensor, out: Tensor) -> Tensor:
    out.copy_(torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x,)))
    return x.new_zeros(0)


def test_a_subgraph_has_no_text() -> None:
    with pytest.raises(ValueError, match="a graph with"):
        key_of(branched)


# ── edited source ───────────────────────────────────────────────────────────────────────────────────────────────────────


@needs_compiler
def test_edited_source_is_traced_once_and_compiled_where_the_graph_is_new(
    kernel: Callable[[], bool], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[object] = []
    key = KEY
    monkeypatch.setattr(
        compilation, "trace", lambda *args: traced.append(args) or SimpleNamespace(key=lambda compiler: key)
    )
    assert [kernel(), kernel(), len(traced)] == [True, False, 1]
    monkeypatch.setattr(compilation, "source_key", lambda: "with a comment")
    assert [kernel(), kernel(), len(traced)] == [False, False, 2]
    monkeypatch.setattr(compilation, "source_key", lambda: "with another constant")
    key = "f" * 24
    assert [kernel(), kernel(), len(traced)] == [True, False, 3]


@needs_compiler
@pytest.mark.parametrize("damage", [b"", b"f" * 24, b"\xff\x00", None])
def test_a_damaged_alias_is_written_anew(kernel: Callable[[], bool], cache: Path, damage: bytes | None) -> None:
    """Cut short, of another key, no text; and that of another kernel under this one's name."""
    kernel()
    (alias,) = (cache / "aliases").iterdir()
    whole = alias.read_bytes()
    if damage is None:
        kernel_cache.add_alias("e" * 24, compiler_version(), "f" * 24)
        (cache / "aliases" / f"{'e' * 24}{alias.name[24:]}").replace(alias)
    else:
        alias.write_bytes(damage + whole[len(damage) :] if damage else b"")
    assert kernel() is False
    assert alias.read_bytes() == whole and len(list((cache / "aliases").iterdir())) == 1


@needs_compiler
def test_an_alias_that_others_may_have_written_is_not_followed(kernel: Callable[[], bool], cache: Path) -> None:
    kernel()
    (alias,) = (cache / "aliases").iterdir()
    alias.chmod(0o666)
    assert kernel_cache.find_key(alias.name[:24], compiler_version()) is None and not alias.exists()


def test_aliases_of_old_source_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "MAX_ALIASES", 2)
    for k, letter in enumerate("abc"):
        kernel_cache.add_alias(letter * 24, "g++ 12", KEY)
        for path in (cache / "aliases").glob(f"{letter}*"):
            os.utime(path, (k, k))
    assert [kernel_cache.find_key(letter * 24, "g++ 12") for letter in "abc"] == [None, KEY, KEY]


def test_without_a_compiler_the_alias_of_any_is_followed(cache: Path) -> None:
    kernel_cache.add_alias("a" * 24, "g++ 12", KEY)
    found = [kernel_cache.find_key("a" * 24, compiler) for compiler in ("g++ 12", "g++ 13", "")]
    assert found == [KEY, None, KEY]


def test_where_nothing_can_be_written_the_alias_of_any_compiler_is_followed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_cache.add_alias("a" * 24, "another compiler", KEY)
    assert compilation._find_key("a" * 24) == (None if compiler_version() else KEY)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert compilation._find_key("a" * 24) == KEY
    assert compilation._find_key("b" * 24) is None


@whole
@needs_compiler
def test_a_comment_in_the_source_leaves_every_key_as_it_was(tmp_path: Path) -> None:
    """In a copy of the package, and a constant does not."""
    source = tmp_path / "src"
    shutil.copytree(
        Path(compilation.__file__).parents[2], source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    code = (
        "import torch\n"
        "from narrowgauge._torch.inductor import trace\n"
        "from narrowgauge.optim.compilation import alias_of\n"
        "from narrowgauge.optim.kernel import StepKernel\n"
        "from narrowgauge.optim.rules.elementwise import ADAMW\n"
        "from narrowgauge.spec.storages import STORAGES\n"
        "made = StepKernel(ADAMW, STORAGES['split8'], compile=True).define(torch.device('cpu'), False)\n"
        "print(alias_of('', made.example), trace(made.function, made.example, made.lengths).key(''))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(source)}

    def keys() -> list[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()

    constant = "0x7FEB352D"  # of the hash that stochastic rounding takes its bits from
    (edited,) = (path for path in source.rglob("*.py") if constant in path.read_text(encoding="utf-8"))
    before, text = keys(), edited.read_text(encoding="utf-8")
    edited.write_text(f"{text}\n# A comment.\n", encoding="utf-8")
    commented = keys()
    edited.write_text(text.replace(constant, "0x7FEB352F"), encoding="utf-8")
    changed = keys()
    assert before[0] != commented[0] != changed[0]
    assert before[1] == commented[1] != changed[1]


# ── instruction sets ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_key_names_the_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for capability in ("AVX2", "AVX512", "DEFAULT"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        keys.add(inductor.machine_key(torch.device("cpu")))
    # Where a compiler may use all that the processor has, two processors share nothing.
    for sets in ({"avx", "gfni"}, {"avx"}):
        monkeypatch.setattr(inductor, "instruction_sets", lambda sets=sets: sets)
        keys.add(inductor.machine_key(torch.device("cpu")))
    assert len(keys) == 5


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are x86's")
@pytest.mark.parametrize(
    ("capability", "has", "lacks"), [("AVX2", "AVX2", "AVX512F"), ("AVX512", "AVX512F", "AVX512VNNI")]
)
def test_a_kernel_is_compiled_for_its_level_alone(capability: str, has: str, lacks: str) -> None:
    """Whatever this processor has beyond."""
    flags = inductor._arch_flags(inductor._LEVELS[capability]).split()
    from torch._inductor.cpp_builder import get_cpp_compiler

    command = [get_cpp_compiler(), "-march=native", *flags, "-dM", "-E", "-x", "c++", os.devnull]
    defined = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"#define __{has}__ 1" in defined and f"__{lacks}__" not in defined


def test_inductor_compiles_for_that_level(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpu_vec_isa

    level, real = inductor._level(), cpu_vec_isa.valid_vec_isa_list
    with inductor._for_level():
        picked = cpu_vec_isa.pick_vec_isa()
    assert cpu_vec_isa.valid_vec_isa_list is real
    if level is not None:
        assert isinstance(picked, getattr(cpu_vec_isa, level.vectors)) and picked
        assert picked.build_arch_flags() == inductor._arch_flags(level)
    monkeypatch.setattr(inductor, "_level", lambda: None)
    with inductor._for_level():
        assert cpu_vec_isa.valid_vec_isa_list is real
