"""Children end with their parent, and what they have started ends with them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

import narrowgauge

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(narrowgauge.__file__).parents[1])}
LIMIT_SECONDS = 60

PARENT = """
import signal, sys, threading
from narrowgauge.machine.child_processes import start_tied

asked, answered = sys.argv[1:]
child = [
    "import subprocess, sys",
    f"open({asked!r}).read()",
    f"out = open({answered!r}, 'w')",
    "out.write('up')",
    "out.flush()",
    "subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'], stdout=out)",
]
started = []
thread = threading.Thread(target=lambda: started.append(start_tied(child)))
thread.start()
thread.join()
print("started", flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes with names")
def test_a_tied_child_outlives_the_thread_that_started_it_and_ends_with_its_process(tmp_path: Path) -> None:
    asked, answered = tmp_path / "asked", tmp_path / "answered"
    os.mkfifo(asked)
    os.mkfifo(answered)
    # Open without waiting for a writer; the end of file comes when the child and what it has started are gone.
    reader = os.open(answered, os.O_RDONLY | os.O_NONBLOCK)

    def read() -> bytes:
        assert select.select([reader], [], [], LIMIT_SECONDS)[0], "they are still there"
        return os.read(reader, 2)

    command = [sys.executable, "-c", PARENT, str(asked), str(answered)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "started\n"
        asked.write_text("go on")
        assert read() == b"up"
        parent.kill()
    assert read() == b""
    os.close(reader)
