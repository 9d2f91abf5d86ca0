"""What cannot be measured or written is one line before anything is measured."""

from __future__ import annotations

import pytest

REPLAY = ("replay", "generated", "--requests", "3")
STORAGE = ("storage", "--case", "1x64KiB", "--slots", "0")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*REPLAY, "--seed", "-1"), "'--seed'"),
        ((*REPLAY, "--speed", "nan"), "not a finite number"),
        ((*REPLAY, "--speed", "inf"), "not a finite number"),
        ((*REPLAY, "--lookup-timeout", "1e300"), "0<x<=3600"),
        ((*REPLAY, "--host-size", "1e400GiB"), "not a size"),
        ((*STORAGE, "--link-gb-s", "nan"), "not a finite number"),
        ((*STORAGE, "--markdown", "nowhere/table.md"), "is no folder"),
        (("archive", "--size", "100PiB"), "are needed"),
        (("archive", "--size", "nothing"), "not a size"),
    ],
)
def test_what_cannot_be_is_refused(bench, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    result = bench(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("verb", [REPLAY, STORAGE, ("transfer",)])
@pytest.mark.parametrize(
    ("name", "said"), [("a.foo", "no kind of picture"), ("nowhere/a.png", "is no folder")]
)
def test_pictures_that_cannot_be_drawn_are_refused(bench, tmp_path, monkeypatch, verb, name, said):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    result = bench(*verb, "--plot", name)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not [*tmp_path.iterdir()]
