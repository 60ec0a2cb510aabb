"""Policies: where weights come from, and the embedded model."""
