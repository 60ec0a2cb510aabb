"""Names of losses, and what all of them have in common: checked input, inert padding, an exact derivative."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from pth_exp.losses.types import LossOutput, TokenBatch, Totals

LossFunction = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
"""A loss as its author writes it: ``f(batch, *, parameter=default, ...) -> (scalar loss, scalar metrics)``."""

F = TypeVar("F", bound=LossFunction)


@dataclass(frozen=True, slots=True)
class _Entry:
    function: LossFunction
    check: Callable[..., None] | None
    splittable: bool | Callable[..., bool]
    defaults: Mapping[str, Any]


_ENTRIES: dict[str, _Entry] = {}


def register(
    *names: str, check: Callable[..., None] | None = None, splittable: bool | Callable[..., bool] = True
) -> Callable[[F], F]:
    """Decorator that puts a loss into the registry under ``names``.

    The function gets a batch that BoundLoss has cleaned: zeros outside the mask, one dtype. Its keyword-only arguments are the
    loss's parameters, all with defaults. ``check(**parameters)`` raises ``ValueError`` for values that make no sense.

    A loss that is a sum over responses divides by ``batch.totals`` where they are given (``aggregate`` and ``response_mean`` do),
    so that over any split of a batch its parts add up. One that is not (it sorts the batch's tokens, or counts what it keeps)
    says ``splittable=False`` and is never given a part; ``splittable(**parameters)`` where a parameter decides it.

    Raises ``ValueError`` for a name that is taken or a parameter without a default.
    """

    def decorate(function: F) -> F:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
        for p in parameters:
            if p.default is inspect.Parameter.empty:
                raise ValueError(f"loss {names[0]}: parameter {p.name!r} has no default")
        for name in names:
            if name in _ENTRIES:
                raise ValueError(f"loss {name!r} is registered already; choose another name")
            _ENTRIES[name] = _Entry(function, check, splittable, {p.name: p.default for p in parameters})
        return function

    return decorate


def loss_names() -> list[str]:
    """Sorted names of all registered losses."""
    return sorted(_ENTRIES)


def get_loss(name: str, **parameters: Any) -> BoundLoss:
    """The loss called ``name`` with its parameters bound.

    Raises ``ValueError`` naming an unknown loss, an unknown parameter, or a parameter's impossible value.
    """
    if name not in _ENTRIES:
        raise ValueError(f"loss {name!r} is not known; known are {', '.join(loss_names())}")
    entry = _ENTRIES[name]
    for unknown in sorted(parameters.keys() - entry.defaults.keys()):
        known = ", ".join(entry.defaults) or "none"
        raise ValueError(f"loss {name!r} has no parameter {unknown!r}; its parameters: {known}")
    bound = {**entry.defaults, **parameters}
    if entry.check is not None:
        try:
            entry.check(**bound)
        except (TypeError, ValueError) as error:
            raise ValueError(f"loss {name!r}: {error}") from error
    splittable = entry.splittable(**bound) if callable(entry.splittable) else entry.splittable
    return BoundLoss(name, bound, entry.function, splittable)


def required(batch: TokenBatch, field: str) -> Tensor:
    """The [B, T] field of a batch that a loss cannot do without.

    Raises ``ValueError`` naming the field: a missing log-probability is never taken for 0.0.
    """
    value: Tensor | None = getattr(batch, field)
    if value is None:
        raise ValueError(f"the batch has no {field}, which the loss reads; have the stack record it, or choose an arm without it")
    return value


@dataclass(frozen=True, slots=True)
class BoundLoss:
    """A loss with its parameters: a pure function of a batch.

    Attributes:
        name: as registered.
        parameters: every parameter's value, defaults included.
        function: the loss as its author wrote it.
        splittable: whether it can be taken over the parts of a batch, given the ``totals`` of the whole.
    """

    name: str
    parameters: Mapping[str, Any]
    function: LossFunction
    splittable: bool = True

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Value, derivative and metrics of the loss.

        ``token_coef`` is the derivative that autograd takes of this very loss, so it cannot disagree with it. The batch's
        ``logp`` may carry a graph, of which nothing is traversed here, or none (under ``no_grad``).

        Raises ``ValueError`` for a field that is missing or of another shape, and for a part of a batch (``totals``) where the
        loss needs all of it.
        """
        if batch.totals is not None:
            self._check_part(batch.mask, batch.totals)
        with torch.enable_grad():
            logp = batch.logp if batch.logp.requires_grad else batch.logp.detach().requires_grad_()
            # An alias of its own, so that hooks on the caller's tensor (``retain_grad`` is one) do not see this derivative.
            logp = logp.view_as(logp)
            loss, metrics = self.function(_clean(dataclasses.replace(batch, logp=logp)), **self.parameters)
            (gradient,) = torch.autograd.grad(loss, logp, retain_graph=True)
        values = torch.stack([v.detach().to(loss.dtype) for v in metrics.values()]).tolist() if metrics else []
        return LossOutput(loss, -gradient, dict(zip(metrics, values, strict=True)))

    def _check_part(self, mask: Tensor, totals: Totals) -> None:
        if not self.splittable:
            raise ValueError(
                f"loss {self.name!r} is no sum over responses: it needs the whole batch, and was given a part of one (totals)"
            )
        part = Totals.of(mask)
        if part.tokens > totals.tokens or part.responses > totals.responses:
            raise ValueError(f"totals are {totals}, below the counts of this part of the batch: {part}")


def _clean(batch: TokenBatch) -> TokenBatch:
    """The batch in the dtype of ``logp``, with zeros wherever no token is; only ``logp`` keeps its graph."""
    logp, mask = batch.logp, batch.mask
    if logp.dim() != 2:
        raise ValueError(f"logp has shape {tuple(logp.shape)}, not [B, T]")
    if mask.dtype != torch.bool or mask.shape != logp.shape:
        raise ValueError(f"mask is {mask.dtype} of shape {tuple(mask.shape)}, not bool of logp's shape {tuple(logp.shape)}")
    if batch.advantage.shape != logp.shape[:1]:
        raise ValueError(f"advantage has shape {tuple(batch.advantage.shape)}, not [B] = {tuple(logp.shape[:1])}")

    def clean(field: str) -> Tensor | None:
        value: Tensor | None = getattr(batch, field)
        if value is None:
            return None
        if value.shape != logp.shape:
            raise ValueError(f"{field} has shape {tuple(value.shape)}, not logp's {tuple(logp.shape)}")
        return value.detach().to(logp.dtype).masked_fill(~mask, 0.0)

    return TokenBatch(
        logp=logp.masked_fill(~mask, 0.0),
        advantage=batch.advantage.detach().to(logp.dtype).masked_fill(~mask.any(dim=1), 0.0),
        mask=mask,
        sampler_logp=clean("sampler_logp"),
        old_logp=clean("old_logp"),
        ref_logp=clean("ref_logp"),
        totals=batch.totals,
    )
