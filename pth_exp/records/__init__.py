"""The one record format: rows that a run writes and everything else reads."""
