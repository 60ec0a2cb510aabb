"""The ``pth`` command. Each subcommand's module is imported only when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence

from pth_exp import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("pth_exp.run:main", "compose, freeze, check and train every run of a sweep"),
    "check": ("pth_exp.report.check:main", "what a sweep measured: verdicts, evidence, accuracy, a picture"),
    "equations": ("pth_exp.report.equations:main", "what each arm's loss is, as written: pth equations [ARM ...] [--latex]"),
    "diff": ("pth_exp.report.diff:main", "what differs between runs, and what was meant to"),
    "status": ("pth_exp.status:main", "where each run of a sweep stands"),
    "list": ("pth_exp.status:list_main", "which sweeps there are"),
    "resume": ("pth_exp.resume:main", "run what a sweep has not completed, from its frozen files"),
    "sbatch": ("pth_exp.sbatch:main", "write a plain SLURM script for what a sweep has not completed"),
    "track": ("pth_exp.track:main", "send a sweep's records to wandb, again or for the first time"),
    "records": ("pth_exp.report.columns:main", "the columns of the record files: unit and meaning"),
    "doctor": ("pth_exp.doctor:main", "what each stack needs, what is there, and what installs the rest"),
    "new": ("pth_exp.new:main", "write a loss and an arm of your own: pth new arm NAME"),
}
"""Name to ``module:function`` and one line of help. The function takes the arguments and returns the exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``pth``. Exit codes: 0 as expected, 1 a verdict or a run is not as expected, 2 usage or bad input."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    if args[:1] in (["-h"], ["--help"], []):
        print(_help())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"pth-exp {__version__}")
        return 0
    if args[0] in ("-sc", "--shell-completion") or args[0].startswith("--shell-completion="):
        return _complete(args)
    if args[0] not in COMMANDS:
        from pth_exp.schema import nearest

        print(f"pth: no command {args[0]!r}{nearest(args[0], COMMANDS)}\n\n{_help()}", file=sys.stderr)
        return 2
    try:
        return _command(args[0])(args[1:])
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run_main() -> int:
    """Entry point of ``pth-run``, the same as ``pth run``."""
    return _command("run")(sys.argv[1:])


def _command(name: str) -> Callable[[list[str]], int]:
    module, function = COMMANDS[name][0].split(":")
    command: Callable[[list[str]], int] = getattr(importlib.import_module(module), function)
    return command


def _help() -> str:
    lines = [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: pth COMMAND ...", "", *lines, "", "pth COMMAND --help says more about a command."])


def _complete(args: list[str]) -> int:
    """Shell completion, as Hydra's script asks for it: the commands, then behind ``run`` whatever Hydra knows."""
    words = os.environ.get("COMP_LINE", "").split(" ")
    if "query=" not in " ".join(args) or (len(words) > 2 and words[1] == "run"):
        os.environ["COMP_LINE"] = " ".join([words[0], *words[2:]])
        return _command("run")(args)
    if len(words) <= 2:
        print(" ".join(name for name in COMMANDS if name.startswith(words[-1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
