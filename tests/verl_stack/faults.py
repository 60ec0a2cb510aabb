"""Deliberate faults of verl jobs: what a user sees of each, and how long it takes.

    python tests/verl_stack/faults.py [NAME ...]        # a table; without names all of them, an hour on two cores

Each sweep has two runs: one that the fault hits, and a small one of the trainer after it, which has to complete all the same.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pth_exp import lifecycle, marked
from pth_exp.launchers.ray_head import MARK, Head
from pth_exp.lifecycle import State
from pth_exp.verl_stack import frozen

VERL = "stack=verl updates=400"
SMALL = [
    *("arm=ppo_clip", "prompts_per_update=4", "responses_per_prompt=4", "max_response_tokens=24", "task.train_problems=8"),
    *("task.test_problems=16", "validation.every=null", "design.gate=label", "design.blocks=[stack,updates]", "seed=7"),
]
PATIENCE = 900.0
"""Seconds, for what has to happen before a fault; they only bound a failing run."""


@dataclass(slots=True)
class Sweep:
    """A sweep that runs: its launcher, its folder, and the run that is to be hit."""

    folder: Path
    launcher: subprocess.Popen[str]

    @property
    def path(self) -> Path:
        return (self.folder / "multirun_outputs" / "latest").resolve()

    @property
    def victim(self) -> Path:
        return self.path / json.loads((self.path / "index.json").read_text())["runs"][0]["dir"]

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the sweep ended, or came to nothing, before the fault")
            time.sleep(0.05)

    def updates(self, number: int) -> None:
        """Wait for so many rows of the victim."""
        self.wait(lambda: (self.path / "index.json").exists())
        self.wait(lambda: sum(p.read_bytes().count(b"\n") for p in self.victim.glob("updates.*.jsonl")) >= number)

    def process(self, *names: str) -> int:
        """Wait for a process of the victim's job by the beginning of what it calls itself."""
        self.wait(lambda: (self.path / "index.json").exists())
        while True:
            for pid in marked.processes(frozen.PATH, str(self.victim / "frozen.yaml")):
                try:
                    title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                if any(title.startswith(name) or title.split(" ")[0].endswith(f"/{name}") for name in names):
                    return pid
            self.wait(lambda: True)
            time.sleep(0.05)


@dataclass(frozen=True)
class Fault:
    """One case.

    Attributes:
        title: what is done.
        blocks: of the sweep, each a line of overrides or a list of them; the first is hit.
        hit: does it to a running sweep; None where the command itself is the fault.
        options: of the command.
        state: the victim's state afterwards; None where nothing starts.
        says: parts of the reason.
        others: whether the second run completes.
    """

    title: str
    says: Sequence[str]
    state: State | None = State.FAILED
    hit: Callable[[Sweep], None] | None = None
    blocks: Sequence[str | list[str]] = (VERL, "stack=trainer updates=3")
    options: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    others: bool = True


def _kill(*names: str, number: signal.Signals = signal.SIGKILL, after: int = 2) -> Callable[[Sweep], None]:
    def hit(sweep: Sweep) -> None:
        if after:
            sweep.updates(after)
        os.kill(sweep.process(*names), number)

    return hit


def _starve(sweep: Sweep) -> None:
    """No more memory for the learner than it has now."""
    sweep.updates(2)
    pid = sweep.process("ray::WorkerDict")
    held = psutil.Process(pid).memory_info().vms
    resource.prlimit(pid, resource.RLIMIT_AS, (held, held))


def _kill_launcher(sweep: Sweep) -> None:
    sweep.updates(2)
    sweep.launcher.kill()


def _kill_head(part: str) -> Callable[[Sweep], None]:
    """A process of the head that pth_ray owns."""

    def hit(sweep: Sweep) -> None:
        sweep.updates(2)
        attempt = lifecycle.read_attempt(sweep.victim, 1)
        mark = dict(v.split("=", 1) for v in Path(f"/proc/{attempt.pid}/environ").read_text().split("\0") if "=" in v)[MARK]
        (pid,) = [p for p in marked.processes(MARK, mark) if Path(f"/proc/{p}/exe").resolve().name == part]
        os.kill(pid, signal.SIGKILL)

    return hit


def _remove_model(sweep: Sweep) -> None:
    sweep.wait(lambda: (sweep.path / "index.json").exists())
    shutil.rmtree(sweep.folder / "model")


RAY = "hydra/launcher=pth_ray"
VLLM_NO = ["stack=verl", "updates=4", "stack.overrides=['actor_rollout_ref.rollout.max_num_batched_tokens=1']"]

FAULTS = {
    "ray_unreachable": Fault(
        "no Ray at the address",
        ["launcher.address=http://127.0.0.1:9", "no Ray dashboard with a Jobs API answers there"],
        state=None,
        options=[RAY, "hydra.launcher.address=http://127.0.0.1:9"],
        others=False,
    ),
    "wrong_token": Fault(
        "a token that the cluster refuses",
        ["launcher.token_env=PTH_TEST_TOKEN", "refuses the token that this variable holds"],
        state=None,
        options=[RAY, "hydra.launcher.token_env=PTH_TEST_TOKEN"],
        environment={"PTH_TEST_TOKEN": "wrong"},
        others=False,
    ),
    "no_room": Fault(
        "a job that asks for more than the cluster has",
        ["launcher.start_timeout", "asks for cpus 64", "the cluster has CPU"],
        blocks=("stack=trainer updates=400", "stack=trainer updates=3"),
        options=[RAY, "hydra.launcher.num_cpus=64", "hydra.launcher.start_timeout=10"],
        others=False,
    ),
    "model_missing": Fault("a model path that is not there", ["model.path"], None, options=["model.path=/nowhere"], others=False),
    "model_removed": Fault(
        "the model's folder is removed while the run waits",
        ["model"],
        hit=_remove_model,
        blocks=("stack=verl model.path={model} updates=4", "stack=trainer updates=3"),
    ),
    "vllm_refuses": Fault(
        "vLLM refuses a setting at its start",
        ["max_num_batched_tokens"],
        blocks=(VLLM_NO, "stack=trainer updates=3"),
    ),
    "start_hangs": Fault(
        "a process stops answering during the start (SIGSTOP)",
        ["the start took longer than it may (stack.start_timeout=180 seconds): waiting in "],
        hit=_kill("VLLM::EngineCore", "VLLM::Worker", "ray::Server", number=signal.SIGSTOP, after=0),
        blocks=("stack=verl updates=400 stack.start_timeout=180", "stack=trainer updates=3"),
    ),
    "memory": Fault("the learner gets no more memory (RLIMIT_AS)", ["memory"], hit=_starve),
    "learner_killed": Fault(
        "the learner's process is killed in mid-update", ["WorkerDict", "died"], hit=_kill("ray::WorkerDict")
    ),
    "vllm_killed": Fault("vLLM's engine is killed", ["EngineDeadError"], hit=_kill("VLLM::EngineCore")),
    "gcs_killed": Fault("the run's own Ray head: GCS killed", ["Ray head is broken: its gcs_server"], hit=_kill("gcs_server")),
    "raylet_killed": Fault("the run's own Ray head: raylet killed", ["Ray head is broken: its raylet"], hit=_kill("raylet")),
    "vllm_hangs": Fault(
        "vLLM stops answering in mid-run (SIGSTOP)",
        ["took longer than it may (stack.update_timeout=60 seconds): waiting in ", "trainer.py"],
        hit=_kill("VLLM::Worker", "VLLM::EngineCore", number=signal.SIGSTOP),
        blocks=(f"{VERL} stack.update_timeout=60", "stack=trainer updates=3"),
    ),
    "launcher_killed": Fault(
        "the launcher is killed", ["the launcher, pid ", " is gone"], State.PREEMPTED, _kill_launcher, others=False
    ),
    "ray_learner_killed": Fault(
        "pth_ray: the learner's process of a verl job is killed; the cluster goes on",
        ["WorkerDict", "died"],
        hit=_kill("ray::WorkerDict"),
        options=[RAY],
    ),
    "ray_head_killed": Fault(
        "pth_ray: the head that it owns is killed (raylet)",
        ["the Ray head has ended: raylet"],
        State.LOST,
        _kill_head("raylet"),
        options=[RAY],
        others=False,
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What came of a fault: the victim's state, its reason, seconds since the fault, and what is wrong with all that."""

    state: str
    message: str
    seconds: float
    wrong: list[str]


def run(name: str, folder: Path) -> Outcome:
    """Inflict one fault on a sweep in a folder of its own."""
    fault = FAULTS[name]
    model = folder / "model"
    shutil.copytree(Path(str(lifecycle.__file__)).parent / "models" / "embedded", model)
    with _head(name == "wrong_token", folder) as more:
        blocks = json.dumps([*fault.blocks]).replace("{model}", str(model))
        command = [
            sys.executable,
            "-P",
            "-m",
            "pth_exp.cli",
            "run",
            f"hydra.sweeper.blocks={blocks}",
            *SMALL,
            *fault.options,
            *more,
        ]
        environment = {**os.environ, **fault.environment}
        launcher = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        sweep = Sweep(folder, launcher)
        begun = time.monotonic()
        if fault.hit is not None:
            fault.hit(sweep)
            begun = time.monotonic()
        _, err = launcher.communicate()
        if fault.state is None or not (sweep.path / "index.json").exists():
            seconds, message = time.monotonic() - begun, err.strip().replace("\n", " ")
            return Outcome("refused", message, seconds, _wrong(fault, launcher.returncode, None, message))
        victim = sweep.victim
        deadline = time.monotonic() + 300
        while (now := lifecycle.status(victim)).state is State.RUNNING and time.monotonic() < deadline:
            time.sleep(0.2)
        wrong = _wrong(fault, launcher.returncode, now.state, now.detail)
        if fault.others:
            other = lifecycle.state(sweep.path / json.loads((sweep.path / "index.json").read_text())["runs"][1]["dir"])
            wrong += [f"the other run: {other}"] * (other[0] is not State.COMPLETED)
        left = marked.processes(frozen.PATH, str(victim / "frozen.yaml"))
        wrong += [f"left behind: {left}"] * bool(left)
        return Outcome(str(now.state), now.detail, _ended(victim) - (time.time() - (time.monotonic() - begun)), wrong)


def _ended(victim: Path) -> float:
    """When the run's last state was set, in seconds since the epoch."""
    from datetime import datetime

    return datetime.fromisoformat(lifecycle.history(victim)[-1]["at"]).timestamp()


def _wrong(fault: Fault, code: int, state: State | None, message: str) -> list[str]:
    wrong = [f"not said: {part}" for part in fault.says if part not in message]
    if state is not fault.state:
        wrong.append(f"{state} instead of {fault.state}")
    if len(message) > 1200 or "Traceback" in message:
        wrong.append("not a reason that a user reads")
    expected = {None: 2, State.PREEMPTED: -signal.SIGKILL}.get(fault.state, 1)
    if code != expected:
        wrong.append(f"exit code {code}")
    return wrong


@contextmanager
def _head(wanted: bool, folder: Path) -> Iterator[list[str]]:
    """The options that name a cluster which asks for a token, where one is wanted."""
    if not wanted:
        yield []
        return
    head = Head(Path(sys.executable), {"num_cpus": 2}, folder / "head.log", lambda why: None)
    try:
        yield [f"hydra.launcher.address={head.address}"]
    finally:
        head.close()


def main(names: Sequence[str]) -> int:
    failed = False
    print("| fault | state | seconds | what the user reads |\n|---|---|---|---|", flush=True)
    for name in names or FAULTS:
        with tempfile.TemporaryDirectory(prefix="pth-fault-", ignore_cleanup_errors=True) as folder:
            try:
                outcome = run(name, Path(folder))
            except RuntimeError as error:
                outcome = Outcome("-", "-", 0.0, [str(error)])
            print(f"| {FAULTS[name].title} | {outcome.state} | {outcome.seconds:.0f} | {outcome.message} |", flush=True)
            if outcome.wrong:
                failed = True
                print(f"{name}: {'; '.join(outcome.wrong)}", file=sys.stderr, flush=True)
                kept = Path(tempfile.gettempdir()) / f"pth-fault-{name}"
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(folder, kept, symlinks=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
