"""The option that names the key of an encrypted store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable


def key_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--key-file`, passed on as `encryption`: what `open_store` takes, or None."""
    option = click.option(
        "--key-file",
        "encryption",
        metavar="FILE",
        envvar="HICACHE_TIER_KEY_FILE",
        help="Key of an encrypted store: a file of 64 hex digits, or env:NAME for an environment variable "
        "that holds them.",
    )
    return option(function)
