"""What stops a sweep before anything starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Objection:
    """One thing that is wrong with what was asked for.

    Attributes:
        field: dotted name of the field, or of the option.
        value: what it was set to, as text.
        why: what is wrong with it.
        remedy: what to do instead.
    """

    field: str
    value: str
    why: str
    remedy: str

    def __str__(self) -> str:
        value = f"={self.value}" if self.value else ""
        return f"{self.field}{value}: {self.why}\n    remedy: {self.remedy}"


def objection(text: str) -> Objection:
    """An error's text of the form ``field: why; remedy`` as an objection."""
    field, _, message = text.partition(": ")
    why, _, remedy = message.partition("; ")
    return Objection(field, "", why, remedy or "correct it")


class Refusal(Exception):
    """Raised before any run starts; the command ends with exit code 2."""

    def __init__(self, objections: Iterable[Objection], where: str = "") -> None:
        self.objections = list(objections)
        self.where = where
        super().__init__("\n".join([*([f"in {where}:"] if where else []), *map(str, self.objections)]))


def refuse(field: str, value: object, why: str, remedy: str) -> Refusal:
    """A refusal with a single objection."""
    return Refusal([Objection(field, str(value), why, remedy)])
