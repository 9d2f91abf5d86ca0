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

    Says what is damaged and what that costs. Encrypted pages can only be verified with their key.
    Exit code 1 where something is damaged, and where for lack of a key no page could be verified.
    """
    from hicache_tier_storage.inspection import verify_root

    with progress("verifying", "pages") as report:
        found = verify_root(root, progress=report, encryption=encryption)
    if as_json:
        print_json(found)
    else:
        why = "with another key than that of --key-file" if encryption else "and --key-file was not given"
        _show(root, found, why)
    if found["damaged"] or (found["locked"] and found["unverifiable"] == found["pages"]):
        ctx.exit(FINDING)


def _show(root: str, found: dict[str, Any], why_locked: str) -> None:
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
    locked = found["locked"]
    if locked:
        show(f"{locked} not verified: encrypted, {why_locked}")
    if unverified > locked:
        show(f"{unverified - locked} not verified: stored without a checksum")
    for name, (noun, remark) in _REMARKS.items():
        if found.get(name):
            show(f"{count(found[name], noun)} {remark}")
