"""How the command ends, whatever happens in a verb."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from hicache_tier import __version__
from hicache_tier.cli import app
from hicache_tier.errors import InvalidArgumentError, StoreError

SLEEPER = """
import time, click
from hicache_tier.cli import app

def sleep():
    print("up", flush=True)
    time.sleep(60)

app.App.get_command = lambda *_: click.Command("x", callback=sleep)
app.main(["x"])
"""
COMMAND = [sys.executable, "-m", "hicache_tier"]


@pytest.fixture
def verb(monkeypatch):
    """Replace the verb `paths` by one that does what the test says."""

    def install(action):
        monkeypatch.setattr(
            app.App, "get_command", lambda *_: click.Command("paths", callback=action, help="Test.")
        )

    return install


def raising(error):
    def action():
        raise error

    return action


def test_help_lists_every_verb_with_a_whole_sentence(invoke):
    result = invoke("--help")
    assert result.exit_code == 0
    for name in app._VERBS:
        (line,) = [line for line in result.output.splitlines() if line.startswith(f"  {name} ")]
        assert line.endswith("."), line
        assert not line.endswith("..."), line


@pytest.mark.parametrize("name", sorted(app._VERBS))
def test_each_verb_has_help_and_json(invoke, name):
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert "--json" in result.output or name == "bench"


def test_version(invoke):
    assert __version__ in invoke("--version").output


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["paths", "--nonsense"], ["inspect"], ["demo", "--layout", "x"]]
)
def test_wrong_usage_is_2(invoke, arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["imprt"], "No such command 'imprt'. Did you mean 'import'?"),
        (["bench", "strage"], "No such command 'strage'. Did you mean 'storage'?"),
        (["zzz"], "Allowed: bench, dashboard, demo"),
        (["--json", "inspect"], "--json goes after the command"),
        (["--nonsense"], "No such option"),
        (["demo", "--io-backend", "kernal"], "'auto', 'kernel', 'direct'"),
        (["bench", "storage", "--layout", "page"], "'layer_first', 'page_first'"),
        (["bench", "replay", "--layout", "page"], "'layer_first', 'page_first'"),
    ],
)
def test_what_was_meant_is_suggested(invoke, arguments, said):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InvalidArgumentError("layout 'x' is\n  not known."), "layout 'x' is not known."),
        (StoreError("is damaged"), "is damaged"),
        (PermissionError(13, "Permission denied", "/some/where"), "Permission denied: /some/where"),
        (click.ClickException("no"), "no"),
    ],
)
def test_an_error_is_one_line_and_2(invoke, verb, error, said):
    verb(raising(error))
    result = invoke("paths")
    assert result.exit_code == 2
    assert result.stderr == f"hicache-tier: {said}\n"
    assert not result.stdout


def test_interrupt_is_130(invoke, verb):
    verb(raising(KeyboardInterrupt()))
    result = invoke("paths")
    assert result.exit_code == 130
    assert result.stderr.strip().splitlines()[-1] == "hicache-tier: interrupted"


def test_a_bug_keeps_its_traceback(verb):
    verb(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        app.main.main(["paths"])


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_goes_away_is_no_error(form):
    process = subprocess.Popen(
        [*COMMAND, "paths", *form], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 141
    assert said == b""


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_full_disk_is_one_line(form):
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [*COMMAND, "paths", *form], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert run.returncode == 2
    assert run.stderr == "hicache-tier: [Errno 28] No space left on device\n"


def test_a_closed_stdout_is_no_error():
    run = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *COMMAND, "paths"], stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_ctrl_c_on_a_real_process(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout.readline() == "up\n"
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said


def test_python_m_and_the_console_script_are_one():
    out = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == f"hicache-tier, version {__version__}"
