"""Hydra discovers launchers and sweepers only here; the work is done in :mod:`pth_exp.launchers`."""
