"""Prompts, prompt identity, order and rewards."""

from pth_exp.tasks.base import Problem, Split, Task, TaskError, data_digests, data_fingerprint, load_task

__all__ = ["Problem", "Split", "Task", "TaskError", "data_digests", "data_fingerprint", "load_task"]
