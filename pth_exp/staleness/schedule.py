"""Which version of the learner's weights generated the data of an update, and how old that makes the data.

Updates count from 0; version v means the weights after v updates. The sampler takes the learner's weights before every update
that is a multiple of the refresh interval N, and an update trains on a batch generated k updates earlier (the replay age).
"""

from __future__ import annotations


def refreshes_at(update: int, refresh_interval: int) -> bool:
    """Whether the sampler takes the learner's weights before it generates at ``update``."""
    _check(update, 0, refresh_interval)
    return update % refresh_interval == 0


def sampler_version(update: int, replay_age: int, refresh_interval: int) -> int:
    """Version of the weights that generated the batch on which ``update`` trains, in updates.

    With g = max(0, update - k), the version is floor(g / N) N. It is the same for both queues, and with ``replay_age=0`` it is
    the version of the sampler that generates at ``update``.

    Raises ``ValueError`` for a negative update or age, or an interval below 1.
    """
    _check(update, replay_age, refresh_interval)
    generated = max(0, update - replay_age)
    return generated // refresh_interval * refresh_interval


def data_age(update: int, replay_age: int, refresh_interval: int) -> int:
    """Age of the data on which ``update`` trains: update - version, in updates."""
    return update - sampler_version(update, replay_age, refresh_interval)


def _check(update: int, replay_age: int, refresh_interval: int) -> None:
    for name, value, least in (("update", update, 0), ("replay_age", replay_age, 0), ("refresh_interval", refresh_interval, 1)):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
