"""A wheel and an editable install both run a comparison in an empty folder, away from the source tree."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["updates=2", "prompts_per_update=4", "responses_per_prompt=4", "validation.every=null"]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([str(c) for c in command], cwd=cwd, env=environment, text=True, capture_output=True, check=False)


def source_copy(folder: Path) -> Path:
    """The files that git would ship, so that a build leaves nothing in the tree under test."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).stdout.split("\0")
    for name in filter(None, listed):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_copy(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    built = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source, cwd=out)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


def test_wheel_keeps_bare_names_out_of_site_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {n.split("/")[0] for n in names if ".dist-info" not in n}
    assert top == {"pth_exp", "hydra_plugins"}
    assert "pth_exp/conf/config.yaml" in names
    assert "pth_exp/models/embedded/model.safetensors" in names
    assert "hydra_plugins/__init__.py" not in names, "hydra_plugins is a namespace that other projects share"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_install_runs_from_an_empty_folder(kind: str, wheel: Path, source: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).stdout.strip())
    (site / "dependencies.pth").write_text("".join(f"{p}\n" for p in sys.path if p.endswith("-packages")))
    what = [wheel] if kind == "wheel" else ["-e", source]
    flags = ["-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    installed = run(sys.executable, "-m", "pip", "--python", python, "install", *flags, *what, cwd=tmp_path)
    assert installed.returncode == 0, installed.stdout + installed.stderr

    empty = tmp_path / "empty"
    empty.mkdir()
    ran = run(home / "bin" / "pth", "run", "arm=grpo,san", "seed=1", *SMALL, cwd=empty)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    checked = run(home / "bin" / "pth", "check", "--json", "--no-figure", cwd=empty)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    verdicts = {(v["run"], v["check"]): v["outcome"] for v in json.loads(checked.stdout)["verdicts"]}
    assert verdicts == {(arm, check): "pass" for arm in ("grpo", "san") for check in ("ratio", "config", "batches", "losses")}
