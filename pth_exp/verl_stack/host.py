"""Runs verl's trainer in the worker's own process: the lease, the recorder and the signals are where the trainer is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from pth_exp import leftovers, machine
from pth_exp.checkpoint import CheckpointStore
from pth_exp.freeze import FILE, HASH_FILE, FrozenError
from pth_exp.records.writer import RunRecorder
from pth_exp.schema import Config, VerlStack
from pth_exp.sections import Loader
from pth_exp.verl_stack import cluster, frozen, reasons, switch
from pth_exp.verl_stack.watchdog import Watchdog, watching

VERL_FILE = "verl.yaml"
"""verl's config, frozen beside the run's."""
RECEIVED_VERL = "received_verl.yaml"
"""The same as the job holds it: a file of its own, since its thousand lines would bury the fifty that `received.yaml` has."""


def run(config: Config, recorder: RunRecorder, checkpoints: Path, should_stop: Callable[[], bool]) -> str:
    """Trains as ``config`` says, from the newest checkpoint if there is one; returns ``completed`` or ``preempted``."""
    from pth_exp.verl_stack.places import places

    stack = frozen.verl_stack(config)
    run_dir = checkpoints.parent
    device = _device(stack.device, cluster.address(stack) is not None)
    verl = _load(run_dir)
    with leftovers.scratch(run_dir, "pth-verl-") as scratch:
        environment = _environment(run_dir, stack, device) | {"TMPDIR": str(scratch)}
        os.environ.update(environment)
        with watching() as watchdog:
            watchdog.allow(stack.start_timeout, "the start", "stack.start_timeout")
            with cluster.joined(stack, device, environment, scratch, watchdog) as layout, reasons.in_one_sentence():
                return _train(config, verl, places(config, checkpoints, layout), recorder, checkpoints, should_stop, watchdog)


def _train(
    config: Config,
    frozen_verl: dict[str, Any],
    here: dict[str, Any],
    recorder: RunRecorder,
    checkpoints: Path,
    should_stop: Callable[[], bool],
    watchdog: Watchdog,
) -> str:
    import transfer_queue
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ

    from pth_exp.models.load import load_tokenizer
    from pth_exp.verl_stack import vllm_server
    from pth_exp.verl_stack.data import problems_of
    from pth_exp.verl_stack.places import put
    from pth_exp.verl_stack.received import received, whole
    from pth_exp.verl_stack.recording import Recording
    from pth_exp.verl_stack.trainer import LaggedTrainer, Preempted

    stack = frozen.verl_stack(config)
    verl = OmegaConf.create(frozen_verl)
    put(verl, here)
    vllm_server.use()
    recording = Recording(config, recorder, problems_of("train"), problems_of("test"), load_tokenizer(config.model))

    begun: list[int] = []

    def before_update(update: int) -> None:
        if should_stop():
            raise Preempted
        if len(begun) == 1:  # vLLM has sampled by now, and its requests tell how
            recorder.received(received(config, trainer, here))
        begun.append(update)
        watchdog.allow(stack.update_timeout, f"update {update}")

    transfer_queue.init(verl.transfer_queue)
    try:
        store = CheckpointStore(checkpoints, stack.keep_checkpoints, recorder.settle)
        trainer = LaggedTrainer(verl, config, recording, before_update, store)
        trainer.init()
        leftovers.note_segments(checkpoints.parent, cluster.segments())
        manager = AgentLoopManagerTQ.create(
            config=verl,
            llm_client=trainer.get_llm_client(),
            teacher_client=None,
            reward_loop_worker_handles=trainer.get_reward_handles(),
        )
        recorder.received(whole(trainer), RECEIVED_VERL)
        recorder.received(received(config, trainer, here))
        recorder.equation({"update": int(trainer.global_steps), **trainer.actor_rollout_wg.equation()[0]})
        watchdog.allow(stack.update_timeout, "the first validation")
        trainer.fit(manager)
        recorder.received(received(config, trainer, here))
    except Preempted:
        return "preempted"
    finally:
        transfer_queue.close()
    return "completed"


def _load(run_dir: Path) -> dict[str, Any]:
    """verl's config as it was frozen; the worker has verified it. Raises ``FrozenError`` for a run that was frozen without."""
    try:
        values: dict[str, Any] = yaml.load((run_dir / VERL_FILE).read_bytes(), Loader)
    except FileNotFoundError:
        raise FrozenError(f"{run_dir / VERL_FILE}: not there; freeze the run again with `pth run`") from None
    return values


def _device(name: str, on_cluster: bool = False) -> str:
    """cpu or cuda. On a cluster that the job joins, this process may see no GPU while the cluster has some."""
    gpus = bool(machine.visible_gpus())
    if name == "auto":
        return "cuda" if gpus else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"stack.device: {name!r} is not one of auto, cpu, cuda")
    if name == "cuda" and not gpus and not on_cluster:
        raise ValueError("stack.device=cuda, and no GPU is visible; use stack.device=auto or cpu")
    return name


def _environment(run_dir: Path, stack: VerlStack, device: str) -> dict[str, str]:
    """Variables that every process of the job gets."""
    common = {
        frozen.PATH: str((run_dir / FILE).absolute()),
        frozen.SHA256: (run_dir / HASH_FILE).read_text().strip(),
        "HYDRA_FULL_ERROR": "1",
        "SPT_NOENV": "1",  # processes that rename themselves keep the environment that they are found by
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the weights were resolved and hashed before the run
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(stack.threads),
        "TQ_NUM_THREADS": str(stack.threads),  # verl's queue takes 8, and warns at every call on a machine with fewer cores
    }
    if device != "cpu":
        return common
    return common | {
        switch.SWITCH: "1",
        "VERL_PLATFORM": "cpu",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
