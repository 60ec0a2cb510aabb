"""Where a model's files are, and what they hash to. Imports neither torch nor transformers."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pth_exp import schema

EMBEDDED = "embedded"
SMOLLM2 = "smollm2_135m"
EMBEDDED_FOLDER = Path(__file__).parent / "embedded"

MODEL_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "chat_template.*",
)
"""With ``MODEL_FILES`` all that a run reads: no code, no pickles, no generation_config.json."""


class ModelError(ValueError):
    """A model that cannot be had as configured; the message names the field, its value and the remedy."""


def resolve(config: schema.ModelConfig) -> Path:
    """The folder with the model's files, fetched or converted first if need be.

    ``model.path`` is ``embedded``, ``smollm2_135m``, a folder, or the name of a model on the hub. What is written like a path
    (``./x``, ``~/x``, ``/x``) or exists as a folder is a folder. Raises ``ModelError``.
    """
    if config.path == EMBEDDED:
        return EMBEDDED_FOLDER
    if config.path == SMOLLM2:
        from pth_exp.models.smollm2 import converted

        return converted()
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return _checked(folder, config.path)
    if config.path.startswith((".", "/", "~")) or config.path.count("/") > 1:
        raise ModelError(f"model.path: there is no folder {config.path!r} (looked at {folder.absolute()}); {_REMEDY}")
    return _checked(_from_hub(config.path, config.revision), config.path)


def files(config: schema.ModelConfig) -> tuple[dict[str, str], dict[str, str]]:
    """sha256 of each of the model's files (configuration and weights) and of the tokenizer's. Raises ``ModelError``."""
    folder = resolve(config)
    model, tokenizer = (
        {path.name: file_digest(path) for path in _matching(folder, names)} for names in (MODEL_FILES, TOKENIZER_FILES)
    )
    return model, tokenizer


def fingerprint(config: schema.ModelConfig) -> tuple[str, str]:
    """sha256 of the model's files and of the tokenizer's, names included. Raises ``ModelError``."""
    model, tokenizer = map(_digest, files(config))
    return model, tokenizer


_REMEDY = "give a folder with config.json, *.safetensors and the tokenizer, a hub name, or model=embedded"


def _checked(folder: Path, value: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path: {value!r} has no config.json (looked in {folder}); {_REMEDY}")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"model.path: {value!r} has no *.safetensors (looked in {folder}); other formats are not read, "
            "since they can run code: convert the weights with save_pretrained"
        )
    return folder


def _from_hub(name: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=[*MODEL_FILES, *TOKENIZER_FILES]))
    except errors.GatedRepoError as error:
        raise ModelError(
            f"model.path: {name!r} is gated; accept its licence on the hub and set the variable HF_TOKEN, or {_REMEDY}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"model.revision: {revision!r} is not a commit, branch or tag of {name!r}; give one, or null for main"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"model.path: {name!r} is neither a folder here nor a model on the hub; {_REMEDY}") from error
    except errors.HFValidationError as error:
        raise ModelError(f"model.path: {name!r} is neither a folder here nor a possible hub name; {_REMEDY}") from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path: {name!r} is no folder here and the hub cannot be reached ({type(error).__name__}); "
            f"check the connection, or {_REMEDY}"
        ) from error


def _digest(files: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(f"{name}\0{digest}\n" for name, digest in files.items()).encode()).hexdigest()


def _matching(folder: Path, patterns: Sequence[str]) -> Iterable[Path]:
    files = (path for path in folder.iterdir() if path.is_file())
    return sorted(path for path in files if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns))


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    stat = path.stat()
    return _digest_once(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache
def _digest_once(path: Path, size: int, modified_ns: int) -> str:
    """Kept by size and time, since a sweep freezes many runs of one model and weights may be gigabytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
