"""The command line: help, versions, completion, and what wrong arguments say."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

import pytest

import distribax as dx
from distribax.cli import main
from tests.forked import start_forked


def show(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what a command prints that ends by itself, as --help does."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_version_and_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert show(["--version"], capsys) == f"distribax {dx.__version__}\n"
    about = show(["--help"], capsys)
    assert "exit codes:" in about and "42   a worker was told to stop" in about
    told = show(["run", "--help"], capsys)
    assert "(default: 5.0)" in told and "(default: None)" not in told and "(default: 0)" in told
    assert "(default: False)" not in told
    assert "distribax run --workers 2 -m my_package.train" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the script is missing: distribax run [options] train.py"),
        (["--workers", "2"], "the script is missing"),
        (["no_script.py"], "'no_script.py' does not exist"),
        (["-m", "no_such_package.train"], "no module named 'no_such_package'"),
        (["--tee", __file__], "--log-dir"),
        (["--log-dir", "/proc/no", __file__], "--log-dir=/proc/no: "),
    ],
)
def test_run_says_what_is_missing(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["['doctor']", "['doctor', '--json']", "['completion', 'zsh']"])
def test_output_that_nobody_reads_is_no_error(command: str) -> None:
    program = (
        "import sys, distribax.cli as cli\nsys.stdin.read()\n"
        f"code = cli.main({command})\nprint('code', code, file=sys.stderr)\n"
    )
    process = start_forked(program, os.environ)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.stdin.close()
    told = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert "Traceback" not in told and "code 141" in told


def complete(script: str, *words: str) -> list[str]:
    """Returns what bash offers for the last of some words."""
    program = f"""{script}
COMP_WORDS=({" ".join(f"'{word}'" for word in words)})
COMP_CWORD={len(words) - 1}
_distribax
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.split()


def test_bash_completes_commands_options_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert {"run", "doctor", "demo"} <= set(complete(script, "distribax", ""))
    assert complete(script, "distribax", "doc") == ["doctor"]
    assert complete(script, "distribax", "run", "--work") == ["--workers"]
    assert complete(script, "distribax", "completion", "z") == ["zsh"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete_every_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for option in ("workers", "max-restarts", "json", "epochs"):
        assert option in script
