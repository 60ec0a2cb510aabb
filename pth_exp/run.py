"""``pth run``: a Hydra application whose every run goes through the freezing launcher."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import version as hydra_version
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.types import HydraContext, RunMode
from omegaconf.errors import OmegaConfBaseException

import pth_exp.conf
from pth_exp import extensions, store
from pth_exp.launchers import stock
from pth_exp.launchers.composing import refuse_without_option
from pth_exp.launchers.places import PLACES, checked_settings
from pth_exp.refusal import Objection, Refusal, refuse

CONF = Path(str(pth_exp.conf.__file__)).parent
PRIMARY = "config"
HELP = """\
usage: pth run [OPTION ...] field=value group=option field=value1,value2 ...

Compose, freeze, check against the design and train every run of a sweep.

  pth run arm=grpo,tis_ppo,san seed=42,43 refresh_interval=96 lr=2e-4
  pth run experiment=demo
  pth run arm=grpo,san 'seed=range(0,5)' --dry-run
  pth run 'hydra.sweeper.blocks=["arm=grpo,san refresh_interval=96", "arm=tis_reinforce replay_age=32"]' \\
          'design.blocks=[refresh_interval,replay_age]'

Groups, and their options:

{groups}
Options; the others are Hydra's (pth run --hydra-help):
  --dry-run         show every run's resolved config and the table of fields that differ; start nothing
  --cfg job         show every run's config as composed; with --resolve, as it would be frozen
  --config-dir DIR  a folder with more options for the groups
  -sc install=bash  tab completion: eval "$(pth run -sc install=bash)"
Every field, with its unit and meaning: pth_exp/schema/. Exit code 0; 1 if a run did not complete; 2 if the sweep was refused.
"""


def main(arguments: Sequence[str]) -> int:
    """Run, show or describe a sweep. Exit code 0, 1 if a run did not complete, 2 if the sweep was refused, 130 after Ctrl-C."""
    from pth_exp.launchers.freezing import RunsFailed

    try:
        args = _parse(arguments)
        with hydra_over(args.config_dir) as hydra:
            return _dispatch(hydra, args)
    except Refusal as refusal:
        print(f"pth run: refused, nothing was started\n{refusal}", file=sys.stderr)
    except (HydraException, OmegaConfBaseException) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"pth run: refused, nothing was started\n{_text(error)}", file=sys.stderr)
    except RunsFailed:
        return 1
    except KeyboardInterrupt:
        print("pth run: interrupted", file=sys.stderr)
        return 130
    return 2


def _text(error: BaseException) -> str:
    """An error of Hydra's with its cause, which names the key and the value."""
    causes = [str(error).strip()]
    while error.__cause__ is not None:
        error = error.__cause__
        if isinstance(error, Refusal):
            return str(error)
        causes.append(str(error).strip())
    return "\n".join(dict.fromkeys(c for c in causes if c))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = get_args_parser()
    parser.prog = "pth run"
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_intermixed_args(list(arguments))  # options may stand between overrides
    for option in ("config_name", "config_path"):
        if getattr(args, option) is not None:
            raise refuse(
                f"--{option.replace('_', '-')}", getattr(args, option), "`pth run` has a primary config of its own",
                "put yours into conf/experiment/ of a study folder or of --config-dir, and choose it with experiment=NAME",
            )  # fmt: skip
    if args.experimental_rerun is not None:
        raise refuse("--experimental-rerun", args.experimental_rerun, "bypasses the frozen config", "use `pth resume`")
    if args.resolve and args.cfg is None:
        args.cfg = "job"
    return args


@contextmanager
def hydra_over(config_dir: str | None) -> Iterator[Hydra]:
    """Hydra over the project's conf, then ``config_dir``, then the study folder's conf."""
    hydra_version.setbase("1.3")
    store.register(extensions.arms_here(Path.cwd()))
    search_path = create_config_search_path(str(CONF))
    before_schema = SearchPathQuery(provider="schema")
    if config_dir is not None:
        folder = Path(config_dir).absolute()
        if not folder.is_dir():
            raise refuse("--config-dir", config_dir, "no such directory", "name a folder of config groups")
        search_path.prepend("command-line", f"file://{folder}", before_schema)
    for name, folder in extensions.conf_folders(Path.cwd(), CONF):
        search_path.prepend(name, f"file://{folder}", before_schema)
    _register_plugins()
    try:
        yield Hydra.create_main_hydra2(task_name="pth_run", config_search_path=search_path)
    finally:
        GlobalHydra.instance().clear()


def _register_plugins() -> None:
    """Hydra scans folders for plug-ins, and an editable install has none to scan for ours."""
    plugins = Plugins.instance()
    from hydra_plugins.pth_exp.launchers import PthDryRun, PthFreeze, PthLocal, PthRay, PthSlurm
    from hydra_plugins.pth_exp.sweepers import BlocksSweeper

    for plugin in (PthDryRun, PthFreeze, PthLocal, PthRay, PthSlurm, BlocksSweeper):
        plugins.register(plugin)


def _dispatch(hydra: Hydra, args: argparse.Namespace) -> int:
    if args.help:
        print(HELP.format(groups=hydra.format_config_groups(_is_own_group)))
    elif args.hydra_help:
        hydra.hydra_help(config_name=PRIMARY, args_parser=get_args_parser(), args=args)
    elif args.shell_completion:
        hydra.shell_completion(config_name=PRIMARY, overrides=args.overrides)
    elif args.info is not None:
        hydra.show_info(args.info, config_name=PRIMARY, overrides=args.overrides)
    elif args.cfg in ("hydra", "all"):
        hydra.show_cfg(PRIMARY, args.overrides, args.cfg, args.package, args.resolve)
    else:
        _sweep(hydra, args)
    return 0


def _is_own_group(group: str) -> bool:
    return group.split("/")[0] not in ("hydra", "schema")


def _sweep(hydra: Hydra, args: argparse.Namespace) -> None:
    """What Hydra's multirun does, but for two things: single values do not enter the master config, they are checked when each
    job is composed; and RUN mode, which would bypass the launcher, does not exist."""
    overrides = _overrides(args.overrides)
    _check(overrides)
    for name in [str(o.value()) for o in overrides if o.key_or_group == "hydra/launcher"]:
        if name in stock.INSTEAD:  # installed or not
            raise stock.refused(name, args.overrides)
        if name in PLACES:
            keys = [o.key_or_group for o in overrides if _of_launcher(o) and not o.is_add()]
            checked_settings(name, {key.split(".")[2]: "" for key in keys})
    refuse_without_option([o for o in overrides if not o.is_hydra_override() and _is_group(hydra, o)])
    shown = args.dry_run or args.cfg is not None
    if shown:
        overrides = [o for o in overrides if not o.key_or_group.startswith("hydra/launcher") and not _of_launcher(o)]
    master = [str(o.input_line) for o in overrides if _is_for_master(hydra, o)]
    if shown:
        raw = args.cfg is not None and not args.resolve and not args.dry_run
        master += ["hydra/launcher=pth_dry_run", f"hydra.launcher.resolve={not raw}", f"hydra.launcher.table={args.cfg is None}"]
    config = hydra.compose_config(PRIMARY, master, RunMode.MULTIRUN, with_log_configuration=not shown)
    context = HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks())
    launcher = str(config.hydra.launcher.get("_target_"))
    if not launcher.startswith("hydra_plugins.pth_exp."):
        name = config.hydra.runtime.choices["hydra/launcher"]
        raise stock.refused(str(name), args.overrides)
    sweeper = Plugins.instance().instantiate_sweeper(hydra_context=context, task_function=_never, config=config)
    sweeper.sweep(arguments=[str(o.input_line) for o in overrides if not o.is_hydra_override()])


def _overrides(texts: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(texts))
    except OverrideParseException as error:
        name, _, value = str(error.override).partition("=")
        if name == "stack.overrides":
            remedy = """write 'stack.overrides=["NAME=VALUE","NAME=VALUE"]'"""
            raise refuse(name, value, "Hydra reads an = in a value only within quotes", remedy) from error
        raise


def _is_for_master(hydra: Hydra, override: Override) -> bool:
    """Hydra's own settings, and what they may depend on: the choice of groups, and the experiment's name."""
    if override.is_hydra_override():
        return True
    key = override.key_or_group
    return not override.is_sweep_override() and (key == "name" or _is_group(hydra, override))


def _is_group(hydra: Hydra, override: Override) -> bool:
    return bool(hydra.config_loader.get_group_options(override.key_or_group))


def _of_launcher(override: Override) -> bool:
    return override.key_or_group.startswith("hydra.launcher.")


def _never(_: Any) -> Any:
    raise AssertionError("runs are trained by workers")


def _check(overrides: Sequence[Override]) -> None:
    objections = list(_objections(overrides))
    if objections:
        raise Refusal(objections)


def _objections(overrides: Sequence[Override]) -> Iterator[Objection]:
    """What can be told from the command line alone."""
    seen: dict[str, str] = {}
    for override in overrides:
        key, text = override.key_or_group, str(override.input_line)
        value = text.partition("=")[2]
        if key in seen:
            why = "two experiments in one sweep: Hydra would drop the sweeps of both" if key == "experiment" else "given twice"
            yield Objection(key, f"{seen[key]} and {value}", why, "give it once; a union of grids is hydra/sweeper=blocks")
        seen[key] = value
        if key == "experiment" and override.is_sweep_override():
            yield Objection(
                key, value, "two experiments in one sweep: Hydra would drop the sweeps of both",
                "start them one after the other, or write one experiment with blocks",
            )  # fmt: skip
        if key == "hydra.mode" and value != "MULTIRUN":
            yield Objection(key, value, "every run goes through the freezing launcher", f"leave {text} out")
        if key == "hydra.sweeper.max_batch_size" and value not in ("", "null"):
            yield Objection(
                key, value, "runs would start before the rest of the sweep is composed and checked",
                "leave it out; hydra.launcher.slots=N bounds how many runs go at a time",
            )  # fmt: skip
        if key == "hydra.run.dir":
            yield Objection(key, value, "a single run's place, and there is none", "write hydra.sweep.dir, the sweep's directory")
        if key == "hydra.callbacks" or key.startswith("hydra.callbacks."):
            yield Objection(key, value, "a run is a worker without Hydra, callbacks would never be called", f"leave {text} out")
