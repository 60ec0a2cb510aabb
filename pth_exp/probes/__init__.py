"""Probes: pure functions that measure what defines a comparison, in either stack."""

from pth_exp.probes.batches import batch_id, generation_id, ratio_histogram
from pth_exp.probes.equation import is_due, probe_backward, probe_equation
from pth_exp.probes.shadows import Shadow, shadow_pairs
from pth_exp.probes.update import probe_update

__all__ = [
    "Shadow",
    "batch_id",
    "generation_id",
    "is_due",
    "probe_backward",
    "probe_equation",
    "probe_update",
    "ratio_histogram",
    "shadow_pairs",
]
