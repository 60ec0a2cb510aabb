"""A worker's exit codes: its whole answer to the place that started it, beside the run's directory."""

from typing import Final

COMPLETED: Final = 0
FAILED: Final = 1
REFUSED: Final = 2
"""The input is wrong, or the run is completed already."""

PREEMPTED: Final = 3
"""Stopped at an update, with a checkpoint."""

HELD: Final = 4
"""Another worker has the run."""
