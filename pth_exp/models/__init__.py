"""Initial policies: the embedded one, a small pretrained one, local folders and the hub."""

from pth_exp.models.resolve import ModelError, files, fingerprint, resolve

__all__ = ["ModelError", "files", "fingerprint", "resolve"]
