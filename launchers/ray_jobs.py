"""Ray's Jobs API as a place needs it: every call bounded in time, every failure told in one line."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

_CALL_SECONDS = 60.0
"""A cluster whose head has died answers a call after a minute, if ever."""
_OVERRIDES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
"""Variables that Ray's client takes its address from, whatever it is given."""


class NotConnected(RuntimeError):
    """The cluster cannot be reached, or does not want this client.

    Attributes:
        token: whether the token is what is wrong.
    """

    def __init__(self, message: str, token: bool = False) -> None:
        super().__init__(message)
        self.token = token


@dataclass(frozen=True, slots=True)
class Report:
    """What Ray says of a job: its status (PENDING, RUNNING, SUCCEEDED, FAILED, STOPPED), one line, its driver's exit code."""

    status: str
    message: str
    exit_code: int | None

    @property
    def ended(self) -> bool:
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")


class Jobs:
    """The Jobs API at ``address``. Raises `NotConnected` within ``seconds``."""

    def __init__(self, address: str, token: str | None, seconds: float) -> None:
        self.address = address
        headers = {"Authorization": f"Bearer {token}"} if token else None
        try:
            with _without(_OVERRIDES):
                self._client = bounded(seconds, lambda: _client(address, headers))
        except TimeoutError as error:
            raise NotConnected(str(error)) from None
        except Exception as error:
            if type(error).__name__ == "AuthenticationError":
                raise NotConnected(_line(error), token=True) from None
            raise NotConnected(_line(error)) from None

    def submit(self, job_id: str, entrypoint: str, variables: Mapping[str, str], need: Mapping[str, Any], run: str) -> None:
        """Raises RuntimeError when Ray does not take the job, TimeoutError when it does not answer."""
        bounded(
            _CALL_SECONDS,
            lambda: self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=job_id,
                runtime_env={"env_vars": dict(variables)},
                metadata={"run": run},
                **{f"entrypoint_{name}": value for name, value in need.items()},
            ),
        )

    def report(self, job_id: str) -> Report:
        info = bounded(_CALL_SECONDS, lambda: self._client.get_job_info(job_id))
        return Report(info.status.value, _line(info.message or ""), info.driver_exit_code)

    def taken(self) -> set[str]:
        """Ids of every job that the cluster knows; Ray takes none of them a second time. Raises `NotConnected`."""
        return {job.submission_id for job in self._patiently(self._client.list_jobs) if job.submission_id}

    def log(self, job_id: str) -> str:
        """What Ray kept of the job's output: a shell that could not start the worker."""
        try:
            return str(bounded(_CALL_SECONDS, lambda: self._client.get_job_logs(job_id)))
        except Exception as error:
            return f"(no log: {_line(error)})"

    def stop(self, job_id: str) -> None:
        """Have Ray end the job: SIGTERM, and SIGKILL three seconds later (RAY_JOB_STOP_WAIT_TIME_S)."""
        bounded(_CALL_SECONDS, lambda: self._client.stop_job(job_id))

    def resources(self) -> dict[str, float]:
        """What the cluster has in all: CPU, GPU, memory in bytes, and resources of its own. Raises `NotConnected`."""
        answer = self._patiently(lambda: self._client._do_request("GET", "/api/cluster_status").json())
        usage = answer["data"]["clusterStatus"]["loadMetricsReport"]["usage"]
        return {name: float(total) for name, (_, total) in usage.items() if not name.startswith("node:")}

    def _patiently(self, call: Callable[[], T]) -> T:
        """Ask again when a connection breaks: a head that has just come up, or is busy, drops some."""
        deadline = time.monotonic() + _CALL_SECONDS
        while True:
            try:
                return bounded(_CALL_SECONDS, call)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise NotConnected(f"Ray at {self.address} does not answer: {_line(error)}") from None
                time.sleep(0.5)


def bounded(seconds: float, call: Callable[[], T]) -> T:
    """The call's answer. Raises its exception, or TimeoutError; a call that hangs goes on in a thread that holds nothing up."""
    answers: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

    def answer() -> None:
        try:
            value = call()
        except BaseException as error:
            answers.put(lambda error=error: _raise(error))  # type: ignore[misc]
        else:
            answers.put(lambda: value)

    threading.Thread(target=answer, name="ray client", daemon=True).start()
    try:
        return answers.get(timeout=seconds)()
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None


def _raise(error: BaseException) -> Any:
    raise error


def _client(address: str, headers: dict[str, str] | None) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(address, headers=headers)


def _line(error: object) -> str:
    """The first line of what Ray says, which often says sixty."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""


@contextmanager
def _without(names: tuple[str, ...]) -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
