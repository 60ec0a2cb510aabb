"""``pth doctor``: what each stack needs, what is there in which version, the command that installs what is missing; and SLURM."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from pth_exp import freeze, machine
from pth_exp.interpreters import INSTALL, NoInterpreter, interpreter
from pth_exp.launchers import slurm_client

PROJECT = "pth-exp"
EXTRAS = ("gguf", "smollm2", "8bit", "ray", "slurm", "wandb")
VERL_NEEDS = ("verl>=0.9.1,<0.10", "vllm>=0.24", "ray>=2.41", "tensordict>=0.10", "TransferQueue>=0.1.10", "torch>=2.9", PROJECT)
"""What the stack is written for and has run with; the environment's own pins are in constraints-verl.txt."""
VERL_TAKES = ("wandb>=0.31",)
"""What a run there may be asked for besides."""

_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in json.loads(sys.argv[1]):
    try: found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: pass
try: from pth_exp.freeze import source_hash; source = source_hash()
except Exception as error: source = None
print(json.dumps({"python": sys.version.split()[0], "versions": found, "source": source}))
"""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that is needed: ``state`` is present, missing, old (another version than asked for) or optional (absent)."""

    name: str
    wanted: str
    found: str | None
    state: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """One stack's interpreter and what it holds; ``python`` is None where the stack has none here."""

    stack: str
    python: str | None
    items: tuple[Item, ...]

    @property
    def complete(self) -> bool:
        return all(item.state in ("present", "optional") for item in self.items)


def trainer_environment() -> Environment:
    """This interpreter, held against the project's own requirements."""
    items = []
    for text in importlib.metadata.requires(PROJECT) or ():
        wanted = Requirement(text)
        extra = next((e for e in EXTRAS if wanted.marker and wanted.marker.evaluate({"extra": e})), None)
        if wanted.marker is not None and extra is None:
            continue
        pip = f"pip install '{PROJECT}{f'[{extra}]' if extra else ''}'"
        items.append(_item(wanted, _version(wanted.name), pip, optional=extra is not None))
    return Environment("trainer", sys.executable, tuple({item.name: item for item in items}.values()))


def verl_environment() -> Environment:
    """The interpreter that ``stack=verl`` runs with, held against what the stack is written for."""
    try:
        python = interpreter("verl", None)
    except NoInterpreter as error:
        return Environment("verl", None, (Item("interpreter", "verl's environment", None, "missing", str(error)),))
    wanted, optional = [Requirement(text) for text in VERL_NEEDS], [Requirement(text) for text in VERL_TAKES]
    try:
        asked = subprocess.run(
            [str(python), "-P", "-c", _VERSIONS, json.dumps([w.name for w in [*wanted, *optional]])],
            capture_output=True,
            text=True,
            check=True,
        )
        answer: dict[str, Any] = json.loads(asked.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        return Environment(
            "verl", str(python), (Item("interpreter", "a working Python", None, "missing", f"{error}; {INSTALL}"),)
        )
    versions = answer["versions"]
    items = [_item(w, versions.get(w.name), INSTALL, optional=False) for w in wanted]
    items += [_item(w, versions.get(w.name), f"{python} -m pip install '{w}'", optional=True) for w in optional]
    if versions.get(PROJECT):
        same = answer["source"] == freeze.source_hash()
        remedy = None if same else f"install the same version into both environments: {INSTALL}"
        items.append(Item("source", "the same as here", "the same" if same else "another", "present" if same else "old", remedy))
    return Environment("verl", str(python), tuple(items))


def machine_facts() -> dict[str, Any]:
    """What this machine offers."""
    here = Path.cwd()
    return {
        "host": machine.host(),
        "cores": machine.cores(),
        "memory_gb": round(machine.available_memory() / 2**30, 1),
        "gpus": machine.gpu_names(),
        "free_disk_gb": round(shutil.disk_usage(here).free / 2**30, 1),
        "hard_links": _links(here),
    }


def slurm_facts() -> dict[str, Any]:
    """What ``pth_slurm`` finds here: ``missing`` commands, ``version``, whether the controller ``answers``, and ``why`` not.

    A machine without any of the commands is no part of a cluster, and nothing is wrong with it.
    """
    missing = slurm_client.missing()
    facts: dict[str, Any] = {"missing": missing, "version": None, "answers": None, "why": None}
    if len(missing) == len(slurm_client.PROGRAMS):
        return facts
    try:
        facts["version"] = slurm_client.call(["sbatch", "--version"]).split()[-1]
        said = slurm_client.call(["scontrol", "ping"]).strip()
        facts |= {"answers": " is UP" in said, "why": None if " is UP" in said else said}
    except slurm_client.SlurmError as error:
        facts |= {"answers": False, "why": str(error)}
    return facts


def _links(folder: Path) -> bool:
    """Whether the lease can work in this folder."""
    import tempfile

    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".pth-doctor-") as scratch:
            one = Path(scratch) / "one"
            one.touch()
            (Path(scratch) / "two").hardlink_to(one)
            return True
    except OSError:
        return False


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _item(wanted: Requirement, found: str | None, remedy: str, optional: bool) -> Item:
    if found is None:
        return Item(wanted.name, str(wanted.specifier), None, "optional" if optional else "missing", remedy)
    if not wanted.specifier.contains(found, prereleases=True):
        return Item(wanted.name, str(wanted.specifier), found, "old", remedy)
    return Item(wanted.name, str(wanted.specifier), found, "present")


def main(arguments: Sequence[str] | None = None) -> int:
    """``pth doctor``; 0 when everything is there, 1 when something is missing, 2 for usage."""
    parser = argparse.ArgumentParser(prog="pth doctor", description=__doc__)
    parser.add_argument("stacks", nargs="*", metavar="STACK", help="trainer, verl; without one, those that are installed")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    chosen = parser.parse_args(arguments)
    unknown = [stack for stack in chosen.stacks if stack not in ("trainer", "verl")]
    if unknown:
        print(f"pth doctor: no stack {unknown[0]!r}; there are trainer and verl", file=sys.stderr)
        return 2
    environments = [trainer_environment(), verl_environment()]
    asked = set(chosen.stacks) or {e.stack for e in environments if e.python is not None}
    facts, slurm = machine_facts(), slurm_facts()
    well = all(e.complete for e in environments if e.stack in asked) and facts["hard_links"]
    if chosen.json:
        described = [asdict(e) | {"complete": e.complete, "asked": e.stack in asked} for e in environments]
        print(json.dumps({"well": well, "machine": facts, "slurm": slurm, "environments": described}, indent=2))
    else:
        _show(environments, facts, slurm)
    return 0 if well else 1


def _show(environments: Sequence[Environment], facts: Mapping[str, Any], slurm: Mapping[str, Any]) -> None:
    gpus = ", ".join(facts["gpus"]) or "no GPU"
    print(f"machine  {facts['host']}: {facts['cores']} cores, {facts['memory_gb']} GB of memory free, {gpus}")
    links = "hard links work" if facts["hard_links"] else "no hard links: runs cannot be leased here, use another folder"
    print(f"folder   {Path.cwd()}: {facts['free_disk_gb']} GB free, {links}")
    print(f"SLURM    {_slurm(slurm)}")
    for environment in environments:
        print(f"\n{environment.stack}: {environment.python or 'not installed'}")
        for item in environment.items:
            state = "" if item.state == "present" else f"  {item.state}: {item.remedy}"
            print(f"  {item.name:<16} {item.found or '-':<14} {item.wanted:<16}{state}".rstrip())


def _slurm(facts: Mapping[str, Any]) -> str:
    if facts["answers"] is None:
        return "none of its commands is on the path: this machine submits no jobs"
    here = f"{facts['version'] or 'of a version it does not tell'}, "
    if facts["missing"]:
        here += f"without {', '.join(facts['missing'])}, "
    return here + ("its controller answers" if facts["answers"] else f"its controller does not answer: {facts['why']}")


if __name__ == "__main__":
    sys.exit(main())
