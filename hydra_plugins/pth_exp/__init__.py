"""The shim through which Hydra discovers this project: launcher and sweeper, import-light."""
