"""Kill a sweep at random instants, resume it each time, and hold what is left against the same sweep left alone.

    python tests/dispatch/kills.py --kills 200 [--seed N] [--folder DIR]

Everything is real: ``pth run``, its workers, ``pth resume``, SIGKILL. So that importing torch does not take nearly all of the
time, the processes of three sweeps in four are forks of one that has imported it; those of the others, and of the sweep that is
left alone, are started as always. A victim is a worker, the launcher, or both with every
other worker, as when a machine dies. The instant is random within a phase that the victim has reached (while it imports, claims
the run, loads, trains, writes a checkpoint, finishes), or random altogether. After each kill ``pth resume`` is called: at once,
beside what still lives, or when the launcher was asked to end. When all runs of a sweep have completed, the next sweep begins.

Compared, to the last bit: every row of updates, batches and evaluations but its timings and the number of its attempt, the
first batches as drawn, and the last checkpoint (weights, optimiser, sampler, queue) by its sha256. A row that two attempts wrote
must be the same in both. Exit code 0 when nothing differs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from frozen_sweeps import plain, runs_of

import pth_exp.launchers.freezing
import pth_exp.resume
import pth_exp.run
import pth_exp.trainer.loop  # noqa: F401  imported once, for every fork
from pth_exp import cli, lifecycle
from pth_exp import worker as worker_module
from pth_exp.launchers import local
from pth_exp.lifecycle import State
from pth_exp.records.reader import RunRecords

UPDATES = 12
SWEEP = (
    *("arm=tis_ppo", "queue=warmup,unique_prefill", "refresh_interval=4", "replay_age=3", f"updates={UPDATES}", "lr=1e-3"),
    *("prompts_per_update=2", "responses_per_prompt=2", "max_response_tokens=6", "task.train_problems=20"),
    *("task.test_problems=8", "validation.every=5", "validation.problems=4", "stack.checkpoint_every=3"),
    *("stack.keep_checkpoints=1", "hydra.launcher.slots=2"),
)
"""An epoch is 10 batches, so it ends within a run; checkpoints fall into the middle of intervals, and validation beside them."""

CONSTANTS = {"DEVNULL": subprocess.DEVNULL, "STDOUT": subprocess.STDOUT}
KINDS = ("updates", "batches", "evals")
PHASES: dict[str, float] = {"import": 0.5, "claim": 0.004, "load": 4.0, "update": 0.5, "checkpoint": 0.005, "finish": 0.08}
"""What a worker has reached before the clock of its end starts; the kill falls within so many seconds after it."""
OFTEN = ("claim", "update", "checkpoint", "finish")
"""Phases that are aimed at twice as often as the others, and as any time at all."""
ANY_TIME = 12.0
PATIENCE = 120.0
_POLL = 0.001


@dataclass
class Tally:
    """What was done and what was found.

    Attributes:
        kills: instants at which something was killed, by what and in which phase.
        signals: processes killed.
        forks: kills in sweeps whose processes are forks.
        wrong: what differs from the sweep left alone, a sentence each.
    """

    kills: Counter[str] = field(default_factory=Counter)
    signals: int = 0
    forks: int = 0
    sweeps: int = 0
    runs: int = 0
    attempts: int = 0
    resumed: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    again: int = 0
    torn: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {count}" for phase, count in sorted(self.kills.items()))
        rows = ", ".join(f"{count} of {kind}" for kind, count in self.rows.items())
        verdict = "\n".join(self.wrong) or "all equal the sweep that was left alone; no row is lost or repeated"
        return (
            f"{self.kills.total()} kills ({self.signals} processes; {self.forks} kills among forks): {phases}\n"
            f"{self.resumed} times pth resume; {self.attempts} attempts at {self.runs} runs of {self.sweeps} sweeps\n"
            f"rows compared: {rows}; {self.again} rows written by two attempts; {self.torn} torn lines\n{verdict}"
        )


class Fork(subprocess.Popen[bytes]):
    """A process that is a fork of this one, where Popen would start a program anew; all else is Popen's."""

    def __init__(self, call: Callable[[], int], folder: Path, log: Any) -> None:
        self._call, self._folder = call, folder
        super().__init__(["fork"], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def _execute_child(self, *arguments: Any) -> None:
        self.pid = os.fork()
        self._child_created = True
        if self.pid:
            return
        code = 70
        try:
            os.setsid()
            os.chdir(self._folder)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(arguments[13], 1)
            os.dup2(1, 2)
            # closefd: else a fork of a fork, which puts others in their place, would have the first ones close 1 and 2
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
            code = self._call()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def _work_in_a_fork(pids: Path, command: Sequence[str], stdout: Any, env: dict[str, str], **_: Any) -> subprocess.Popen[bytes]:
    """In the launcher: a worker as its fork, which notes where it works."""
    words = command[command.index("--frozen") :]

    def work() -> int:
        (pids / f".{os.getpid()}").write_text(words[1])
        (pids / f".{os.getpid()}").rename(pids / str(os.getpid()))
        os.environ.clear()
        os.environ.update(env)
        return worker_module.main(words)

    return Fork(work, Path.cwd(), stdout)


class Sweep:
    """A sweep in a folder of its own, the commands that drive it, and their workers."""

    def __init__(self, folder: Path, forks: bool) -> None:
        self.folder, self.forks = folder, forks
        self.launchers: list[subprocess.Popen[bytes]] = []
        self._seen: dict[int, psutil.Process] = {}
        self._pids = folder / "pids"
        self._pids.mkdir(parents=True, exist_ok=True)

    @property
    def path(self) -> Path | None:
        """Its directory, once all its runs are frozen."""
        latest = self.folder / "multirun_outputs" / "latest"
        return latest.resolve() if (latest / "index.json").exists() else None

    def start(self, *arguments: str) -> None:
        def launch() -> int:
            popen = functools.partial(_work_in_a_fork, self._pids)
            local.subprocess = SimpleNamespace(Popen=popen, **CONSTANTS)  # type: ignore[attr-defined]
            return cli.main(list(arguments))

        with (self.folder / "launchers.txt").open("ab") as log:
            if self.forks:
                self.launchers.append(Fork(launch, self.folder, log))
                return
            command = [sys.executable, "-P", "-m", "pth_exp.cli", *arguments]
            self.launchers.append(
                subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            )

    def living(self) -> list[subprocess.Popen[bytes]]:
        return [launcher for launcher in self.launchers if launcher.poll() is None]

    def workers(self) -> list[psutil.Process]:
        """Workers that live, those of killed launchers included."""
        for launcher in self.living():
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(launcher.pid).children():
                    if child.pid not in self._seen and self.run_of(child) is not None:
                        self._seen[child.pid] = child
        return [process for process in self._seen.values() if _lives(process)]

    def run_of(self, process: psutil.Process) -> Path | None:
        """The run that a worker works on; None for what is no worker, or not yet."""
        with contextlib.suppress(psutil.Error, FileNotFoundError):
            if self.forks:
                return Path((self._pids / str(process.pid)).read_text()).parent
            words = process.cmdline()
            if "--frozen" in words:
                return Path(words[words.index("--frozen") + 1]).parent
        return None

    def done(self) -> bool:
        return self.path is not None and all(lifecycle.state(run)[0] is State.COMPLETED for run in runs_of(self.path))

    def end(self) -> None:
        """End what this sweep started and what still lives."""
        for process in [*self.living(), *self.workers()]:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _attempt(run: Path, pid: int) -> int | None:
    """The attempt that a process has claimed."""
    number = lifecycle.newest_attempt(run)
    return number if number and lifecycle.read_attempt(run, number).pid == pid else None


def _claiming(run: Path, attempt: int | None, process: psutil.Process) -> bool:
    """Whether a worker is between the first file of its claim and its first state."""
    if attempt is not None:
        return not (run / f"states.{attempt:04d}.jsonl").exists()
    begun = (run / "attempts").glob(f"{lifecycle.newest_attempt(run) + 1:04d}.*.heartbeat")
    with contextlib.suppress(FileNotFoundError):  # another's, which may be gone by now
        return any(path.stat().st_mtime >= process.create_time() for path in begun)
    return False


def _rows(run: Path, attempt: int) -> int:
    segment = run / f"updates.{attempt:04d}.jsonl"
    return segment.read_bytes().count(b"\n") if segment.exists() else 0


def _last_update(run: Path, attempt: int) -> bool:
    segment = run / f"updates.{attempt:04d}.jsonl"
    return segment.exists() and f'"update":{UPDATES - 1},'.encode() in segment.read_bytes()


def reached(phase: str, run: Path, process: psutil.Process, rows: int) -> bool:
    """Whether a worker is in a phase, as far as its files tell."""
    pid = process.pid
    if phase == "import":
        return True
    if phase == "checkpoint":
        return any((run / "checkpoint").glob(f".update-*.{pid}.tmp"))
    attempt = _attempt(run, pid)
    if phase == "claim":
        return _claiming(run, attempt, process)
    if phase == "load" or attempt is None:
        return attempt is not None
    return _last_update(run, attempt) if phase == "finish" else _rows(run, attempt) >= rows


def phase_of(run: Path, process: psutil.Process) -> str:
    """In which phase a worker was when it was killed, by what it left."""
    pid = process.pid
    if any((run / "checkpoint").glob(f".*{pid}.tmp")):
        return "checkpoint"
    attempt = _attempt(run, pid)
    if _claiming(run, attempt, process):
        return "claim"
    if attempt is None:
        return "import"
    if _last_update(run, attempt):
        return "finish"
    return "update" if _rows(run, attempt) else "load"


class Killer:
    def __init__(self, kills: int, seed: int, say: Callable[[str], None]) -> None:
        self.wanted, self.random, self.say, self.tally = kills, random.Random(seed), say, Tally()

    def torment(self, sweep: Sweep) -> None:
        """Launch a sweep, kill and resume until it has completed."""
        sweep.start("run", *SWEEP)
        while not sweep.done():
            if self.tally.kills.total() < self.wanted and self._kill(sweep):
                self._what_next(sweep)
            elif not sweep.living() and not sweep.workers() and not sweep.done():
                self._resume(sweep)
            failed = [] if sweep.path is None else [run for run in runs_of(sweep.path) if lifecycle.state(run)[0] is State.FAILED]
            if failed:
                raise RuntimeError(f"{failed[0]}: {lifecycle.state(failed[0])[1]}\n{(failed[0] / 'log.txt').read_text()[-3000:]}")
            time.sleep(0.01)
        for launcher in sweep.living():
            launcher.wait()

    def _kill(self, sweep: Sweep) -> bool:
        """Kill something of a sweep at a random instant; False when it ended by itself before."""
        victim = self.random.choices(("worker", "launcher", "machine"), (8, 2, 2))[0]
        phase = self.random.choice(("any", *PHASES, *OFTEN))
        delay = self.random.uniform(0, PHASES.get(phase, ANY_TIME))
        rows = self.random.randint(1, 6)
        if victim == "launcher" or phase == "any":
            end = time.monotonic() + self.random.uniform(0, ANY_TIME)
            while time.monotonic() < end and sweep.living():
                time.sleep(_POLL)
                sweep.workers()
            prey = self._pick(sweep.workers())
        else:
            prey = self._await_phase(sweep, phase, rows)
            if prey is not None:
                time.sleep(delay)
        launchers = [psutil.Process(launcher.pid) for launcher in sweep.living()]
        if victim == "launcher":
            return self._strike(sweep, launchers[-1:], "launcher")
        if prey is None:
            return False
        if victim == "machine":
            return self._strike(sweep, [*launchers, *sweep.workers()], "all at once")
        return self._strike(sweep, [prey], "worker")

    def _pick(self, processes: Sequence[psutil.Process]) -> psutil.Process | None:
        return self.random.choice(processes) if processes else None

    def _await_phase(self, sweep: Sweep, phase: str, rows: int) -> psutil.Process | None:
        """A worker that has reached the phase; None when all ended before."""
        end = time.monotonic() + PATIENCE
        look = 0.0
        workers: list[psutil.Process] = []
        while time.monotonic() < end:
            if time.monotonic() > look:  # a process list takes longer than a look into a folder
                workers, look = sweep.workers(), time.monotonic() + 0.05
                if not workers and not sweep.living():
                    return None
            for worker in workers:
                run = sweep.run_of(worker)
                if run is not None and reached(phase, run, worker, rows):
                    return worker
            time.sleep(_POLL)
        return None

    def _strike(self, sweep: Sweep, processes: Sequence[psutil.Process], whom: str) -> bool:
        struck = []
        for process in processes:
            run = sweep.run_of(process)
            with contextlib.suppress(psutil.Error):
                if _lives(process):
                    process.kill()
                    struck.append((process, run))
        killed = []
        for process, run in struck:
            end = time.monotonic() + PATIENCE
            while _lives(process) and time.monotonic() < end:
                time.sleep(_POLL)
            if run is None:
                killed.append("launching" if sweep.path is not None else "freezing")
            elif lifecycle.state(run)[0] is not State.COMPLETED:
                killed.append(phase_of(run, process))
        if not killed:
            return False
        name = whom if whom == "all at once" else f"{whom} {killed[0]}"
        self.tally.forks += sweep.forks
        self.tally.kills[name] += 1
        self.tally.signals += len(killed)
        self.say(f"{self.tally.kills.total():4d}  {name}  {', '.join(killed)}")
        return True

    def _what_next(self, sweep: Sweep) -> None:
        """After a kill: resume at once, or ask the launchers to end first."""
        if sweep.path is None:  # it froze nothing whole, so there is nothing to resume
            sweep.start("resume")
            assert sweep.launchers[-1].wait() == 2
            sweep.start("run", *SWEEP)
            return
        if len(sweep.living()) > 1 or self.random.random() < 0.5:
            for launcher in sweep.living():
                with contextlib.suppress(psutil.Error):
                    launcher.terminate()
            for launcher in sweep.living():
                launcher.wait()
        self._resume(sweep)

    def _resume(self, sweep: Sweep) -> None:
        self.tally.resumed += 1
        sweep.start("resume", str(sweep.path), "--slots", str(self.random.randint(1, 2)))


def hold(sweep: Path, whole: Path, tally: Tally) -> None:
    """Compare every run of a sweep with the run of the same label that was left alone."""
    alone = {(run := RunRecords.load(path)).label: run for path in runs_of(whole)}
    for path in runs_of(sweep):
        run, wrong = RunRecords.load(path), list[str]()
        other = alone[run.label]
        for kind, mine, theirs in zip(KINDS, *((r.updates, r.batches, r.evaluations) for r in (run, other)), strict=True):
            tally.rows[kind] += len(mine)
            if [row["update"] for row in mine] != [row["update"] for row in theirs]:
                wrong.append(f"{kind}: rows of updates {[row['update'] for row in mine]}")
            for a, b in zip(mine, theirs, strict=False):
                if repr(plain(a)) != repr(plain(b)):
                    columns = [key for key in plain(b) if repr(a.get(key)) != repr(b[key])]
                    wrong.append(f"{kind}: update {b['update']} differs in {', '.join(columns)}")
        wrong += [f"{problem}" for problem in run.problems if problem.kind != "torn"]
        tally.torn += sum(problem.kind == "torn" for problem in run.problems)
        if run.first_batches != other.first_batches:
            wrong.append("first_batches.json differs")
        last, expected = (sorted(p.name for p in (r.path / "checkpoint").glob("update-*"))[-1] for r in (run, other))
        if last != expected:
            wrong.append(f"the last checkpoint is {last}, not {expected}")
        left = [str(p.relative_to(path)) for p in path.rglob("*") if p.name.endswith((".tmp", ".heartbeat", ".damaged"))]
        if left:
            wrong.append(f"left behind: {', '.join(left)}")
        tally.again += _written_again(path, wrong)
        tally.runs += 1
        tally.attempts += lifecycle.newest_attempt(path)
        tally.wrong += [f"{sweep}: {run.label}: {sentence}" for sentence in wrong]
    tally.sweeps += 1


def _written_again(path: Path, wrong: list[str]) -> int:
    """How many rows were written by more than one attempt; those that differ go to ``wrong``."""
    again = 0
    for kind in KINDS:
        found: dict[int, list[dict[str, Any]]] = defaultdict(list)
        run = RunRecords(path, {})
        for segment in sorted(path.glob(f"{kind}.[0-9]*.jsonl")):
            for _, row in run._lines(segment):
                found[row["update"]].append(row)
        for update, rows in found.items():
            again += len(rows) - 1
            if len({repr(plain(row)) for row in rows}) > 1:
                wrong.append(f"{kind}: two attempts wrote different rows of update {update}")
    return again


@contextlib.contextmanager
def _sweep(folder: Path, forks: bool) -> Iterator[Sweep]:
    sweep = Sweep(folder, forks)
    try:
        yield sweep
    finally:
        sweep.end()


def kill_sweeps(folder: Path, kills: int, seed: int, forks_only: bool, say: Callable[[str], None]) -> Tally:
    """The whole of it, in ``folder``."""
    with _sweep(folder / "alone", forks_only) as alone:
        alone.start("run", *SWEEP)
        if alone.launchers[0].wait() != 0 or alone.path is None:
            raise RuntimeError((alone.folder / "launchers.txt").read_text())
    killer = Killer(kills, seed, say)
    while killer.tally.kills.total() < kills:
        with _sweep(folder / f"{killer.tally.sweeps:03d}", forks_only or killer.tally.sweeps % 4 != 3) as sweep:
            killer.torment(sweep)
            assert sweep.path is not None
            hold(sweep.path, alone.path, killer.tally)
            say(f"      sweep {killer.tally.sweeps} completed; {len(killer.tally.wrong)} differences so far")
    return killer.tally


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--forks-only", action="store_true", help="no process is started anew, which is quicker")
    parser.add_argument("--folder", type=Path, help="where the sweeps stay; a temporary folder by default")
    asked = parser.parse_args(arguments)
    print(f"seed {asked.seed}", flush=True)
    torch.set_num_threads(1)  # a fork has no other thread than the one that forks
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tally = kill_sweeps(folder.absolute(), asked.kills, asked.seed, asked.forks_only, lambda text: print(text, flush=True))
    print(f"seed {asked.seed}, {time.monotonic() - began:.0f} s\n{tally}")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
