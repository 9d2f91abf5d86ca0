"""Streams and events of torch, with types."""

from __future__ import annotations

import torch


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream of a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def new_event() -> torch.cuda.Event:
    """Return an event that keeps the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def has_passed(event: torch.cuda.Event) -> bool:
    """Return whether a recorded event has taken place."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def seconds_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Return the seconds from one event to another; both must have taken place."""
    return float(start.elapsed_time(end)) / 1e3
