"""`hicache-tier verify`: every record and every checksum of a store."""

from __future__ import annotations

from typing import Any

import click

from .app import FINDING
from .key import key_option
from .output import count, json_option, print_json, progress, show, table

_REMARKS = {
    "prefix_loss": ("sound page", "to which no prefix leads any more, because of the damaged ones"),
    "unfinished": ("slot", "in the middle of a write, which no reader takes for a page"),
    "changed": ("page", "changed while being looked at"),
}


@click.command("verify", short_help="Check every record and checksum of a store.")
@click.argument("root", type=click.Path(exists=True, file_okay=False))
@key_option
@json_option
@click.pass_context
def command(ctx: click.Context, root: str, encryption: str | None, as_json: bool) -> None:
    """Read every record and page of the store at ROOT and check them; change nothing.

    Says what is damaged and what that costs. Pages of an encrypted store can only be verified with its key.
    Exit code 1 where something is damaged, and where for lack of a key no page could be verified.
    """
    from hicache_tier_storage.inspection import verify_root

    with progress("verifying", "pages") as report:
        found = verify_root(root, progress=report, encryption=encryption)
    locked = 0 if encryption else _locked(root, found)
    if as_json:
        print_json(found)
    else:
        _show(root, found, locked)
    if found["damaged"] or (locked and found["unverifiable"] == found["pages"]):
        ctx.exit(FINDING)


def _locked(root: str, found: dict[str, Any]) -> int:
    """Count the pages that were not verified because they are encrypted."""
    from hicache_tier_storage.survey import survey

    if not found["unverifiable"]:
        return 0
    encrypted = {space.name for space in survey(root).namespaces if space.identity.get("encryption")}
    return sum(part["unverifiable"] for part in found["partitions"] if part["namespace"] in encrypted)


def _show(root: str, found: dict[str, Any], locked: int) -> None:
    from rich.text import Text

    details = found.get("details", [])
    if details:
        show(table("Damage", ("where", "what"), ((d["where"], d["what"]) for d in details)))
    checked = f"{count(found['pages'], 'page')} of {root} checked: "
    unverified = found["unverifiable"]
    if found["damaged"]:
        one = found["damaged"] == 1
        fate = f"; {'it is' if one else 'they are'} not served, but computed again"
        show(Text.assemble(checked, (f"{found['damaged']} damaged", "bold red"), fate))
    elif unverified:
        verified = f"{found['pages'] - unverified} of {count(found['pages'], 'page')} of {root} verified"
        show(Text.assemble((verified, "bold yellow"), ", none damaged"))
    else:
        show(Text.assemble(checked, ("all good", "bold green")))
    if locked:
        show(f"{locked} not verified: encrypted, and --key-file was not given")
    if unverified > locked:
        show(f"{unverified - locked} not verified: stored without a checksum")
    for name, (noun, remark) in _REMARKS.items():
        if found.get(name):
            show(f"{count(found[name], noun)} {remark}")
