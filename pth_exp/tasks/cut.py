"""Cutting a response before a stop marker, such as a second question that the model writes itself."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CutResponse:
    """A response as it is scored.

    Attributes:
        text: the text before the cut.
        kept: how many leading tokens have a part in ``text``; all of them, the end token included, if nothing was cut.
    """

    text: str
    kept: int


def cut_response(tokens: Sequence[int], decode: Callable[[Sequence[int]], str], markers: Sequence[str]) -> CutResponse:
    """Cut before the first occurrence of any marker.

    A token that begins before the marker is kept even if it reaches into it, since the policy chose the scored text with it.
    """
    text = decode(tokens)
    starts = [at for at in (text.find(marker) for marker in markers) if at >= 0]
    if not starts:
        return CutResponse(text, len(tokens))
    cut = min(starts)
    kept = bisect.bisect_left(range(len(tokens)), cut, key=lambda n: len(decode(tokens[:n])))
    return CutResponse(text[:cut], kept)
