"""All engines by name."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from hicache_tier.errors import EngineUnavailableError, not_known

from .copy_engine import CopyEngine
from .cuda import CudaEngine
from .engine import cuda_device, new_stream
from .staged import StagedEngine

if TYPE_CHECKING:
    import torch

    from .engine import Engine
    from .plan import CopyPlan


@cache
def engines() -> dict[str, Engine]:
    """Return the engines that run on CUDA devices, by name."""
    made: tuple[Engine, ...] = (CudaEngine(), StagedEngine(), CopyEngine())
    return {engine.name: engine for engine in made}


def engine_named(name: str) -> Engine:
    """Return one engine; raises `InvalidArgumentError` for a name that is not known."""
    try:
        return engines()[name]
    except KeyError:
        raise not_known("engine", name, list(engines())) from None


def run_plan(name: str, plan: CopyPlan, stream: torch.cuda.Stream | None = None) -> None:
    """Run a plan by one engine from start to end: for tests and measurements.

    Raises
    ------
    EngineUnavailableError
        Where the engine cannot run it.
    """
    import torch

    device = cuda_device(plan)
    if device is None:
        raise EngineUnavailableError(f"{name}: neither side is on a CUDA device.")
    if stream is None:
        stream = new_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
    prepared = engine_named(name).prepare(plan, stream)
    prepared.submit(range(len(plan.source.planes)), stream)
    stream.synchronize()
    fault = prepared.fault()
    if fault is not None:
        raise fault
