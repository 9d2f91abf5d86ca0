"""The command `hicache-tier`."""

from .app import main

__all__ = ["main"]
