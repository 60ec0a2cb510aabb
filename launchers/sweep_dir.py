"""The directory of a sweep: ``multirun_outputs/<experiment>/<UTC>-<hex4>/<NNN>-<config_id8>/``, its index and its links."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pth_exp import freeze, lifecycle, sections
from pth_exp.freeze import FrozenRun
from pth_exp.lifecycle import State
from pth_exp.refusal import refuse

if TYPE_CHECKING:
    from pth_exp.launchers.freezing import Planned
    from pth_exp.launchers.gate import Verdict

FORMAT = 1
INDEX = "index.json"
OUTPUTS = "multirun_outputs"
LAUNCH = "launch.json"


@dataclass
class SweepDir:
    """A sweep's directory, owned by one launch."""

    path: Path
    name: str
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    rows: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def create(cls, path: Path, name: str, launcher: dict[str, Any]) -> SweepDir:
        """Make the directory, or take one that a sweeper made. Raises :class:`Refusal` if another launch has it."""
        path = path.absolute()
        path.mkdir(parents=True, exist_ok=True)
        sweep = cls(path, name)
        launch = {
            "created": sweep.created,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "command": sys.argv,
            "launcher": launcher,
        }
        try:
            with (path / LAUNCH).open("x") as stream:
                json.dump(launch, stream)
        except FileExistsError:
            remedy = "leave hydra.sweep.dir as it is, or name a new one; `pth resume` goes on with an old sweep"
            raise refuse("hydra.sweep.dir", path, "belongs to another launch", remedy) from None
        return sweep

    def freeze(self, planned: Planned, label: str, index: int, files: Mapping[str, bytes]) -> FrozenRun:
        """Write one run's frozen config with the ``files`` derived from it, and Hydra's own files beside them."""
        composed = planned.composed
        assert planned.config_id is not None
        run_dir = self.path / f"{index:03d}-{planned.config_id[:8]}"
        run_dir.mkdir()
        run = {
            "sweep": self.path.name,
            "index": index,
            "label": label,
            "overrides": composed.overrides,
            "experiment": composed.config.name,
        }
        frozen = freeze.freeze(composed.values, run, planned.inputs, composed.environment, run_dir, files)
        lifecycle.note(run_dir, State.FROZEN, "launcher")
        subdir = composed.hydra["hydra"]["output_subdir"]
        if subdir is not None:
            (run_dir / subdir).mkdir()
            for file, content in (("config", composed.raw), ("hydra", composed.hydra), ("overrides", composed.overrides)):
                (run_dir / subdir / f"{file}.yaml").write_bytes(sections.dump(content))
        self.rows.append(
            {
                "index": index,
                "dir": run_dir.name,
                "label": label,
                "config_id": frozen.config_id,
                "frozen_sha256": frozen.sha256,
                "overrides": composed.overrides,
                "arm": composed.config.arm.name,
                "seed": composed.config.seed,
                "updates": composed.config.updates,
            }
        )
        return frozen

    def write_index(self, verdict: Verdict) -> None:
        """Write ``index.json`` whole, then point ``latest`` at this sweep."""
        index = {
            "format": FORMAT,
            "sweep": self.path.name,
            "id": self.path.name,
            "name": self.name,
            "created": self.created,
            "command": sys.argv,
            "design": dataclasses.asdict(verdict.design),
            "gate": verdict.as_index(),
            "runs": self.rows,
        }
        temporary = self.path / f".{INDEX}.{os.getpid()}"
        temporary.write_text(json.dumps(index, indent=1, ensure_ascii=False) + "\n")
        temporary.replace(self.path / INDEX)
        for folder in self._shelves():
            point(folder / "latest", self.path)

    def _shelves(self) -> dict[Path, None]:
        """Folders whose ``latest`` this sweep becomes: what reading commands here look at, and what it was filed under."""
        here = Path(OUTPUTS).absolute()
        here.mkdir(exist_ok=True)  # hydra.sweep.dir may lead elsewhere, where no links are left
        filed = [self.path.parents[1], self.path.parent] if self.path.parents[1].name == OUTPUTS else []
        return dict.fromkeys([here, *filed])


def launched_on(sweep: Path) -> tuple[str, dict[str, Any]]:
    """Name and settings of the launcher that a sweep was launched with."""
    try:
        launcher = json.loads((sweep / LAUNCH).read_text()).get("launcher", {})
    except (OSError, ValueError):
        launcher = {}
    return launcher.get("name", "pth_local"), launcher.get("settings", {})


def point(link: Path, target: Path) -> None:
    """Make ``link`` a relative symbolic link to ``target``, in one step; a file of that name that is no link is left alone."""
    if link.exists() and not link.is_symlink():
        return
    temporary = link.with_name(f".latest.{secrets.token_hex(4)}")
    temporary.symlink_to(os.path.relpath(target, link.parent))
    temporary.replace(link)
