"""Command groups that suggest the command that was meant."""

from __future__ import annotations

import difflib

import click


class NearGroup(click.Group):
    """Group that answers a name that it does not know with the nearest one that it does."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; raise `click.UsageError` with the nearest name, or all of them."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            allowed = self.list_commands(ctx)
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Allowed: {', '.join(allowed)}."
            raise click.UsageError(f"No such command {name!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)
