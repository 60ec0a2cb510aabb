"""Where a run's numbers go besides its records. Nothing here can stop a run, or slow it.

The records are the source, so both stacks are tracked by the same code. What needs a library runs in a process of its own, which
reads the records as they are written (`pth_exp.tracking.beside`): it needs no queue, and may fail, hang or be killed unseen by
the run. Each attempt sends the whole run under the run's one name, so a step is never there twice, however often it resumed.
"""

from __future__ import annotations

from pth_exp.tracking.backends import BACKENDS, requirement, separate

__all__ = ["BACKENDS", "requirement", "separate"]
