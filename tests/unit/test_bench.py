"""`distribax bench`: sides that take turns, charts, and reports that can be read again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from distribax.cli import main
from distribax.cli.bench import command, harness, peer_libraries, png
from distribax.cli.bench.cases.case import Case, Contest, select_available
from distribax.cli.bench.cases.steps import SCALING
from distribax.cli.bench.charts import Chart, Point, Series, draw, format_bytes, format_value
from distribax.cli.bench.figures import Report
from distribax.cli.bench.harness import BenchSettings, Measurement, Side
from tests.conftest import RunFresh

SIDE = """
import sys
from serve import serve
if sys.argv[1:] == ["fails"]:
    raise SystemExit("no such library")
serve(lambda steps: {"loss": float(steps)})
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program to measure."""
    (tmp_path / "parts" / "sides").mkdir(parents=True)
    (tmp_path / "parts" / "sides" / "small.py").write_text(SIDE)
    folders = [harness.side_folders[0], tmp_path / "parts" / "sides"]
    monkeypatch.setattr(harness, "side_folders", folders)
    return tmp_path


def _plan(settings: BenchSettings, folder: str) -> list[Contest]:
    sides = [
        Side("one", "small"),
        Side("two", "small"),
        Side("broken", "small", ("fails",)),
        Side("peer", "small", peer="no_such_library"),
    ]
    return [Contest("a <title>", sides, steps=3, rounds=2, warmup=1, unit="steps/s", amount=3)]


@pytest.mark.multiprocess
def test_sides_take_turns_and_the_report_is_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case("small", "a small case", _plan)
    assert case.count_turns(BenchSettings()) == 4 + 2
    monkeypatch.setattr(command, "CASES", {"small": case})
    monkeypatch.setenv(peer_libraries.FOLDER_VARIABLE, str(folder / "peers"))
    files = [folder / "out" / name for name in ("b.json", "b.html", "b.svg")]
    options = ["--json", str(files[0]), "--html", str(files[1]), "--svg", str(files[2])]
    assert main(["bench", "--quick", *options]) == 1, "two sides could not run"
    shown = capsys.readouterr()
    assert "small: a <title>" in shown.out and "steps/s [quartiles]" in shown.out
    assert "no such library" in shown.out and "no_such_library is not installed" in shown.out
    assert "distribax bench: small: starting two ...\n" in shown.err
    assert "distribax bench: small: round 2 of 2 ...\n" in shown.err
    assert "broken ended while it started: no such library" in shown.out
    (report,) = json.loads(files[0].read_text())["reports"]
    assert {name: len(times) for name, times in report["samples"].items()} == {"one": 2, "two": 2}
    assert "a &lt;title&gt;" in files[1].read_text()
    drawn = files[2].read_text()
    assert {"one", "two"} <= {text.text for text in ElementTree.fromstring(drawn).iter()}
    again = folder / "again.svg"
    main(["bench", "--from", str(files[0]), "--svg", str(again)])
    assert again.read_text() == drawn
    assert main(["bench", "other", "--devices", "2"]) == 2
    assert "no such case: other; there are small" in capsys.readouterr().err
    assert main(["bench", "--devices", "0"]) == 2
    assert "--devices=0" in capsys.readouterr().err
    assert main(["bench", "--from", str(folder / "missing.json")]) == 1
    assert "missing.json" in capsys.readouterr().err


def test_charts_can_be_png(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(__file__).parents[2] / "docs" / "images" / "bench.json"
    chart = tmp_path / "pictures" / "bench.png"
    command_line = ["bench", "--from", str(source), "ps", "--png", str(chart)]
    if any(shutil.which(name) for name in png.BROWSERS):
        assert main(command_line) == 0
        assert "parameter-server training" in capsys.readouterr().out, "a case of a file"
        assert chart.read_bytes().startswith(b"\x89PNG")
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\necho no display >&2\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(command_line) == 1
    assert "has drawn nothing: no display" in capsys.readouterr().err
    broken.unlink()
    assert main(command_line) == 1
    assert "needs a browser to draw with: chromium, " in capsys.readouterr().err


def test_a_library_has_one_colour_in_all_charts() -> None:
    names = ("JAX by hand", "distribax", "AllReduce", "HierarchicalCopy")
    bars = [Chart("one", "s", "bars"), Chart("two", "s", "bars")]
    for chart, shown in zip(bars, (names, names[1:2]), strict=True):
        chart.series += [Series(name, [Point(0, 1, 1, 1)]) for name in shown]
    boxes = [each for each in ElementTree.fromstring(draw(bars)).iter() if "rect" in each.tag]
    colours = [box.get("fill") for box in boxes]
    assert colours[1] == colours[4] and len(set(colours[:4])) == 4


def test_what_was_measured_before_ctrl_c_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(report: Report, contest: Contest, outcome: Measurement) -> None:
        raise KeyboardInterrupt

    first = Case("first", "one", lambda settings, folder: [])
    contest = Contest("two", [], steps=1, rounds=0, warmup=0, show=stop)
    second = Case("second", "two", lambda settings, folder: [contest])
    monkeypatch.setattr(command, "CASES", {"first": first, "second": second})
    assert main(["bench"]) == 1
    assert "stopped by Ctrl-C" in capsys.readouterr().out


def test_charts_are_pictures_that_can_be_read() -> None:
    lines = Chart("time", "µs", "lines", "size", is_log=True, is_in_bytes=True)
    lines.series.append(Series("a & b", [Point(1024, 5, 4, 6), Point(1 << 20, 500, 400, 600)]))
    linear = Chart("rate", "1/s", "lines", "devices")
    linear.series.append(Series("c", [Point(1, 10.0, 9, 11), Point(2, 700.0, 19, 21)]))
    picture = ElementTree.fromstring(draw([lines, linear, Chart("nothing", "s", "bars")]))
    texts = {each.text for each in picture.iter()}
    assert {"a & b", "1 KiB", "1 MiB", "10", "100", "size", "time (µs)", "nothing (s)"} <= texts
    circles = [each for each in picture.iter() if each.tag.endswith("circle")]
    assert len(circles) == 4
    assert all(0 <= float(each.get("cx", "-1")) <= 720 for each in circles)
    assert [format_value(x) for x in (0.5, 12, 1234, 2.5e6, 3e9)] == [
        *("0.5", "12", "1.23 k", "2.5 M", "3 G"),
    ]
    assert [format_bytes(x) for x in (8, 1 << 30)] == ["8 B", "1 GiB"]


def test_peers_are_found_and_others_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(peer_libraries.FOLDER_VARIABLE, str(tmp_path))
    assert peer_libraries.find_python("no_such_library") is None
    (tmp_path / "no_such_library").mkdir()
    (tmp_path / "no_such_library" / "requirements.txt").write_text("x")
    made = tmp_path / "no_such_library" / "bin" / "python"
    assert peer_libraries.find_python("no_such_library") == made
    assert peer_libraries.find_python("json") is not None, "this interpreter has it"
    sides = [Side("a", "small"), Side("b", "small", peer="other_library")]
    assert [side.name for side in select_available(sides)] == ["a"]
    with pytest.raises(ValueError, match="unknown peer 'pandas'"):
        peer_libraries.make("pandas")
    monkeypatch.delenv(peer_libraries.FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert peer_libraries.find_folder() == tmp_path / "cache" / "distribax" / "peers"
    assert SCALING.count_turns(BenchSettings(quick=True, max_devices=4)) == 2 * 3 + 3


@pytest.mark.multiprocess
def test_the_repository_s_benchmarks_find_what_they_share(run_forked: RunFresh) -> None:
    program = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from benchmarks.run import CASES
        from distribax.cli.bench.harness import Side, interleave
        outcome = interleave([Side("a", "imports", ("json",))], steps=1, rounds=1, warmup=1)
        print(len(CASES) > 10, outcome.failures)
    """
    assert run_forked(program) == "True []"


@pytest.mark.multiprocess
def test_all_reduce_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    code = main(["bench", "all_reduce", "--quick", "--devices", "2", "--json", str(path)])
    assert code == 0, capsys.readouterr().out
    (report,) = json.loads(path.read_text())["reports"]
    latency, bandwidth = report["charts"]
    names = [series["name"] for series in latency["series"]]
    assert "JAX by hand (psum)" in names and "ReductionToOneDevice" in names
    assert bandwidth["series"][-1]["name"] == "memory copy (limit)"
    assert all(point["value"] > 0 for series in bandwidth["series"] for point in series["points"])
