"""A disk that fills up, at every level: a file system of one mebibyte, mounted for the test, holds the run."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from frozen_sweeps import SMALL, SMALL_TASK, freeze_sweep, pth, runs_of

from pth_exp import disk
from pth_exp.checkpoint import CheckpointStore, update_of
from pth_exp.lifecycle import State, state
from pth_exp.records.reader import RunRecords
from pth_exp.records.writer import RunRecorder

Work = Callable[..., int]
PAGE = 4096


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a size of its own."""
    mounted: list[Path] = []

    def make(size: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "pth-test", str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"this machine mounts no file system for a test: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leave: int) -> None:
    """Take all of a file system's space but ``leave`` bytes, anew."""
    filler = folder / "filler"
    filler.unlink(missing_ok=True)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(folder).f_bavail * PAGE - leave)
    assert os.statvfs(folder).f_bavail * PAGE == leave


def numbers(run: Path) -> dict[str, Any]:
    """What a run recorded, but for who wrote it and when."""
    records = RunRecords.load(run)
    rows = {kind: [_plain(row) for row in getattr(records, kind)] for kind in ("updates", "batches", "evaluations")}
    newest = CheckpointStore(run / "checkpoint", keep=1).newest()
    assert newest is not None
    return rows | {"first batches": records.first_batches, "received": records.received, "checkpoint": newest.name}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k != "attempt" and not k.startswith("timing_s/")}


@pytest.fixture(scope="module")
def frozen_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return freeze_sweep(tmp_path_factory.mktemp("frozen"), "arm=grpo", "seed=1", "updates=12", *SMALL_TASK)


MET = {
    "the first files of an attempt",
    "manifest.json",
    "received.yaml",
    "first_batches.json",
    "the row of update N in batches.N.jsonl",
    "the row of update N in updates.N.jsonl",
    "the checkpoint of update N",
    "",
}
"""What a run is writing when it finds the disk full; nothing, where there is room for all."""


def levels(met: set[str]) -> Iterator[int]:
    """Pages left free: before the first attempt where negative (less those that it asks for), else once it has begun.

    Page by page until each kind of file has been the one that did not fit; then twice as many, and enough.
    """
    yield -1
    pages = 0
    while not met >= MET - {""}:
        assert pages < 64, f"never met: {MET - met}"
        yield pages
        pages += 1
    yield from (2 * pages, 64)


@pytest.mark.slow
def test_at_whatever_level_the_disk_fills_up_nothing_is_lost(
    frozen_run: Path,
    tmp_path: Path,
    mount: Callable[[str], Path],
    work: Work,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = runs_of(shutil.copytree(frozen_run, tmp_path / "whole"))[0]
    assert work(whole, "saves") == 0
    expected = numbers(whole)
    folder = mount("1m")
    take = disk.Reserve.take
    met: set[str] = set()
    for pages in levels(met):
        run = runs_of(shutil.copytree(frozen_run, folder / "sweep"))[0]
        with monkeypatch.context() as patch:
            if pages < 0:
                fill(folder, 2 * disk.Reserve.SIZE + pages * PAGE)
            else:
                patch.setattr(disk.Reserve, "take", lambda self: (take(self), fill(folder, pages * PAGE)))  # noqa: B023
            capsys.readouterr()
            code = work(run, "saves")
        said = capsys.readouterr().err
        sentence = "".join(re.findall(r"^error: (.*)", said, re.MULTILINE))
        met.add(re.sub(r"\d+", "N", sentence.partition(" for ")[2].partition(";")[0].partition(",")[0]))
        if sentence:
            assert code == 1 and "Traceback" not in said, said
            assert f"on the file system {folder} (" in sentence and sentence.endswith("make room, then `pth resume`")
        if pages < 0:
            assert state(run)[0] is State.FROZEN and not (run / "attempts").exists()
        else:
            assert state(run) == ((State.FAILED, sentence) if sentence else (State.COMPLETED, state(run)[1]))
        records = RunRecords.load(run)
        assert not records.problems, "a reader finds nothing to complain of"
        kept = sorted((run / "checkpoint").glob("*"))
        assert all(update_of(path) % 3 == 0 for path in kept), "nothing unfinished"
        assert len(kept) == min(2, len(records.updates) // 3 - ("checkpoint" in sentence)), "the older ones are there"
        left = [path.name for path in run.rglob("*") if path.name.endswith((".tmp", ".heartbeat", ".reserve"))]
        assert not left, left
        (folder / "filler").unlink()
        assert work(run, "saves") == (0 if sentence else 2)
        assert numbers(run) == expected and not RunRecords.load(run).problems
        shutil.rmtree(run.parent)
    assert met == MET


def test_a_row_that_does_not_fit_leaves_nothing_behind(tmp_path: Path, mount: Callable[[str], Path]) -> None:
    folder = mount("64k")
    (folder / "frozen.yaml").write_text("run: {label: a}\nconfig: {}\n")
    recorder = RunRecorder(folder, 1, lambda: None)
    recorder.evaluation({"update": 0})
    fill(folder, 0)
    segment = folder / "evals.0001.jsonl"
    whole = segment.read_bytes()
    # its beginning fits into the page that the first row began
    with pytest.raises(disk.DiskFull, match=f"no space is left on the file system {folder} .* row of update 1 in evals.0001"):
        recorder.evaluation({"update": 1, "extra/long": "x" * 2 * PAGE})
    assert segment.read_bytes() == whole
    (folder / "filler").unlink()
    recorder.evaluation({"update": 1})
    assert [row["update"] for row in RunRecords.load(folder).evaluations] == [0, 1] and not RunRecords.load(folder).problems


def test_a_quota_is_called_one(tmp_path: Path) -> None:
    error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    words = r"^the quota is used up on the file system .* for the cake; .* make room"
    with pytest.raises(disk.DiskFull, match=words), disk.explained(tmp_path, "the cake"):
        raise error
    with pytest.raises(PermissionError), disk.explained(tmp_path, "the cake"):
        raise PermissionError(errno.EACCES, "no")


def test_the_file_system_that_is_full_is_the_one_that_is_named(tmp_path: Path, mount: Callable[[str], Path]) -> None:
    """An error names its file: a temporary folder may be full while the run's own is not."""
    other = mount("64k")
    error = RuntimeError("a library's")
    error.__cause__ = OSError(errno.ENOSPC, "no space", str(other / "gone" / "file"))
    assert disk.is_full(error) and f"on the file system {other} (" in str(disk.explain(error, tmp_path, "a file"))
    assert not disk.is_full(RuntimeError("another"))


def test_a_library_that_does_not_say_why_it_cannot_write(tmp_path: Path, mount: Callable[[str], Path]) -> None:
    """As torch, whose error has no number; and another error of its, on a disk with room."""
    folder = mount("64k")
    store = CheckpointStore(folder / "checkpoint", keep=1)
    for full in (True, False):
        kind, words = (disk.DiskFull, "checkpoint of update 3") if full else (RuntimeError, "^unrelated$")
        with pytest.raises(kind, match=words), store.writing(3) as unfinished:
            if full:
                (unfinished / "half").write_bytes(b"x" * PAGE)
                fill(folder, PAGE)
            raise RuntimeError("file write failed" if full else "unrelated")
        (folder / "filler").unlink(missing_ok=True)
        assert not list((folder / "checkpoint").iterdir())


@pytest.mark.slow
def test_a_real_run_on_a_full_disk_goes_on_when_there_is_room(tmp_path: Path, mount: Callable[[str], Path]) -> None:
    """Through `pth run` and `pth resume`: torch writes the checkpoints, and the third does not fit."""
    overrides = [*SMALL, *SMALL_TASK, "arm=san", "updates=11", "validation.every=null"]
    folder = mount("16m")
    size = 2_560_000
    fill(folder, 3 * size)
    ran = pth("run", *overrides, cwd=folder)
    run = runs_of((folder / "multirun_outputs" / "latest").resolve())[0]
    found, reason = state(run)
    assert ran.returncode == 1 and found is State.FAILED, ran.stderr
    assert f"there is too little space on the file system {folder} (" in reason and "for the checkpoint of update 9" in reason
    assert reason in ran.stderr and "Traceback" not in (run / "log.txt").read_text()
    assert [row["update"] for row in RunRecords.load(run).updates] == list(range(9)) and not RunRecords.load(run).problems
    fill(folder, 0)
    again = pth("resume", cwd=folder)
    assert again.returncode == 1 and "there is too little space" in again.stderr and "Traceback" not in again.stderr
    (folder / "filler").unlink()
    done = pth("resume", cwd=folder)
    assert done.returncode == 0, done.stderr
    whole = pth("run", *overrides, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    expected = numbers(runs_of((tmp_path / "multirun_outputs" / "latest").resolve())[0])
    assert numbers(run) == expected
