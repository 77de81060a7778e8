"""What functions print: kept by the worker, shown by the coordinator."""

from __future__ import annotations

import io
import sys

import pytest

from distribax.coordinator.printing import MOST_CHARACTERS, PrintCapture, show_printed


def test_prints_are_kept_and_logged(capsys: pytest.CaptureFixture[str]) -> None:
    printed = PrintCapture()
    with printed.capture():
        print("one")
        sys.stdout.writelines(["two\n", "thr"])
        assert sys.stdout.encoding and not sys.stdout.isatty()
        assert printed.take(whole_lines=True) == "one\ntwo\n"
        print("ee", flush=True)
    assert printed.take() == "three\n" and printed.take() == ""
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


def test_what_is_kept_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    printed = PrintCapture()
    for _ in range(2):
        with printed.capture():
            for _ in range(3):
                print("x" * (MOST_CHARACTERS // 2), end="")
        text = printed.take(whole_lines=True)
        assert text.startswith("x" * MOST_CHARACTERS + "\n... and 50000 more characters")
    assert capsys.readouterr().out == "x" * (3 * MOST_CHARACTERS)


def test_the_name_of_the_worker_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show_printed(3, "a\n\nb")
    assert capsys.readouterr().out == "worker 3: a\nworker 3: \nworker 3: b\n"
    closed = io.StringIO()
    closed.close()
    for nowhere in (closed, None):
        monkeypatch.setattr(sys, "stdout", nowhere)
        show_printed(3, "a\n")
