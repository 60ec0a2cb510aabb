"""A user's own losses and arms: a study folder (``./conf`` and ``./my_losses.py``), or an entry point ``pth_exp.extensions``.

Such a module registers its losses with :func:`pth_exp.losses.register` and maps each loss's name to the dataclass of its arms
in ``ARMS``. Its YAML lies in a folder ``conf`` beside it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pth_exp import schema
from pth_exp.refusal import refuse

GROUP = "pth_exp.extensions"
MODULE = "my_losses"


@dataclass(frozen=True, slots=True)
class Study:
    """A study folder: ``conf`` of options and ``my_losses.py``, either of which may be absent."""

    path: Path

    @property
    def losses(self) -> Path:
        return self.path / f"{MODULE}.py"

    @property
    def conf(self) -> Path:
        return self.path / "conf"

    def files(self) -> dict[str, str]:
        """sha256 of each file of the study, by its path in the folder."""
        paths = [*([self.losses] if self.losses.is_file() else []), *sorted(self.conf.rglob("*.yaml"))]
        return {p.relative_to(self.path).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def is_checkout(folder: Path) -> bool:
    """Whether a folder is this project's own source, whose ``conf`` is no study's."""
    return (folder / "pth_exp" / "worker.py").is_file()


def find_study(folder: Path) -> Study | None:
    """The study folder at ``folder``, if it is one."""
    study = Study(folder.resolve())
    if is_checkout(study.path) or not (study.losses.is_file() or study.conf.is_dir()):
        return None
    return study


@functools.cache
def plugin_modules() -> dict[str, ModuleType]:
    """Modules that installed distributions name under the entry-point group, imported."""
    return {e.name: e.load() for e in importlib.metadata.entry_points(group=GROUP)}


def hashes(folder: Path | None = None) -> dict[str, Any]:
    """What a frozen run keeps of the extensions in force: ``study`` (null without one) and ``plugins``."""
    study = find_study(folder or Path.cwd())
    plugins = {name: _file_hash(module) for name, module in sorted(plugin_modules().items())}
    if study is None:
        return {"study": None, "plugins": plugins}
    files = study.files()
    total = hashlib.sha256("".join(f"{name}\0{value}\n" for name, value in sorted(files.items())).encode()).hexdigest()
    return {"study": {"path": str(study.path), "files": files, "sha256": total}, "plugins": plugins}


def _file_hash(module: ModuleType) -> str:
    """Hash of a plug-in's source: of its file, or of every Python file in the package that it belongs to."""
    top = sys.modules[module.__name__.partition(".")[0]]
    if top.__file__ is None or not hasattr(top, "__path__"):
        return hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
    folder, digest = Path(top.__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder).as_posix()}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def arms_of(inputs: Mapping[str, Any], accepted: Mapping[str, str] | None = None) -> dict[str, type[schema.Arm]]:
    """The arms that a frozen run can name. Verifies a study's code before it executes it.

    ``accepted`` are hashes that may stand for the frozen ones, as ``changed`` names them. Raises ``ValueError`` naming both
    hashes when code changed since it was frozen.
    """
    for name, expected, actual in changed(inputs):
        if (accepted or {}).get(name) != actual:
            raise ValueError(f"{name} was frozen with sha256 {expected}, now is {actual}")
    frozen = inputs.get("plugins") or {}
    modules = {name: module for name, module in plugin_modules().items() if name in frozen}
    losses = _losses(inputs)
    return _collect(modules if losses is None else {**modules, str(losses): _load(losses)})


def changed(inputs: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The user's own code that is not as frozen: ``plug-in NAME`` or the path of a study's file, hash before, hash now."""
    modules = plugin_modules()
    for name, expected in (inputs.get("plugins") or {}).items():
        actual = _file_hash(modules[name]) if name in modules else "not installed"
        if actual != expected:
            yield f"plug-in {name}", expected, actual
    if (path := _losses(inputs)) is not None:
        expected = inputs["study"]["files"][path.name]
        actual = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "gone"
        if actual != expected:
            yield str(path), expected, actual


def _losses(inputs: Mapping[str, Any]) -> Path | None:
    """The losses of the study that a run was frozen in."""
    study = inputs.get("study")
    return Path(study["path"]) / f"{MODULE}.py" if study is not None and f"{MODULE}.py" in study["files"] else None


def arms_here(folder: Path) -> dict[str, type[schema.Arm]]:
    """The arms that can be named from ``folder``: built in, plug-ins', and the study's."""
    study = find_study(folder)
    modules = dict(plugin_modules())
    if study is not None and study.losses.is_file():
        modules[str(study.losses)] = _load(study.losses)
    return _collect(modules)


def _collect(modules: Mapping[str, ModuleType]) -> dict[str, type[schema.Arm]]:
    arms = dict(schema.BUILTIN_ARMS)
    for name, module in modules.items():
        for loss, arm in getattr(module, "ARMS", {}).items():
            if loss in arms:
                raise refuse("ARMS", loss, f"{name} names a loss that exists already", "choose another name for it")
            if not (isinstance(arm, type) and issubclass(arm, schema.Arm)):
                raise refuse(
                    "ARMS", loss, f"{name} maps it to {arm!r}", "map it to a dataclass that derives from pth_exp.schema.Arm"
                )
            arms[loss] = arm
    return arms


def _load(path: Path) -> ModuleType:
    """Import a study's module by its path; once in a process, so that its losses register once."""
    loaded = sys.modules.get(MODULE)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[MODULE]
        raise refuse(str(path), "", f"cannot be imported: {type(error).__name__}: {error}", "repair it") from error
    return module


def conf_folders(folder: Path, own: Path) -> list[tuple[str, Path]]:
    """Folders of config groups that extensions bring, by provider. ``own`` is the project's conf.

    Raises :class:`Refusal` if an option of the project's own has the same name as one of theirs, and would hide it.
    """
    study = find_study(folder)
    places = [("study", study.conf)] if study is not None else []
    places += [(name, Path(str(module.__file__)).parent / "conf") for name, module in plugin_modules().items()]
    places = [(name, conf) for name, conf in places if conf.is_dir()]
    for name, conf in places:
        for option in sorted(conf.rglob("*.yaml")):
            if (own / option.relative_to(conf)).is_file():
                raise refuse(
                    str(option), "", f"an option of this name comes with pth-exp and hides the one of {name}", "rename it"
                )
    return places
