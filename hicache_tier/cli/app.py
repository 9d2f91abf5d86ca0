"""The command group: verbs found by name, imported when asked for, and one way to end.

Exit codes: 0 good, 1 a finding (damage, tokens that differ), 2 a wrong call or an error of this package,
130 after Ctrl-C. Errors of this package are one line on stderr. Anything else that escapes is a bug and keeps
its traceback.
"""

from __future__ import annotations

import io
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from hicache_tier import __version__
from hicache_tier.errors import HiCacheTierError

from .near import NearGroup
from .output import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

FINDING = 1
USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
_MOST_SAID = 4000  # what is wrong with a file may quote as much of it as there is

_VERBS = {
    "bench": "hicache_tier.cli.bench",
    "dashboard": "hicache_tier.cli.dashboard",
    "demo": "hicache_tier.cli.demo",
    "doctor": "hicache_tier.cli.doctor",
    "export": "hicache_tier.cli.export",
    "import": "hicache_tier.cli.import_archive",
    "inspect": "hicache_tier.cli.inspect_store",
    "paths": "hicache_tier.cli.paths",
    "probe": "hicache_tier.cli.probe",
    "verify": "hicache_tier.cli.verify_store",
}


def _say_json(message: str, kind: str, args: Sequence[str] | None) -> None:
    """Print an error as an object on stdout for those who asked for JSON.

    The error may be stdout's own, such as that of a full disk: what cannot be written is then given up.
    """
    try:
        if "--json" in (sys.argv[1:] if args is None else args):
            click.echo(json.dumps({"error": {"kind": kind, "message": message}}))
        sys.stdout.flush()
    except OSError:
        _drop_stdout()


def _fail(message: str, kind: str, args: Sequence[str] | None) -> NoReturn:
    """End with one line."""
    line = visible(" ".join(message.split()))
    line = line if len(line) <= _MOST_SAID else f"{line[:_MOST_SAID]}..."
    _say_json(line, kind, args)
    click.echo(f"hicache-tier: {line}", err=True)
    sys.exit(USAGE)


class App(NearGroup):
    """Group whose verbs live in modules of their own, each with an attribute `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all verbs."""
        del ctx
        return sorted(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one verb."""
        del ctx
        home = _VERBS.get(cmd_name)
        if home is None:
            return None
        command = import_module(home).command
        return command if isinstance(command, click.Command) else None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before the verb; `--json` is every verb's own."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name != "--json":
                raise
            raise click.UsageError(
                "--json goes after the command, such as: hicache-tier inspect ROOT --json", ctx
            ) from error

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's signature
        """Run a verb; where nobody reads its output any more, end before click takes that for a failure."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _end_without_reader()

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = "hicache-tier",
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,  # noqa: ANN401 - click's signature
    ) -> Any:  # noqa: ANN401 - click's signature
        """Run a command line; in standalone mode end the process with the right exit code."""
        extra["windows_expand_args"] = windows_expand_args
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        _prepare_streams()
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.UsageError as error:
            _say_json(error.format_message(), "usage", args)
            error.show()
            sys.exit(USAGE)
        except click.ClickException as error:
            _fail(error.format_message(), "usage", args)
        except click.Abort:
            _say_json("interrupted", "interrupted", args)
            click.echo("hicache-tier: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            _end_without_reader()
        except HiCacheTierError as error:
            _fail(str(error), error.kind, args)
        except OSError as error:
            text = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
            _fail(text, "os", args)
        sys.exit(code if isinstance(code, int) else 0)


def _prepare_streams() -> None:
    """Have streams that take whatever is printed."""
    if sys.stdout is None:  # closed by the shell (`>&-`): verbs are still run for their exit code
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files need not be text
            stream.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Send what is still buffered for stdout nowhere, so that the interpreter's last flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_without_reader() -> NoReturn:
    """End quietly where the reader of stdout is gone (`hicache-tier inspect ROOT | head`)."""
    _drop_stdout()
    sys.exit(BROKEN_PIPE)


@click.group(cls=App, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="hicache-tier")
def main() -> None:
    """Storage tier for LLM KV caches: see it work, look into stores, check and measure them.

    Every verb takes --json. Exit codes: 0 good, 1 a finding, 2 wrong usage or an error.
    """
