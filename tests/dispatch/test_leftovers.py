"""What a killed attempt leaves on its machine, and that nothing else goes with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pth_exp import leftovers, machine, marked

OWNER = """
import os, signal, subprocess, sys
from multiprocessing import shared_memory
from pathlib import Path
from pth_exp import leftovers

run_dir, stays_behind = Path(sys.argv[1]), sys.argv[2]
with leftovers.scratch(run_dir, "pth-test-") as folder:
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", stays_behind], stdout=log, stderr=subprocess.PIPE, start_new_session=True
        )
    child.stderr.readline()  # it has its segment
    noted = shared_memory.SharedMemory(create=True, size=64)
    leftovers.note_segments(run_dir, [Path("/dev/shm") / noted.name.lstrip("/")])
    print(child.pid, folder, noted.name, flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""
STAYS_BEHIND = """
import multiprocessing, signal, sys
from multiprocessing import resource_tracker, shared_memory
lock = multiprocessing.get_context("spawn").Lock()
resource_tracker.unregister(lock._semlock.name, "semaphore")
mapped = shared_memory.SharedMemory(create=True, size=64)
resource_tracker.unregister(mapped._name, "shared_memory")  # or it would be unlinked when this process ends
print(mapped.name, file=sys.stderr, flush=True)
signal.pause()
"""


class Owner:
    """A process that has started another, which outlives it, and two segments of shared memory."""

    def __init__(self, run_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(run_dir), STAYS_BEHIND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        pid, folder, self.noted = self.process.stdout.readline().split()
        self.child, self.folder = int(pid), Path(folder)

    def kill(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.wait() == -signal.SIGKILL

    def remains(self) -> list[str]:
        here = [str(self.child)] if machine.process_start(self.child) is not None else []
        return here + [str(path) for path in (self.folder, Path("/dev/shm") / self.noted.lstrip("/")) if path.exists()]


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    made = Owner(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()
    leftovers.clear(tmp_path)


def test_what_a_killed_attempt_left_goes(tmp_path: Path, owner: Owner) -> None:
    leftovers.clear(tmp_path)
    assert len(owner.remains()) == 3, "it lives"
    owner.kill()
    assert owner.remains()[0] == str(owner.child), "its child outlives it"
    assert owner.child in marked.writing_to(owner.folder)
    own = {path for path in marked.mapped(owner.child) if path.exists()}
    assert sorted(path.name[:3] for path in own) == ["psm", "sem"]
    leftovers.clear(tmp_path)
    assert owner.remains() == [] and not any(path.exists() for path in own)
    assert list(tmp_path.iterdir()) == []
    leftovers.clear(tmp_path)


def test_the_next_attempt_removes_it_and_leaves_nothing_itself(tmp_path: Path, owner: Owner) -> None:
    owner.kill()
    with leftovers.scratch(tmp_path, "pth-test-") as folder:
        assert owner.remains() == []
        assert folder.is_dir() and json.loads((tmp_path / leftovers.FILE).read_text())["pid"] == os.getpid()
    assert not folder.exists() and list(tmp_path.iterdir()) == []


def test_another_machine_s_is_left_alone(tmp_path: Path, owner: Owner) -> None:
    owner.kill()
    note = tmp_path / leftovers.FILE
    kept = note.read_text()
    note.write_text(json.dumps({**json.loads(kept), "space": "another boot/pid:[1]"}))
    leftovers.clear(tmp_path)
    assert len(owner.remains()) == 3
    note.write_text(kept)
    leftovers.clear(tmp_path)
    assert owner.remains() == []


def test_nothing_noted_is_nothing_to_do(tmp_path: Path) -> None:
    leftovers.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_short_enough_for_rays_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch job's TMPDIR may be long; a socket's path may have 107 bytes, and Ray's needs 67 below the folder."""
    for where in ("/tmp", "/var/tmp", str(tmp_path)):
        monkeypatch.setattr(tempfile, "tempdir", where)
        with leftovers.scratch(tmp_path, "pth-verl-") as folder:
            assert len(str(folder)) + 67 <= 107
            assert str(folder).startswith(where if where != str(tmp_path) else "/tmp/pth-verl-")
