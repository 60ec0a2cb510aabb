"""Comparisons of reinforcement-learning methods for language models under stale data, with the harness made visible."""

__version__ = "0.1.0"
