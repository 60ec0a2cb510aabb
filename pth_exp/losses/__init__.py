"""Losses: pure functions of a TokenBatch, and their registry."""
