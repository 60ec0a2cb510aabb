"""Why a verl job failed, in one sentence: Ray and vLLM say it in sixty lines, which stay in the log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_PROCESS = re.compile(r"class_name: .*?(\w+)$", re.MULTILINE)
_PID = re.compile(r"^\s*pid: (\d+)$", re.MULTILINE)
_DETAIL = re.compile(r"Worker exit detail: ([^.]+)")
_HINTS = {
    "memory": "lower stack.sampler_rows, stack.micro_batch_rows or stack.gpu_memory, or give the run more memory",
    "enginecore": "vLLM's engine has died, or did not start; its own words stand in the log, further up",
    "engine core": "vLLM's engine has died, or did not start; its own words stand in the log, further up",
}


class JobFailed(RuntimeError):
    """The job failed in one of verl's processes."""


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """Raises `JobFailed` from an error that came through Ray; lets any other through."""
    try:
        yield
    except Exception as error:
        if (why := reason(error)) is not None:
            raise JobFailed(why) from error
        raise


def reason(error: BaseException) -> str | None:
    """One sentence about an error that came through Ray; None about any other.

    Of an error raised in another process: its own type and text. Of a process that died: which, and how.
    """
    import ray.exceptions

    chain = [*_causes(error)]
    found = next((e for e in chain if isinstance(e, ray.exceptions.RayError)), None)
    if found is None:
        return None
    if isinstance(found, ray.exceptions.OutOfMemoryError):
        return f"a process was ended because the machine's memory ran out: {_first(found)}; {_HINTS['memory']}"
    root = [*_causes(getattr(found, "cause", None) or found)][-1]
    if isinstance(root, ray.exceptions.RayActorError):
        return _death(str(root))
    said = _told(str(getattr(found, "traceback_str", found)))
    hint = next((hint for word, hint in _HINTS.items() if word in said.lower()), None)
    return f"{said}; {hint}" if hint else said


def _death(text: str) -> str:
    """Of a process, from Ray's description of a dead actor."""
    name, pid, detail = (pattern.search(text) for pattern in (_PROCESS, _PID, _DETAIL))
    who = f"verl's process {name[1]}" if name else "one of verl's processes"
    who += f", pid {pid[1]}," if pid else ""
    how = f": {' '.join(detail[1].split())}" if detail else ""
    return f"{who} died{how}; the kernel ends processes when memory runs out, else the log says why"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:400]


def _told(trace: str) -> str:
    """The error at the end of a remote traceback: its last line that is not indented, with what is indented below it."""
    lines = [line for line in trace.splitlines() if line.strip()]
    start = max((i for i, line in enumerate(lines) if not line[0].isspace()), default=0)
    name, colon, text = " ".join(" ".join(lines[start:]).split()).partition(":")
    return f"{name.rpartition('.')[2]}{colon}{text}"[:400]
