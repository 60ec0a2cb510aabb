"""Ray's errors in one sentence; the errors are Ray's own, the texts as Ray 2.60 gives them."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="pip install 'pth-exp[ray]'")

from ray import exceptions

from pth_exp.verl_stack.reasons import JobFailed, in_one_sentence, reason

VALIDATION = """ray::Server.launch_server() (pid=14146, ip=127.0.0.1)
  File "verl/workers/rollout/vllm_rollout/vllm_async_server.py", line 477, in launch_server
    await self.run_server(server_args)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig
  Value error, max_num_batched_tokens (1) must be greater than or equal to max_num_seqs (256).
"""
NESTED = """ray::WorkerDict.update() (pid=1)
  File "a.py", line 1, in update
    ray.get(other)
ray.exceptions.RayTaskError(ValueError): ray::Other.call() (pid=2)
  File "b.py", line 2, in call
    raise ValueError("rows are missing")
ValueError: rows are missing
"""
DEAD = """The actor died unexpectedly before finishing this task.
\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict
\tactor_id: 1c1e
\tpid: 11233
\tname: abcWorkerDict_0:0
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly
 exits with a connection error code 2. End of file. There are some potential root causes."""


class Died(exceptions.RayActorError):
    def __str__(self) -> str:
        return DEAD


def _remote(trace: str, cause: Exception) -> exceptions.RayTaskError:
    return exceptions.RayTaskError("function", trace, cause)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            _remote(VALIDATION, exceptions.RayError("Exception ValidationError isn't serializable")),
            "ValidationError: 1 validation error for SchedulerConfig Value error, max_num_batched_tokens (1) must be greater "
            "than or equal to max_num_seqs (256).",
        ),
        (_remote(NESTED, ValueError("rows are missing")), "ValueError: rows are missing"),
        (
            Died(),
            "verl's process WorkerDict, pid 11233, died: Worker unexpectedly exits with a connection error code 2; the kernel "
            "ends processes when memory runs out, else the log says why",
        ),
        (ValueError("rows are missing"), None),
    ],
)
def test_an_error_of_rays_is_one_sentence(error: Exception, says: str | None) -> None:
    assert reason(error) == says


def test_a_death_behind_other_errors_is_the_reason() -> None:
    """A task that fails because the actor which it calls is dead; verl's own error on top of it."""
    with pytest.raises(JobFailed, match="verl's process WorkerDict, pid 11233, died"), in_one_sentence():
        try:
            raise _remote(NESTED, Died())
        except Exception as error:
            raise RuntimeError("samples are missing") from error
    with pytest.raises(ValueError, match="not through Ray"), in_one_sentence():
        raise ValueError("not through Ray")


def test_a_memory_error_says_what_to_lower() -> None:
    trace = "ray::WorkerDict.update() (pid=1)\n  File 'a.py', line 1\nRuntimeError: DefaultCPUAllocator: can't allocate memory"
    assert reason(_remote(trace, RuntimeError("x"))) == (
        "RuntimeError: DefaultCPUAllocator: can't allocate memory; lower stack.sampler_rows, stack.micro_batch_rows or "
        "stack.gpu_memory, or give the run more memory"
    )
