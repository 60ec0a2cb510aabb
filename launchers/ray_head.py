"""A Ray head of the launcher's own, on this machine's loopback, and the process that keeps it.

``python -P -m pth_exp.launchers.ray_head '{"num_cpus": 2, ...}'`` starts the head as its child, says on standard output where it
is, and ends it when its standard input closes: the launcher is done, or gone, however it went. The keeper runs in the stack's
interpreter, because Ray wants the head's version and Python to be those of the processes that join it.

Every process of the head has the keeper's mark in its environment, and so have the workers that it starts. What Ray does not
end itself is found by the mark.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pth_exp import marked

MARK = "PTH_RAY_HEAD"
START_SECONDS = 300.0
"""On a machine with two busy cores a head has taken 70 s."""
ATTEMPTS = 3
"""Ray gives its raylet 30 s to start and then gives up."""
_UP = "Ray runtime started"
"""What ``ray start`` prints when the head's processes have found each other."""
LAST_UPDATE_SECONDS = 60.0
"""What workers get to end their update in when the launcher is gone."""


class HeadFailed(RuntimeError):
    """The head did not start; the message says why."""


class Head:
    """A running head, from the launcher's side. Raises `HeadFailed`.

    Args:
        python: interpreter of the head.
        settings: options of ``ray start``: num_cpus, num_gpus, object_store_memory (bytes).
        log: file that what Ray prints is appended to.
        ended: called once, from a thread, with the reason when the head ends before it was asked to.

    Attributes:
        address: of the dashboard, which serves the Jobs API.
        token: that it asks for, so that no other user of the machine can run jobs here.
    """

    def __init__(self, python: Path, settings: Mapping[str, Any], log: Path, ended: Callable[[str], None]) -> None:
        self.token = secrets.token_hex(16)
        self._mark, self._ended, self._closing = secrets.token_hex(8), ended, False
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")},
            MARK: self._mark,
            "SPT_NOENV": "1",  # processes that rename themselves keep the environment that they are found by
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what makes Ray stay on loopback
        }
        with log.open("ab") as file:
            self._keeper = subprocess.Popen(
                [str(python), "-P", "-m", "pth_exp.launchers.ray_head", json.dumps(dict(settings))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the launcher alone
            )
        said: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, args=(said,), name="ray head", daemon=True)
        self._listener.start()
        try:
            first = said.get(timeout=START_SECONDS)
        except queue.Empty:
            first = {"ended": f"it was not up within {START_SECONDS:g} s"}
        except BaseException:
            self.close()
            raise
        if "ended" in first:
            self.close()
            raise HeadFailed(f"the Ray head did not start: {first['ended']}; see {log}")
        self.address = first["address"]

    def close(self) -> None:
        """End the head and everything that it has started."""
        self._closing = True
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(LAST_UPDATE_SECONDS + 30.0)
        segments = marked.end(lambda: marked.processes(MARK, self._mark))
        self._keeper.wait()
        marked.remove(segments)
        self._listener.join()

    def _listen(self, said: queue.SimpleQueue[dict[str, str]]) -> None:
        assert self._keeper.stdout is not None
        last: dict[str, str] = {}
        with self._keeper.stdout as lines:
            for line in lines:
                last = json.loads(line)
                said.put(last)
        reason = last.get("ended", f"its keeper, pid {self._keeper.pid}, is gone")
        said.put({"ended": reason})
        if not self._closing:
            self._ended(reason)


# ------------------------------------------------------------------------------------------------------------ the keeper


def main(settings: Mapping[str, Any]) -> int:
    """Keep a head until standard input closes, or until it breaks."""

    def say(**what: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            print(json.dumps(what), flush=True)

    scratch = tempfile.mkdtemp(prefix="pth-ray-", dir=_short(tempfile.gettempdir()))
    mark = os.environ[MARK]
    os.environ["TMPDIR"] = scratch
    try:
        try:
            ray, address, printed = _start(settings, scratch)
        except (OSError, RuntimeError) as error:
            say(ended=str(error))
            return 1
        say(address=address)
        broken = _watch(ray, printed)
        if broken:
            say(ended=broken)
        _end_workers(mark, 0.0 if broken else LAST_UPDATE_SECONDS)
        return int(bool(broken))
    finally:
        marked.remove(marked.end(lambda: marked.processes(MARK, mark, Path(scratch))))
        shutil.rmtree(scratch, ignore_errors=True)


def _start(settings: Mapping[str, Any], scratch: str) -> tuple[subprocess.Popen[bytes], str, Path]:
    """``ray start``, its dashboard's address, and the file of what it prints. Raises RuntimeError with Ray's own last words."""
    for attempt in range(ATTEMPTS):
        printed, address = Path(scratch) / f"{attempt}.txt", f"http://127.0.0.1:{_free_port()}"
        client = _free_port()
        options = {
            **settings,
            "port": 0,
            "dashboard_port": address.rpartition(":")[2],
            "dashboard_agent_listen_port": 0,  # Ray's own choice may be another cluster's, and jobs then find no agent
            "ray_client_server_port": client,
            "node_ip_address": "127.0.0.1",
            "dashboard_host": "127.0.0.1",
            "include_dashboard": "true",
            "temp_dir": f"{scratch}/{attempt}",
        }
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        with printed.open("wb") as file:
            ray = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "ray.scripts.scripts",
                    "start",
                    "--head",
                    "--block",
                    "--disable-usage-stats",
                    "--log-color=false",
                    *words,
                ],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,  # and the head's processes die with theirs
            )
        # each of them may still fail, and end the head
        while ray.poll() is None and not (_UP in printed.read_text(errors="replace") and _listens(client) and _answers(address)):
            time.sleep(0.1)
        if ray.poll() is None:
            return ray, address, printed
        sys.stderr.write(printed.read_text(errors="replace"))
        marked.remove(marked.end(lambda: marked.processes(MARK, os.environ[MARK])))
    raise RuntimeError(printed.read_text(errors="replace").strip().rpartition("\n")[2] or f"ray start ended by {ray.returncode}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def _answers(address: str) -> bool:
    """Whether the dashboard there is up, and takes this head's token."""
    asked = urllib.request.Request(f"{address}/api/version", headers={"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _watch(ray: subprocess.Popen[bytes], printed: Path) -> str | None:
    """Wait until the launcher is done or gone (None), or a process of the head ends (which)."""
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 0.2)
        if readable and not os.read(sys.stdin.fileno(), 1):
            return None
        if ray.poll() is not None:
            said = printed.read_text(errors="replace")
            sys.stderr.write(said)
            dead = re.findall(r"(\w+) \[exit code=(-?\d+)\]", said)
            return (
                ", ".join(f"{name} ended by {_how(int(code))}" for name, code in dead) or f"ray start ended by {ray.returncode}"
            )


def _how(code: int) -> str:
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


def _end_workers(mark: str, seconds: float) -> None:
    """Ask the workers that still run to stop at their next update, and give them so long."""

    def workers() -> list[int]:
        return [pid for pid in marked.processes(MARK, mark) if b"pth_exp.worker" in _command(pid)]

    for pid in workers():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while workers() and time.monotonic() < deadline:
        time.sleep(0.1)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _short(folder: str) -> str:
    """Ray's sockets lie below it, and their paths may have 107 bytes."""
    return folder if len(folder) < 20 else "/tmp"


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
