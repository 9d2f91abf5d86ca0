"""`hicache-tier probe DIR`: which byte engines work for a directory."""

from __future__ import annotations

import click

from .app import FINDING
from .output import json_option, mark, print_json, show, table


@click.command("probe", short_help="Show which byte engines work for a directory.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False))
@json_option
@click.pass_context
def command(ctx: click.Context, directory: str, as_json: bool) -> None:
    """Try the byte engines and their modes in DIRECTORY; say why those that fail do not work.

    Writes a small temporary file there and removes it. Exit code 1 where no engine works.
    """
    from hicache_tier_storage.probe import probe

    rows = [dict(row) for row in probe(directory)]
    if as_json:
        print_json(rows)
    else:
        cells = (
            (row["engine"], row["mode"], mark(row["usable"]), mark(row["chosen"]), row["reason"] or "")
            for row in rows
        )
        show(table(f"Byte engines for {directory}", ("engine", "mode", "usable", "chosen", "reason"), cells))
    if not any(row["usable"] for row in rows):
        ctx.exit(FINDING)
