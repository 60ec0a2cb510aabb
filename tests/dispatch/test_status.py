"""`pth status`: where runs stand, from the ends of their files, printed or live on a real terminal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pth_exp import lifecycle
from pth_exp.cli import main
from pth_exp.lifecycle import Lease, State
from pth_exp.records.tail import last_rows

PTH = Path(sys.executable).with_name("pth")


def sweep_of(root: Path, count: int, updates: int | None = 50) -> Path:
    """A sweep that is frozen and nothing more; the runs are called run·seed=0, ..."""
    runs = [{"index": i, "dir": f"{i:03d}-x", "label": f"run·seed={i}", "updates": updates} for i in range(count)]
    for run in runs:
        (root / str(run["dir"])).mkdir(parents=True)
    (root / "index.json").write_text(json.dumps({"format": 1, "created": "2026-01-01T00:00:00+00:00", "runs": runs}))
    return root


def write(run_dir: Path, kind: str, rows: list[dict[str, Any]], attempt: int = 1, torn: str = "") -> None:
    text = "".join(json.dumps({**row, "attempt": attempt}) + "\n" for row in rows)
    (run_dir / f"{kind}.{attempt:04d}.jsonl").write_text(text + torn)


def update(number: int, seconds: float | None = None, **more: Any) -> dict[str, Any]:
    return {"update": number, "timing_s/step": seconds, "reward/trained": 0.25, "rollout_corr/kl": 1e-3, "data/age": 4} | more


@pytest.fixture
def leases() -> Iterator[list[Lease]]:
    """Leases to be given back when a test ends."""
    held: list[Lease] = []
    yield held
    for lease in held:
        lease.abandon()


def claim(run_dir: Path, leases: list[Lease], job: str | None = None) -> Lease:
    leases.append(lifecycle.claim(run_dir, 60.0, 600.0, "here", job))
    return leases[-1]


def finish(run_dir: Path) -> None:
    """As a run that has completed long ago left it."""
    lifecycle.claim(run_dir, 60.0, 600.0, "here", None).end(State.COMPLETED)


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["status", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["status", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def mixed(tmp_path: Path, leases: list[Lease]) -> Path:
    """One run in each state, and one that is gone."""
    sweep = sweep_of(tmp_path / "s", 8)
    dirs = sorted(sweep.glob("0*"))
    claim(dirs[0], leases, "job-7")
    write(dirs[0], "updates", [update(u, s) for u, s in enumerate([1.0, 1.0, 90.0, 2.0, 2.0])], torn='{"update": 5, "rew')
    write(dirs[0], "evals", [{"update": 0, "accuracy": 0.1}, {"update": 4, "accuracy": 0.5}])
    claim(dirs[1], leases).end(State.FAILED, "no space left")
    lost = claim(dirs[2], leases)
    lost.abandon()
    os.utime(dirs[2] / "attempts" / lost.attempt.heartbeat, (0, 0))
    lifecycle.note(dirs[3], State.QUEUED, "launcher", job_id="4711_3")
    claim(dirs[5], leases).end(State.PREEMPTED, "told to stop")
    finish(dirs[6])
    shutil.rmtree(dirs[7])
    return sweep


def test_every_state_with_who_set_it(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = told(capsys, mixed)["runs"]
    assert [run["state"] for run in runs] == [
        "RUNNING", "FAILED", "LOST", "QUEUED", "FROZEN", "PREEMPTED", "COMPLETED", "MISSING",
    ]  # fmt: skip
    assert [(run["by"] or "-").split()[0] for run in runs] == [
        "worker", "worker", "-", "launcher", "-", "worker", "worker", "-",
    ]  # fmt: skip
    assert [run["job_id"] for run in runs] == ["job-7", None, None, "4711_3", None, None, None, None]
    assert runs[1]["detail"] == "no space left" and runs[7]["detail"].endswith("is not there")
    assert all(run["since"] for run in runs if run["state"] not in ("FROZEN", "MISSING"))
    assert runs[0]["host"] == runs[6]["host"] and runs[3]["host"] is None


def test_newest_update_last_evaluation_and_time_left(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = told(capsys, mixed)["runs"][0]
    assert (run["update"], run["updates"], run["reward"], run["kl"], run["age"]) == (4, 50, 0.25, 1e-3, 4)
    assert run["evaluation"] == {"update": 4, "accuracy": 0.5}
    assert run["seconds_left"] == 2.0 * 45  # the median of 1, 1, 90, 2, 2 for each of the updates 5 to 49


def test_it_is_printed_once_where_nobody_looks(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, mixed)
    lines = out.splitlines()
    assert lines[0].endswith("(1 frozen, 1 queued, 1 running, 1 preempted, 1 completed, 1 failed, 1 lost, 1 missing)")
    assert lines[1].split()[:9] == ["run", "state", "update", "reward", "evaluation", "KL", "age", "host", "job"]
    assert len(lines) == 10
    row = lines[2]
    for text in ("[0] run·seed=0", "RUNNING", "5/50", "0.250", "0.500 at 4", "1.00e-03", "job-7", "1m30s", "worker "):
        assert text in row
    assert "no space left" in lines[3] and "4711_3" in lines[5] and "0/50" in lines[5]


@pytest.mark.parametrize(
    ("rows", "updates", "left"),
    [
        ([update(0, None)], 50, None),
        ([update(0, 3.0)], None, None),
        ([], 50, None),
        ([update(u, 1.0 + u) for u in range(40)], 50, (21 + 40) / 2 * 10),  # updates 20 to 39 took 21 to 40 s
        ([update(9, 2.0)], 10, 0.0),
    ],
)
def test_time_left_or_that_it_is_not_known(
    rows: list[dict[str, Any]], updates: int | None, left: float | None,
    tmp_path: Path, leases: list[Lease], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    sweep = sweep_of(tmp_path / "s", 1, updates)
    claim(sweep / "000-x", leases)
    if rows:
        write(sweep / "000-x", "updates", rows)
    assert told(capsys, sweep)["runs"][0]["seconds_left"] == left
    assert ("left" in printed(capsys, sweep).splitlines()[1].split()) == (left is not None)


def test_what_an_earlier_attempt_recorded_stands_until_the_next_records(
    tmp_path: Path, leases: list[Lease], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of(tmp_path / "s", 1)
    run_dir = sweep / "000-x"
    claim(run_dir, leases).end(State.PREEMPTED)
    claim(run_dir, leases)
    write(run_dir, "updates", [update(11)])
    write(run_dir, "updates", [], attempt=2, torn='{"update"')
    assert told(capsys, sweep)["runs"][0]["update"] == 11
    write(run_dir, "updates", [update(10), update(11, **{"reward/trained": "NaN"})], attempt=2)
    assert "12/50" in printed(capsys, sweep) and "nan" in printed(capsys, sweep)


rows_of_any_size = st.lists(st.tuples(st.booleans(), st.sampled_from([0, 10, 3000, 20000])), max_size=12)


@settings(deadline=None)
@given(rows_of_any_size, st.integers(1, 5), st.sampled_from(["", '{"u', "x" * 9000]))
def test_the_last_rows_are_those_of_the_whole_file(rows: list[tuple[bool, int]], most: int, torn: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps({"update": u, "x": "y" * size}) if whole else "{torn" for u, (whole, size) in enumerate(rows)]
        Path(folder, "updates.0001.jsonl").write_text("".join(line + "\n" for line in lines) + torn)
        expected = [u for u, (whole, _) in enumerate(rows) if whole][-most:]
        assert [row["update"] for row in last_rows(Path(folder), os.listdir(folder), "updates", most)] == expected


def test_history_of_one_run(tmp_path: Path, leases: list[Lease], capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = sweep_of(tmp_path / "s", 1) / "000-x"
    frozen = {"run": {"index": 0, "label": "run·seed=0"}, "config": {"updates": 50}}
    (run_dir / "frozen.yaml").write_text(json.dumps(frozen))
    assert "no attempt yet" in printed(capsys, run_dir)
    lifecycle.note(run_dir, State.FROZEN, "launcher")
    lifecycle.note(run_dir, State.QUEUED, "launcher", job_id="4711")
    claim(run_dir, leases, "4711").end(State.PREEMPTED, "SIGTERM")
    claim(run_dir, leases, "4712")
    found = told(capsys, run_dir)
    assert [(row["state"], row.get("attempt")) for row in found["states"]] == [
        ("FROZEN", None), ("QUEUED", None), ("RUNNING", 1), ("PREEMPTED", 1), ("RUNNING", 2),
    ]  # fmt: skip
    assert [(a["attempt"], a["job_id"], a["pid"]) for a in found["attempts"]] == [
        (1, "4711", os.getpid()),
        (2, "4712", os.getpid()),
    ]
    out = printed(capsys, run_dir)
    lines = [line.split() for line in out.splitlines()]
    assert [line[2] for line in lines[5:10]] == ["FROZEN", "QUEUED", "RUNNING", "PREEMPTED", "RUNNING"]
    assert "job 4711" in out and "SIGTERM" in out and lines[-1][0] == "2" and str(os.getpid()) in lines[-1]


def test_status_imports_rich_only_for_a_live_table(mixed: Path) -> None:
    code = f"import sys; from pth_exp.cli import main; main(['status', {str(mixed)!r}]); "
    code += "print(sorted({'rich', 'torch', 'hydra', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ----------------------------------------------------------------------------------------------------- on a real terminal


def status(sweep: Path, *arguments: str, rows: int = 24, columns: int = 160) -> pexpect.spawn[str]:
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(rows)}
    return pexpect.spawn(
        str(PTH), ["status", str(sweep), *arguments], env=environment, encoding="utf-8", timeout=60, dimensions=(rows, columns),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as in a terminal, wherever the tests run
    )  # fmt: skip


def ended(terminal: pexpect.spawn[str]) -> str:
    """What came last, once the command has ended with exit code 0."""
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    last = str(terminal.before)
    assert "Traceback" not in last
    return last


def test_a_live_table_stays_until_all_has_ended(tmp_path: Path, leases: list[Lease]) -> None:
    sweep = sweep_of(tmp_path / "s", 2)
    finish(sweep / "001-x")
    lease = claim(sweep / "000-x", leases)
    write(sweep / "000-x", "updates", [update(0, 4.0)])
    terminal = status(sweep)
    terminal.expect_exact("2 runs: 1 running, 1 completed")
    terminal.expect_exact("1/50")
    terminal.expect_exact("3m16s")  # 49 updates of 4 s
    write(sweep / "000-x", "updates", [update(0), update(1)])
    terminal.expect_exact("2/50")
    lease.end(State.FAILED, "told so")
    assert "1 completed, 1 failed" in ended(terminal)


def test_ctrl_c_leaves_a_live_table_quietly(tmp_path: Path) -> None:
    terminal = status(sweep_of(tmp_path / "s", 1))
    terminal.expect_exact("1 frozen")
    terminal.sendintr()
    ended(terminal)


def test_of_hundreds_of_runs_those_that_matter_are_shown(tmp_path: Path, leases: list[Lease]) -> None:
    sweep = sweep_of(tmp_path / "s", 60)
    for number in range(60):
        lifecycle.note(sweep / f"{number:03d}-x", State.QUEUED, "launcher")
    claim(sweep / "057-x", leases).end(State.FAILED, "no space left")
    claim(sweep / "059-x", leases)
    terminal = status(sweep, rows=20)
    terminal.expect_exact("60 runs: 58 queued, 1 running, 1 failed")
    terminal.expect_exact("[59] run·seed=59")
    terminal.expect_exact("[57] run·seed=57")
    terminal.expect_exact("no space left")
    terminal.expect_exact("[0] run·seed=0")
    terminal.expect(r"\.\.\. and (\d+) more queued")
    assert terminal.match and 40 < int(terminal.match[1]) < 50
    terminal.sendintr()
    ended(terminal)


def test_a_narrow_terminal_goes_without_some_columns(tmp_path: Path, leases: list[Lease]) -> None:
    sweep = sweep_of(tmp_path / "s", 1)
    claim(sweep / "000-x", leases, "a-job-with-a-long-name")
    write(sweep / "000-x", "updates", [update(0, 4.0)])
    terminal = status(sweep, columns=60)
    terminal.expect_exact("[0] run·seed=0")
    terminal.expect_exact("3m16s")
    assert "…" not in str(terminal.before).splitlines()[-1]
    terminal.sendintr()
    ended(terminal)


def test_at_a_terminal_once_prints_everything_and_so_does_a_sweep_that_has_ended(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path / "s", 40)
    once = ended(status(sweep, "--once"))
    assert once.count("FROZEN") == 40
    for number in range(40):
        finish(sweep / f"{number:03d}-x")
    assert ended(status(sweep)).count("COMPLETED") == 40
