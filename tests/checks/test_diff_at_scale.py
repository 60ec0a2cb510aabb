"""`pth diff` over hundreds of runs: what is common is said once, what is not is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import many
import pytest
import sweeps
from markdown_it import MarkdownIt

from pth_exp.cli import main

SAN_7 = "san·seed=7"


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many.make(tmp_path_factory.mktemp("many") / "s")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Sixty runs, to be changed."""
    return many.make(tmp_path / "s", seeds=20)


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["diff", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def run_dir(sweep: Path, label: str) -> Path:
    return next(sweep / e["dir"] for e in json.loads((sweep / "index.json").read_text())["runs"] if e["label"] == label)


def test_three_hundred_runs_fit_on_a_screen(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = diff(capsys, healthy)
    lines = out.splitlines()
    assert code == 0 and lines[0] == "300 runs"
    assert len(lines) < 40 and max(map(len, lines)) <= 140
    assert "  seed            1..100 (100 values)" in lines
    assert "  seeds.data      as seed" in lines
    assert "grpo, tis_ppo, san" in next(line for line in lines if "arm.name" in line)
    at = next(i for i, line in enumerate(lines) if "arm.correction" in line)
    assert [line.split(None, 1)[1] if i == 0 else line.strip() for i, line in enumerate(lines[at : at + 3])] == [
        "none: grpo (100 runs)", "weight: tis_ppo (100 runs)", "behaviour_free: san (100 runs)",
    ]  # fmt: skip
    assert "  299 of 299 runs as the seeds say, each held against all before it" in lines


def test_what_is_unexpected_in_one_run_is_named(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many.change(sweep, SAN_7, lr=1e-3)
    code, out, _ = diff(capsys, sweep, "--only-unexpected")
    assert code == 1
    assert [line.strip() for line in out.splitlines() if line] == [
        "60 runs",
        "unexpected: no design declares it",
        "lr  0.001: san·seed=7",
        "0.0002: the other 59 runs",
        "undeclared-difference: lr differs, which the design does not declare: 0.0002 (all but san·seed=7, 59 runs), "
        "0.001 (san·seed=7)",
        "remedy: give it one value, or name it in design.vary, design.blocks or design.per_arm "
        "(now: vary ['arm', 'seed'], blocks [])",
    ]
    assert "unexpected" in diff(capsys, sweep)[1] and "per arm" in diff(capsys, sweep)[1]


def test_only_unexpected_of_a_healthy_sweep_says_so(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(capsys, healthy, "--only-unexpected")[:2] == (0, "300 runs\nno unexpected difference\n\n")


def test_many_unexpected_values_are_summed_up(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(1, 21):
        many.change(sweep, f"san·seed={seed}", optimizer__eps=float(f"{seed}e-9"))
    code, out, _ = diff(capsys, sweep, "--only-unexpected")
    assert code == 1
    assert "  optimizer.eps  1e-09, 2e-09, 3e-09, 4e-09, ... 2e-08 (19 values): san·seed=1..9, 11..20 (19 runs)" in out
    assert "1e-08: the other 41 runs" in out
    assert len(out.splitlines()) < 15


def test_prompt_ids_are_held_against_every_earlier_run(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither of the two is the first run, beside which both are as they should be."""
    shutil.copy(run_dir(sweep, "tis_ppo·seed=9") / "first_batches.json", run_dir(sweep, SAN_7))
    code, out, _ = diff(capsys, sweep)
    assert code == 1
    assert "  58 of 59 runs as the seeds say, each held against all before it" in out
    # its seed's first run has other IDs than it has, and the first run with its IDs another seed
    assert f"  {SAN_7} beside grpo·seed=7: part at update 0, position 0 although seeds.data is the same" in out


def test_prompt_ids_of_other_seeds_that_the_config_agrees_with(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for label in ("grpo·seed=7", "tis_ppo·seed=7", SAN_7):
        shutil.copy(run_dir(sweep, "grpo·seed=9") / "first_batches.json", run_dir(sweep, label))
    found = json.loads(diff(capsys, sweep, "--json")[1])
    astray = {p["run"]: p["beside"] for p in found["prompts"] if not p["expected"]}
    assert astray == dict.fromkeys(["grpo·seed=9", "tis_ppo·seed=9", "san·seed=9"], "grpo·seed=7")
    assert (
        "  grpo·seed=9, tis_ppo·seed=9, san·seed=9 beside grpo·seed=7: all 16 the same although the seeds differ"
        in diff(capsys, sweep)[1]
    )


def test_chosen_fields(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = diff(capsys, sweep, "--fields", "seed*,arm.corr*")
    assert code == 0 and "arm.correction" in out and "seeds.init" in out and "arm.name" not in out and "prompt IDs" not in out
    many.change(sweep, SAN_7, lr=1e-3)
    code, out, _ = diff(capsys, sweep, "--fields", "seeds")
    assert code == 1, "a field that is not shown counts all the same"
    assert "not shown, and unexpected as well: lr" in out and "seeds.data" in out and "undeclared-difference" not in out
    code, _, err = diff(capsys, sweep, "--fields", "lr,learning_rte")
    assert code == 2 and "--fields learning_rte: no such field" in err
    found = json.loads(diff(capsys, sweep, "--json", "--fields", "lr")[1])
    assert set(found["unexpected"]) == {"lr"} and found["varied"] == {} and not found["as_declared"]


def test_json_has_every_run(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(diff(capsys, sweep, "--json")[1])
    assert len(found["runs"]) == len(found["varied"]["seed"]) == 60 and len(found["prompts"]) == 59
    assert found["varied"]["seed"][SAN_7] == 7 and found["as_declared"]


def test_a_run_that_cannot_be_read_is_named_and_the_others_are_compared(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run_dir(sweep, SAN_7))
    code, out, err = diff(capsys, sweep)
    assert code == 2 and out.startswith("59 runs") and "not compared: san·seed=7: " in err and "has no frozen.yaml" in err


def tables(text: str) -> list[list[str]]:
    """Cells of the rows, as a reader of GitHub's Markdown that is not ours reads them."""
    rows: list[list[str]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "table_close":
            break
        if token.type == "tr_open":
            rows.append([])
        if token.type == "inline" and rows:
            rows[-1].append("".join(t.content if t.type in ("text", "code_inline") else "\n" for t in token.children or []
                                    if t.type in ("text", "code_inline", "html_inline")))  # fmt: skip
    return rows


def test_markdown_of_hundreds_of_runs(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many.change(sweep, SAN_7, lr=1e-3)
    code, out, _ = diff(capsys, sweep, "--markdown")
    rows = tables(out)
    assert code == 1 and rows[0] == ["field", "", "values"] and {len(row) for row in rows} == {3}
    assert ["seed", "varied", "1..20 (20 values)"] in rows
    assert ["lr", "unexpected", "0.001 san·seed=7\n0.0002 the other 59 runs"] in rows
    assert out.startswith("**60 runs**\n") and len(out.splitlines()) < 45


def test_markdown_escapes_what_would_break_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a|b_c*.yaml", tmp_path / "plain.yaml"
    a.write_text("pattern: 'x|y `z` <b>'\nlines: \"one\\ntwo\"\nsame: 1\n")
    b.write_text("pattern: '`'\nlines: ''\nsame: 1\n")
    code, out, _ = diff(capsys, a, b, "--markdown")
    rows = tables(out)
    assert code == 1
    assert rows == [
        ["field", "", "a|b_c*.yaml", "plain.yaml"],
        ["pattern", "unexpected", "x|y `z` <b>", "`"],
        ["lines", "unexpected", "one two", ""],
    ]


def test_json_and_markdown_exclude_each_other(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["diff", str(healthy), "--json", "--markdown"])
    assert left.value.code == 2 and "not allowed with" in capsys.readouterr().err


def test_a_few_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = sweeps.make(tmp_path / "s", {"grpo": sweeps.config("grpo"), "san": sweeps.config("san")})
    code, out, _ = diff(capsys, root)
    assert code == 0 and out.splitlines()[3].split() == ["grpo", "san"]
    assert "san beside grpo: all 64 the same (as the seeds say)" in out
