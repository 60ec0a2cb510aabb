"""The store of checkpoints: whole or not at all, bounded, verified when read; killed at every step of a write."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pth_exp import checkpoint, disk
from pth_exp.checkpoint import MANIFEST, CheckpointStore, is_due, update_of
from pth_exp.lifecycle import LeaseLost

FILES = ("state.json", "actor/rank_0.pt", "actor/rank_1.pt", "sampler/worker_0.pt")


def save(store: CheckpointStore, update: int) -> None:
    """Four files that say which update they belong to."""
    with store.writing(update) as folder:
        for name in FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(f"{name} of {update}\n" * 9)


def held(store: CheckpointStore) -> int | None:
    """The update of the newest intact checkpoint; all its files are those of that update."""
    newest = store.newest()
    if newest is None:
        return None
    update = update_of(newest)
    assert {str(p.relative_to(newest)) for p in newest.rglob("*") if p.is_file()} == {*FILES, MANIFEST}
    for name in FILES:
        assert (newest / name).read_text() == f"{name} of {update}\n" * 9
    return update


def listed(folder: Path) -> list[str]:
    """Update and ending of what lies in the folder."""
    return sorted(path.name[:15] + path.suffix for path in folder.iterdir())


def test_what_is_written_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoint", keep=1)
    assert store.newest() is None
    save(store, 4)
    assert held(store) == held(CheckpointStore(tmp_path / "checkpoint", keep=0)) == 4


@pytest.mark.parametrize("keep", [0, 2])
def test_the_number_of_checkpoints_is_bounded(tmp_path: Path, keep: int) -> None:
    store = CheckpointStore(tmp_path, keep)
    for update in range(12):
        save(store, update)
    assert listed(tmp_path) == [f"update-{update:08d}" for update in range(11 - keep, 12)]


def test_nothing_is_published_before_the_records_are_settled_or_after_the_run_was_taken_over(tmp_path: Path) -> None:
    """Who has lost the run neither adds a checkpoint nor removes those that its new owner goes on from."""
    save(CheckpointStore(tmp_path, keep=0), 3)
    seen: list[list[str]] = []

    def settle() -> None:
        seen.append(sorted(path.name[:15] for path in tmp_path.glob("update-*")))
        if len(seen) > 1:
            raise LeaseLost("taken over")

    store = CheckpointStore(tmp_path, 0, settle)
    save(store, 5)
    with pytest.raises(LeaseLost):
        save(store, 7)
    assert seen == [["update-00000003"], ["update-00000005"]]
    assert listed(tmp_path) == ["update-00000005"]


def test_the_same_state_once_more_is_one_checkpoint(tmp_path: Path) -> None:
    """An attempt that is stopped where it began; and one whose state of that update has other bytes."""
    store = CheckpointStore(tmp_path, keep=1)
    for update in (5, 10, 10):
        save(store, update)
    assert listed(tmp_path) == ["update-00000005", "update-00000010"]
    with store.writing(10) as folder:
        (folder / "state.json").write_text("another writing of it")
    assert listed(tmp_path) == ["update-00000005", "update-00000010"]
    newest = store.newest()
    assert newest is not None and (newest / "state.json").read_text() == "another writing of it"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def add(path: Path) -> None:
    path.with_name("stray").touch()


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink, add])
def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 2)
    save(store, 9)
    newest = store.newest()
    assert newest is not None
    damage(newest / name)
    with caplog.at_level(logging.WARNING):
        assert held(store) == 2
    wrong = str(Path(name).with_name("stray")) if damage is add else name
    assert f"checkpoint {newest} is damaged: {wrong}" in caplog.text and "falling back" in caplog.text
    assert listed(tmp_path) == ["update-00000002", "update-00000009.damaged"]
    save(store, 9)
    assert held(store) == 9
    assert listed(tmp_path) == ["update-00000002", "update-00000009"], "what was set aside goes with the next one written"


def test_when_all_are_damaged_there_is_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for update in (1, 2):
        save(store, update)
    for folder in tmp_path.iterdir():
        flip(folder / FILES[0])
    assert store.newest() is None


def test_a_write_that_fails_changes_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=0)
    save(store, 1)
    with pytest.raises(OSError, match="no space"), store.writing(2) as folder:
        (folder / "half").write_text("half")
        raise OSError("no space left on device")
    assert listed(tmp_path) == ["update-00000001"] and held(store) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from pth_exp.checkpoint import CheckpointStore
from test_checkpoint_store import save

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")

def killed_at(step, folder):
    "True when a process that is killed at its step-th touch of the disk got that far."
    child = os.fork()
    if child == 0:
        left = step
        def count(event, arguments):
            nonlocal left
            if event in EVENTS:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        store = CheckpointStore(folder, keep=0)
        store.newest()
        sys.addaudithook(count)
        save(store, 2)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

step = 0
while True:
    folder = Path({folder!r}) / str(step)
    save(CheckpointStore(folder, keep=0), 1)
    if not killed_at(step, folder):
        break
    step += 1
"""


def test_a_kill_at_any_step_of_a_write_leaves_one_of_the_two(tmp_path: Path) -> None:
    script = KILLED.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [held(CheckpointStore(tmp_path / str(step), keep=0)) for step in range(len(list(tmp_path.iterdir())))]
    assert len(found) > 20 and set(found) == {1, 2} and found == sorted(found, key=lambda update: update or 0), found
    for folder in tmp_path.iterdir():
        save(CheckpointStore(folder, keep=0), 3)
        assert listed(folder) == ["update-00000003"], "and nothing of what the killed one began"


@settings(deadline=None)
@given(every=st.integers(1, 30), updates=st.integers(1, 60))
def test_what_is_due(every: int, updates: int) -> None:
    due = [done for done in range(1, updates + 1) if is_due(done, every, updates)]
    assert due == sorted({*range(every, updates + 1, every), updates})
    assert not any(is_due(done, None, updates) for done in range(updates + 1))


def test_another_folder_is_no_checkpoint() -> None:
    with pytest.raises(ValueError, match="update-NUMBER-SHA256"):
        update_of(Path("checkpoint/global_step_4"))


def test_one_that_the_disk_fails_to_read_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that does not answer says so as a broken disk does: its checkpoint may be whole."""
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 2)
    save(store, 9)
    newest = store.newest()

    def fails(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_sha256", fails)
        with pytest.raises(RuntimeError, match=f"^checkpoint {newest} cannot be read: .*Input/output error.*remove that folder"):
            store.newest()
    assert store.newest() == newest and held(store) == 9


def test_room_for_one_like_the_last_is_asked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four small files and the manifest take a block of the disk each."""
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 2)
    asked: list[int] = []
    monkeypatch.setattr(disk, "require", lambda where, needed, doing: asked.append(needed))
    save(store, 9)
    assert asked == [5 * 4096]
