"""`hicache-tier dashboard`: the Grafana dashboard over the adapter's metrics."""

from __future__ import annotations

import json

import click

from .output import json_option


@click.command("dashboard", short_help="Print the Grafana dashboard.")
@json_option
def command(as_json: bool) -> None:
    """Print the dashboard as Grafana imports it: hicache-tier dashboard > dashboard.json."""
    from hicache_tier.metrics import dashboard_text

    del as_json  # it is JSON in any case
    click.echo(json.dumps(json.loads(dashboard_text()), indent=2))
