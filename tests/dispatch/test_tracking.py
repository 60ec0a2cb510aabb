"""What Weights & Biases gets of a run, read back with its own tools, and what becomes of a run whose tracker fails or hangs."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from frozen_sweeps import SMALL, SMALL_TASK, all_reach, freeze_sweep, pid_of, pth, runs_of, until
from wandb_server import KEY, Server, unreachable

from pth_exp.lifecycle import State, state
from pth_exp.records.reader import RunRecords

pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
pytestmark = pytest.mark.slow

Work = Callable[..., int]


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this user's wandb; and variables that would decide what the frozen config decides."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("RUN_ID", "RUN_GROUP", "NAME", "PROJECT", "TAGS", "RESUME"):
        monkeypatch.setenv(f"WANDB_{name}", "must" if name == "RESUME" else "other")


PATIENT = "tracking.close_timeout=240"
"""A loaded machine takes long to import wandb; the bound itself has tests of its own."""

KINDS = {
    "offline": f"tracking=wandb {PATIENT}",
    "online": f"tracking=wandb tracking.mode=online tracking.key_variable=MY_KEY {PATIENT}",
    "online in a hurry": "tracking=wandb tracking.mode=online tracking.close_timeout=0.5",
    "offline in a hurry": "tracking=wandb tracking.close_timeout=0.5",
    "not tracked": "tracking=file",
}


@pytest.fixture(scope="module")
def frozen_kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    blocks = [f"{overrides} seed={seed}" for seed, overrides in enumerate(KINDS.values())]
    listed = ",".join(f'"{block}"' for block in blocks)
    return freeze_sweep(
        tmp_path_factory.mktemp("frozen"), "arm=grpo", "updates=12", f"hydra.sweeper.blocks=[{listed}]", *SMALL_TASK
    )


@pytest.fixture
def frozen_run(frozen_kinds: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A run of one of the kinds, that nobody has run yet."""
    sweep = Path(shutil.copytree(frozen_kinds, tmp_path / frozen_kinds.name))
    return lambda kind: runs_of(sweep)[list(KINDS).index(kind)]


def expected(run: Path) -> list[dict[str, Any]]:
    """The records' numbers, joined by hand."""
    records = RunRecords.load(run)
    steps: dict[int, dict[str, Any]] = {step: {"_step": step} for step in range(records.config["updates"] + 1)}
    for row in (*records.updates, *records.evaluations):
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float)) and k not in ("update", "attempt")}
        steps[row["update"]].update({k: "NaN" if math.isnan(v) else v for k, v in numbers.items()})
    return list(steps.values())


def sent(server: Server, run_id: str) -> list[dict[str, Any]]:
    rows = [{k: v for k, v in row.items() if k not in ("_timestamp", "_runtime")} for row in server.history[run_id]]
    return [{k: "NaN" if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows]


def check_what_was_sent(server: Server, run: Path) -> None:
    frozen = yaml.safe_load((run / "frozen.yaml").read_text())
    sweep, index, seed = frozen["run"]["sweep"], frozen["run"]["index"], frozen["config"]["seed"]
    run_id = f"{sweep}-{index:03d}"
    assert sent(server, run_id) == expected(run), "every update and validation, each once, at its own step"
    told = server.runs[run_id]
    assert list(server.runs) == [run_id] and told["project"] == "adhoc"
    assert (told["groupName"], told["displayName"]) == (sweep, frozen["run"]["label"])
    assert told["tags"] == [frozen["config"]["arm"]["name"], "trainer", f"seed={seed}"]
    hashes = {"config_id": frozen["config_id"], "frozen_sha256": (run / "frozen.sha256").read_text().strip()}
    assert server.config(run_id) == without_empty(frozen["config"]) | hashes


def without_empty(config: dict[str, Any]) -> dict[str, Any]:
    """wandb keeps no mapping that is empty."""
    kept = {name: without_empty(value) if isinstance(value, dict) else value for name, value in config.items()}
    return {name: value for name, value in kept.items() if value != {}}


def nothing_is_left() -> bool:
    """Of trackers; other tests' daemons may be children of this process too."""
    there = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return not [p for p in there if any("tracking" in word or "wandb" in word for word in p.cmdline())]


def sync(run: Path, server: Server) -> None:
    """As a user does: all that lies in the run's folder."""
    folders = [str(folder) for folder in (run / "wandb").glob("*run-*-*") if not folder.is_symlink()]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", "--yes", *folders],
        cwd=run,  # it logs where it is called
        env=clean | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "WANDB_ERROR_REPORTING": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_offline_files_of_a_resumed_run_hold_all_of_it_once(frozen_run: Callable[[str], Path], work: Work) -> None:
    """`wandb sync` reads them. Of the first attempt's folder as well: what it holds is not sent twice."""
    run = frozen_run("offline")
    assert work(run, "breaks_once") == 1 and nothing_is_left()
    (first,) = (run / "wandb").glob("offline-run-*")
    assert not Path(os.environ["HOME"]).exists(), "nothing is written outside the run's directory"
    with Server() as server:
        sync(run, server)
        (rows,) = server.history.values()
        assert [row["_step"] for row in rows] == list(range(8))
        kept = first.rename(run / "wandb" / "kept")
        assert work(run, "breaks_once") == 0 and nothing_is_left()
        (second,) = (run / "wandb").glob("offline-run-*")
        assert second.name != first.name
        kept.rename(first)
        for marker in first.glob("*.synced"):
            marker.unlink()
        sync(run, server)
        check_what_was_sent(server, run)


def test_a_killed_run_and_what_resumes_it_are_one_run(tmp_path: Path) -> None:
    """Real training, through `pth run` and `pth resume`. Nobody ends the tracker of a worker that is gone: it does so itself."""
    overrides = ["arm=san", "updates=60", "validation.every=6", "validation.problems=8", "tracking=wandb", PATIENT]
    launcher = subprocess.Popen(
        [sys.executable, "-P", "-m", "pth_exp.cli", "run", *SMALL, *SMALL_TASK, *overrides],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    latest = tmp_path / "multirun_outputs" / "latest"
    until((latest / "index.json").exists)
    (run,) = runs_of(latest.resolve())
    until(all_reach([run], 8))
    worker = psutil.Process(pid_of(run))
    trackers = worker.children(recursive=True)
    worker.kill()
    launcher.communicate()
    assert trackers and psutil.wait_procs(trackers, timeout=240)[1] == []
    resumed = pth("resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    records = RunRecords.load(run)
    assert {row["attempt"] for row in records.updates} == {1, 2}
    with Server() as server:
        sync(run, server)
        check_what_was_sent(server, run)


def test_online_a_resumed_run_goes_on_under_its_name_and_its_key_is_nowhere(
    frozen_run: Callable[[str], Path],
    work: Work,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = frozen_run("online")
    monkeypatch.setenv("MY_KEY", KEY)
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert work(run, "breaks_once") == 1
        assert [row["_step"] for row in server.history[next(iter(server.history))]] == list(range(8))
        assert work(run, "breaks_once") == 0
        check_what_was_sent(server, run)
        assert any(KEY in key or len(key) > 20 for key in server.keys), "the key was used"
    assert nothing_is_left()
    written = b"".join(path.read_bytes() for path in run.parent.rglob("*") if path.is_file())
    assert KEY.encode() not in written and KEY not in "".join(capfd.readouterr()) + caplog.text


@pytest.mark.parametrize("how", ["silent", "refuses"])
def test_an_unreachable_server_is_given_up_with_the_run(
    frozen_run: Callable[[str], Path], work: Work, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    run = frozen_run("online in a hurry")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with unreachable(how) as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        assert work(run, "completes") == 0
    assert state(run)[0] is State.COMPLETED and nothing_is_left()
    assert f"nothing was handed to wandb: its server has not answered. All is in the records: `pth track {run}`" in caplog.text
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert pth("track", "--online", run, cwd=run).returncode == 0
        assert [row["_step"] for row in next(iter(server.history.values()))] == list(range(12))


def test_a_server_that_does_not_answer_in_time_leaves_offline_files(frozen_run: Callable[[str], Path], work: Work) -> None:
    run = frozen_run("online")
    assert work(run, "completes") == 0  # without a key: offline
    script = f"from pth_exp.tracking import beside, to_wandb; to_wandb.INIT_TIMEOUT = 0.5; beside.main({str(run)!r}, 1)"
    script = f"from pathlib import Path; {script.replace(repr(str(run)), f'Path({str(run)!r})')}"
    with unreachable("silent") as url:
        environment = {**os.environ, "WANDB_BASE_URL": url, "MY_KEY": KEY}
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None and process.stdout is not None
        told = []
        for line in process.stdout:
            told.append(line.strip())
            if line.startswith("@open"):
                process.stdin.close()
        assert process.wait() == 0, told
    assert re.search("^wandb: CommError: .*; kept offline$", told[1]) and told[2] == "@open offline" and told[-1] == "@at 11"
    (folder,) = [folder for folder in (run / "wandb").glob("*run-*-*") if not folder.is_symlink()]
    assert folder.name.startswith("offline-run-"), "and nothing of what failed"
    with Server() as server:
        sync(run, server)
        assert [row["_step"] for row in next(iter(server.history.values()))] == list(range(12))


NEVER = "time.sleep(3600)"


def fake(start: str = "0", log: str = "0", finish: str = "0") -> str:
    """A wandb whose parts do as told."""
    parts = f" def __init__(s, **_): {start}\n def log(s, *_, **__): {log}\n def finish(s): {finish}\n"
    return f"import time\nclass Settings:\n def __init__(s, **_): 0\nclass init:\n dir = '/x/y'\n{parts}"


FAKES = {
    "cannot be imported": ("raise ImportError('half installed')", "wandb: ImportError: half installed"),
    "ends its process": ("import os; os._exit(7)", "it ended with exit code 7"),
    "cannot be started": (fake(start="1 / 0"), "wandb: ZeroDivisionError"),
    "hangs as it starts": (fake(start=NEVER), "nothing was handed to wandb: it was not done within 0.5 s"),
    "fails to log": (fake(log="1 / 0"), "wandb: ZeroDivisionError"),
    "hangs as it logs": (fake(log=NEVER), "it was not done within 0.5 s"),
    "hangs as it ends": (fake(finish=NEVER), "it was not done within 0.5 s"),
}


@pytest.mark.parametrize("fault", FAKES)
def test_whatever_a_tracker_does_the_run_does_not_notice(
    frozen_run: Callable[[str], Path],
    tmp_path: Path,
    work: Work,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    source, said = FAKES[fault]
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(source)
    run = frozen_run("offline in a hurry" if "hangs" in fault else "offline")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    assert work(run, "is_terminated" if fault == "hangs as it starts" else "completes") == (3 if "starts" in fault else 0)
    assert said in caplog.text and nothing_is_left()


def test_what_was_never_tracked_can_be_afterwards(
    frozen_run: Callable[[str], Path],
    work: Work,
) -> None:
    run = frozen_run("not tracked")
    assert work(run, "breaks_once") == 1 and work(run, "breaks_once") == 0 and not (run / "wandb").exists()
    done = pth("track", run.parent, cwd=run)
    assert done.returncode == 0 and ": 13 steps written below" in done.stdout, done.stderr
    with Server() as server:
        sync(run, server)
        check_what_was_sent(server, run)
    done = pth("track", "--online", run, cwd=run)
    assert done.returncode == 1 and "WANDB_API_KEY is not set" in done.stderr
