"""Whether this process is part of a run of verl on a CPU. Every verl and vLLM loads the plug-ins; without this they are inert."""

from __future__ import annotations

import os

SWITCH = "PTH_VERL_CPU"


def on_cpu() -> bool:
    return os.environ.get(SWITCH) == "1"
