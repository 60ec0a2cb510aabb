"""The single-GPU stack."""
