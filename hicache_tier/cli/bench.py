"""`hicache-tier bench`: throughput tests; each lives in a module of `hicache_tier.bench` with a `command`."""

from __future__ import annotations

import importlib.util
from importlib import import_module

import click

from .near import NearGroup

_HOME = "hicache_tier.bench"
_BENCHES = ("archive", "replay", "sglang", "storage", "transfer")


class BenchGroup(NearGroup):
    """Group of the benchmarks that this version has."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the benchmarks."""
        del ctx
        if importlib.util.find_spec(_HOME) is None:
            return []
        return [name for name in _BENCHES if importlib.util.find_spec(f"{_HOME}.{name}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one benchmark."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command = import_module(f"{_HOME}.{cmd_name}").command
        return command if isinstance(command, click.Command) else None


@click.group("bench", cls=BenchGroup, short_help="Measure throughput.")
def command() -> None:
    """Measure throughput, as ratios to a bare loop over the same hardware in the same run."""
