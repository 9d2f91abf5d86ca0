"""Counters and histograms for Prometheus, and a Grafana dashboard over them."""

from __future__ import annotations

from .dashboard import dashboard_text
from .exporter import Exporter
from .instruments import Instruments

__all__ = ["Exporter", "Instruments", "dashboard_text"]
