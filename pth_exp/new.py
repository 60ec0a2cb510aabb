"""``pth new arm NAME``: a study folder with a loss of your own that trains at once and is easy to change."""

from __future__ import annotations

import argparse
import keyword
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pth_exp import extensions, schema
from pth_exp.refusal import Refusal, refuse

HEADER = '''"""Losses and arms of this study: `pth run`, started in this folder, finds the file and freezes its hash."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pth_exp.losses import TokenBatch, aggregate, register
from pth_exp.schema import Arm, Role, spec

ARMS: dict[str, type[Arm]] = {}
'''

BLOCK = '''

@dataclass
class {cls}(Arm):
    """Each field here is a parameter of the loss, and can be swept: arm.scale=0.5,1"""

    scale: float = spec(1.0, Role.science, "factor on every token's coefficient")


@register("{name}")
def {name}(batch: TokenBatch, *, scale: float = 1.0) -> tuple[Tensor, Mapping[str, Tensor]]:
    """REINFORCE without a correction for the sampler's lag.

    The equation stands in conf/arm/{name}.yaml. ``logp`` and ``mask`` are [B, T], ``advantage`` is [B]; slots outside the mask
    hold zeros. ``totals`` are those of the whole batch where this is a part of it. Returns the loss and its metrics.
    """
    terms = scale * batch.advantage[:, None] * -batch.logp
    return aggregate(terms, batch.mask, "seq_mean_token_sum", totals=batch.totals), {{}}


ARMS["{name}"] = {cls}
'''

OPTION = """# An arm of this study: choose it with arm={name}.
#
# There is no ratio, and no correction for the sampler's lag; check 1 holds the arm to `correction`, check 4 to `equation`.
defaults:
  - /schema/arm/{name}@_here_
  - _self_
name: {name}
loss: {name}
label: {name}
equation: |  # what the loss is, in the language of pth_exp/equations/; shown by pth equations {name}
  l = -logp
  loss = mean(scale * A * sum(l))
correction: none       # none, ratio, weight, rejection or behaviour_free
"""


def main(arguments: Sequence[str]) -> int:
    """Write the files and say what to run next. Exit code 2 when the name cannot be used."""
    parser = argparse.ArgumentParser(prog="pth new", description="Write a loss and an arm of your own, ready to train.")
    parser.add_argument("what", choices=["arm"])
    parser.add_argument("name", help="name of the loss and of its arm")
    parser.add_argument(
        "--folder", type=Path, help="the study's folder; by default this one, or ./my_study in a checkout of pth-exp"
    )
    args = parser.parse_args(list(arguments))
    here = Path.cwd()
    folder: Path = args.folder or (here / "my_study" if extensions.is_checkout(here) else here)
    try:
        _write(args.name, folder)
    except Refusal as refusal:
        print(f"pth new: {refusal}", file=sys.stderr)
        return 2
    command = "pth" if shutil.which("pth") else str(Path(sys.argv[0]).absolute())
    shown = Path(os.path.relpath(folder))
    there = "" if folder.resolve() == here.resolve() else f"cd {shown} && "
    print(f"wrote {shown / 'my_losses.py'} and {shown / 'conf' / 'arm' / f'{args.name}.yaml'}; train it beside GRPO with")
    print(f"  {there}{command} run arm=grpo,{args.name} refresh_interval=4 updates=20")
    return 0


def _write(name: str, folder: Path) -> None:
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise refuse("NAME", name, "is not a lower-case Python name", "use letters, digits and _")
    if name in schema.BUILTIN_ARMS:
        raise refuse("NAME", name, "an arm of this name comes with pth-exp", "choose another")
    losses, option = folder / "my_losses.py", folder / "conf" / "arm" / f"{name}.yaml"
    if option.exists():
        raise refuse("NAME", name, f"{option} exists", "choose another name, or change that file")
    text = losses.read_text() if losses.exists() else HEADER
    if "ARMS" not in text:
        raise refuse(str(losses), "", "has no ARMS, so an arm cannot be added to it", "add ARMS: dict[str, type[Arm]] = {}")
    cls = "".join(part.capitalize() for part in name.split("_")) + "Arm"
    option.parent.mkdir(parents=True, exist_ok=True)
    losses.write_text(text + BLOCK.format(name=name, cls=cls))
    option.write_text(OPTION.format(name=name))
