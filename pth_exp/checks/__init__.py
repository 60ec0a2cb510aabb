"""The checks: one module each, named for what it measures."""
