"""The task's problems as a data set of verl's, in file order; verl's own sampler shuffles them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from pth_exp.tasks import Problem, Split, load_task
from pth_exp.tasks.order import evaluation_subset
from pth_exp.tasks.prompts import render
from pth_exp.verl_stack.frozen import frozen_config


def problems_of(split: str) -> list[Problem]:
    """The training split, or of the test split the fixed evaluation subset."""
    config = frozen_config()
    problems = load_task(config.task).problems(Split(split))
    if split == Split.train:
        return list(problems)
    return evaluation_subset(problems, config.validation.problems, config.seeds.eval)


class ProblemDataset(Dataset[dict[str, Any]]):
    """What verl makes a data set of: ``data.train_files`` and ``data.val_files`` name a split."""

    def __init__(self, data_files: str, tokenizer: Any, processor: Any, config: Any, max_samples: int = -1) -> None:
        self._problems = problems_of(data_files)
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, place: int) -> dict[str, Any]:
        config, problem = frozen_config(), self._problems[place]
        return {
            "index": place,
            "raw_prompt": problem.prompt,
            "prompt_tokens": render(problem, self._tokenizer, config.task, config.max_prompt_tokens),
            "data_source": config.task.name,
        }
