"""Numpy references, for losses that the language cannot say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pth_exp.equations import Evaluation, WrittenBatch, evaluate, parse, reference, references


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "REFERENCES", dict(references.REFERENCES))
    monkeypatch.setattr("pth_exp.equations.evaluator.REFERENCES", references.REFERENCES)


def test_a_reference_gets_the_batch_and_the_parameters() -> None:
    @reference("median_for_this_test")
    def median(batch: WrittenBatch, parameters: Mapping[str, Any]) -> Evaluation:
        """Scale times the middle log-probability of the batch, which takes sorting."""
        middle = np.argsort(batch.logp)[len(batch.logp) // 2]
        gradient = np.zeros_like(batch.logp)
        gradient[middle] = parameters["scale"]
        return Evaluation(float(parameters["scale"] * batch.logp[middle]), gradient)

    batch = WrittenBatch([2, 1], [1.0, 1.0], [-3.0, -1.0, -2.0])
    got = evaluate(parse('loss = reference("median_for_this_test")'), batch, {"scale": 2.0})
    assert (got.value, got.gradient.tolist()) == (-4.0, [0.0, 0.0, 2.0])


def test_a_name_is_taken_once() -> None:
    reference("once_for_this_test")(lambda batch, parameters: Evaluation(0.0, batch.logp))
    with pytest.raises(ValueError, match="once_for_this_test"):
        reference("once_for_this_test")(lambda batch, parameters: Evaluation(0.0, batch.logp))


def test_an_unknown_one_is_named_with_the_nearest() -> None:
    reference("once_for_this_test")(lambda batch, parameters: Evaluation(0.0, batch.logp))
    with pytest.raises(ValueError, match="'once_for_that_test' is not registered, did you mean once_for_this_test"):
        evaluate(parse('loss = reference("once_for_that_test")'), WrittenBatch([1], [1.0], [-1.0]), {})


def test_equations_import_neither_losses_nor_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, pth_exp.equations; print(sorted(m for m in sys.modules if m == 'torch' or m.startswith('pth_exp.losses')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
