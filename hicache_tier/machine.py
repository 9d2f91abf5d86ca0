"""What this machine can do, as the path table asks it."""

from __future__ import annotations

from functools import cache

import torch

from hicache_tier_kernels import Support, engines

from .paths import Capabilities, Offer

_PLAIN = "torch; host memory is plain, so no engine of the device can reach it"


def default_device() -> torch.device:
    """Return the current CUDA device, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@cache
def machine_capabilities(device: torch.device, *, pinned: bool = True) -> Capabilities:
    """Return which engines move pages between a device and host pools.

    Parameters
    ----------
    device : torch.device
        Of the device pool. On the CPU the reference engine does all.
    pinned : bool
        Whether the host pool is pinned. Plain memory is out of a device's reach: the reference engine stages
        it, at a fraction of the speed.
    """
    if device.type != "cuda":
        return Capabilities.reference()
    if not pinned:
        offers = (Offer("reference", Support(ok=True, reason=_PLAIN)),)
        return Capabilities(offers, offers, offers)
    found = {name: Offer(name, engine.available(device)) for name, engine in engines().items()}
    kernels = tuple(found[name] for name in ("cuda", "staged"))
    return Capabilities(kernels, kernels, (found["copy_engine"], found["staged"]))
