"""What an engine is: something that says whether it can run a plan, prepares it, and submits it in parts.

Preparing checks the plan and uploads what the device needs, once. Submitting only enqueues work on a stream,
so that one plan can be submitted layer by layer. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from hicache_tier.errors import InvalidArgumentError

from .driver import DriverError, driver
from .memo import PairMemo
from .support import Support

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .plan import CopyPlan, RowMap


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of engines.

    Attributes
    ----------
    max_sms : int, optional
        Multiprocessors that a kernel which reads or writes host memory may take; where left out, as many as
        measured best on an H200 (`READ` and `WRITE` of the engine `cuda`).
    check_indices : bool
        Whether page numbers that are on the device are checked there.
    """

    max_sms: int | None = None
    check_indices: bool = True

    def __post_init__(self) -> None:
        if self.max_sms is not None and self.max_sms < 1:
            raise InvalidArgumentError(f"max_sms must be above 0, got {self.max_sms}.")


DEFAULTS = EngineOptions()


class Prepared(Protocol):
    """A plan, ready to be submitted; holds all that the device reads until it is dropped.

    Attributes
    ----------
    by_layer : bool
        Whether planes may be submitted a few at a time; all at once where not.
    streams : int
        Streams that submissions of different planes can use side by side with a gain.
    """

    by_layer: bool
    streams: int

    def seconds(self, planes: Sequence[int]) -> float:
        """Return about how long `submit` will keep the calling thread."""

    def submit(self, planes: Sequence[int], stream: torch.cuda.Stream) -> None:
        """Enqueue the copy of some planes; they may be submitted again, also by other threads."""

    def fault(self) -> Exception | None:
        """Return what the device found wrong; call it after the work is done."""


class Engine(Protocol):
    """Runs copy plans between a device and memory that it can reach.

    Attributes
    ----------
    name : str
    cheap : bool
        Whether preparing and submitting cost microseconds, so that the caller's own thread may do it.
    """

    name: ClassVar[str]
    cheap: ClassVar[bool]

    def available(self, device: torch.device) -> Support:
        """Return whether the engine can run on a device at all."""

    def supports(self, plan: CopyPlan) -> Support:
        """Return whether the engine can run this plan."""

    def prepare(self, plan: CopyPlan, stream: torch.cuda.Stream, options: EngineOptions = ...) -> Prepared:
        """Check the plan and upload what it needs on `stream`; later submissions come after it there.

        Raises
        ------
        InvalidArgumentError
            Where the stream belongs to another device.
        EngineUnavailableError
            Where `supports` says no.
        """


def cuda_device(plan: CopyPlan) -> torch.device | None:
    """Return the CUDA device of a plan, or None where neither side is on one."""
    for side in (plan.source.device, plan.destination.device):
        if side.type == "cuda":
            return side
    return None


def far_side(plan: CopyPlan) -> RowMap:
    """Return the device's side."""
    return plan.source if plan.source.device.type == "cuda" else plan.destination


def near_side(plan: CopyPlan) -> RowMap:
    """Return the host's side."""
    return plan.destination if plan.source.device.type == "cuda" else plan.source


def to_host(plan: CopyPlan) -> bool:
    """Return whether the plan is a backup."""
    return plan.destination.device.type == "cpu"


def driver_support() -> Support:
    """Return whether there is a driver."""
    try:
        return Support(ok=True, reason=f"driver {driver().version}")
    except DriverError as error:
        return Support(ok=False, reason=str(error))


def reachable(plan: CopyPlan) -> Support:
    """Return whether one side is on a CUDA device and the other in host memory that it can reach."""
    return _reachable(plan.source, plan.destination)


def _reach(source: RowMap, destination: RowMap) -> Support:
    near, far = (destination, source) if source.device.type == "cuda" else (source, destination)
    if far.device.type != "cuda":
        return Support(ok=False, reason="neither side is on a CUDA device")
    if near.device.type != "cpu":
        return Support(
            ok=False, reason=f"copies go between host and device, not {far.device} and {near.device}"
        )
    if not near.pinned:
        return Support(ok=False, reason="host memory is not pinned")
    return Support(ok=True)


_reachable = PairMemo(_reach)


def new_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """Make a stream; a negative priority goes before others."""
    import torch

    return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]


def new_event() -> torch.cuda.Event:
    """Make an event."""
    import torch

    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def check_stream(plan: CopyPlan, stream: torch.cuda.Stream) -> None:
    """Refuse a stream of another device, and the default stream, which batches of copies do not take."""
    device = cuda_device(plan)
    if stream.device != device:
        raise InvalidArgumentError(f"the stream is of {stream.device}, the plan's device is {device}.")
    if not stream.cuda_stream:
        raise InvalidArgumentError("transfers need a stream of their own, not the default stream.")
