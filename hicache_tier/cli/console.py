"""The console that results are printed on."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console


class ResultConsole(Console):
    """Console that leaves it to the command group to end where nobody reads stdout any more."""

    def on_broken_pipe(self) -> NoReturn:
        """Raise what rich would turn into exit code 1."""
        raise BrokenPipeError
