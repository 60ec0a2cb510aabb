"""Prompts, their identity and order, and rewards."""
