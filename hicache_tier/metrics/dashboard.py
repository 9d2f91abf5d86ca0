"""The Grafana dashboard that ships with the package."""

from __future__ import annotations

from importlib.resources import files


def dashboard_text() -> str:
    """Return the dashboard as Grafana imports it: one JSON document."""
    return files("hicache_tier.metrics").joinpath("dashboard.json").read_text(encoding="utf-8")
