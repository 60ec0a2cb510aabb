"""How vLLM was told to sample, in the project's terms and in verl's. Runs in verl's environment."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="not verl's environment: make verl")

from vllm import SamplingParams

from pth_exp.losses import get_loss
from pth_exp.losses import ppo as ppo_module
from pth_exp.verl_stack.received import _sampled, _training, _verls_sampling
from pth_exp.verl_stack.vllm_server import Sampling

GREEDY = Sampling.of(SamplingParams(temperature=0, max_tokens=24))
DRAWN = Sampling.of(SamplingParams(temperature=0.7, max_tokens=24, seed=3))


def test_what_vllms_own_object_holds_is_told() -> None:
    assert _sampled([GREEDY, DRAWN]) == {"temperature": 0.7, "max_response_tokens": 24}
    assert DRAWN.seeded and not GREEDY.seeded
    held = {name.rpartition(".")[2]: value for name, value in _verls_sampling([DRAWN]).items()}
    assert held == {"temperature": 0.7, "top_p": 1.0, "top_k": -1}
    cut = Sampling.of(SamplingParams(temperature=1, top_p=0.9, top_k=5))
    held = {name.rpartition(".")[2]: value for name, value in _verls_sampling([cut]).items()}
    assert held == {"temperature": 1.0, "top_p": 0.9, "top_k": 5}


def test_before_anything_was_drawn_nothing_is_told() -> None:
    assert _sampled([GREEDY]) == _verls_sampling([]) == {} and _training([GREEDY]) is None


def test_two_ways_of_drawing_training_responses_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="2 ways"):
        _training([DRAWN, DRAWN._replace(temperature=0.8)])


def test_a_losss_source_is_the_file_that_it_is_written_in() -> None:
    from pth_exp.verl_stack.workers import source_of

    written = Path(str(ppo_module.__file__)).read_bytes()
    assert source_of(get_loss("ppo_clip").function) == hashlib.sha256(written).hexdigest()
