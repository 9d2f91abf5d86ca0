"""`hicache-tier verify`: every record and every checksum of a store."""

from __future__ import annotations

from typing import Any

import click

from .app import FINDING
from .key import key_option
from .output import json_option, print_json, progress, show, table

_REMARKS = {
    "prefix_loss": "sound pages that no prefix leads to any more, because of the damaged ones",
    "unverifiable": "pages without a checksum, or encrypted with a key that was not given: not verified",
    "unfinished": "slots in the middle of a write, which no reader takes for pages",
    "changed": "pages that changed while they were looked at",
}


@click.command("verify", short_help="Check every record and checksum of a store.")
@click.argument("root", type=click.Path(exists=True, file_okay=False))
@key_option
@json_option
@click.pass_context
def command(ctx: click.Context, root: str, encryption: str | None, as_json: bool) -> None:
    """Read every record and page of the store at ROOT and check them; change nothing.

    Says what is damaged and what that costs. Exit code 1 where something is.
    """
    from hicache_tier_storage.inspection import verify_root

    with progress("verifying", "pages") as report:
        found = verify_root(root, progress=report, encryption=encryption)
    if as_json:
        print_json(found)
    else:
        _show(root, found)
    if found["damaged"]:
        ctx.exit(FINDING)


def _show(root: str, found: dict[str, Any]) -> None:
    from rich.text import Text

    details = found.get("details", [])
    if details:
        show(table("Damage", ("where", "what"), ((d["where"], d["what"]) for d in details)))
    text = f"{found['pages']} pages of {root} checked: "
    if found["damaged"]:
        one = found["damaged"] == 1
        fate = f"; {'it is' if one else 'they are'} not served, but computed again"
        show(Text.assemble(text, (f"{found['damaged']} damaged", "bold red"), fate))
    else:
        show(Text.assemble(text, ("all good", "bold green")))
    for name, remark in _REMARKS.items():
        if found.get(name):
            show(f"{found[name]} {remark}")
