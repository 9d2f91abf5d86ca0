"""The store against peers that hold the same pages, all in turn."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .page_cache import Cache, drop, settle, write_out
from .timing import Contestant, ratio, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .peers import Peer, PeerKind
    from .storage_rig import StorageRig


def against(rig: StorageRig, kinds: Sequence[PeerKind], repeats: int) -> list[dict[str, Any]]:
    """Time put and get of the store and of peers; the bytes of each peer are checked first."""
    shape = rig.shape
    with ExitStack() as closing:
        peers: dict[str, Peer] = {}
        for kind in kinds:
            peer = kind.make(rig.folder / kind.name, shape, rig.buffers, rig.spare_buffers)
            closing.callback(peer.close)
            peers[kind.name] = peer
            _check(rig, kind.name, peer)
        slabs = sorted({path for path, _ in rig.slots()})
        cold = shape.cache is not Cache.WARM
        put = take_turns(
            [
                Contestant("store", rig.settled(rig.put, slabs), _emptying(rig, rig.clear, lambda: slabs)),
                *(
                    Contestant(name, _writing(peer, cold=cold), _emptying(rig, peer.remove, peer.files))
                    for name, peer in peers.items()
                ),
            ],
            repeats,
        )
        get = take_turns(
            [
                Contestant("store", rig.get, rig.dropping(slabs)),
                *(Contestant(name, peer.read, _dropping(peer, cold=cold)) for name, peer in peers.items()),
            ],
            repeats,
        )
    nbytes = shape.case.nbytes
    return [
        {
            "peer": name,
            "direction": direction,
            **shape.as_row(),
            "peer_cache": (peer.cache if cold else Cache.WARM).value,
            "gb_s": nbytes / samples["store"].seconds / 1e9,
            "peer_gb_s": nbytes / samples[name].seconds / 1e9,
            "ratio_to_peer": ratio(samples["store"].wall, samples[name].wall),
        }
        for name, peer in peers.items()
        for direction, samples in (("put", put), ("get", get))
    ]


def _emptying(
    rig: StorageRig, remove: Callable[[], None], files: Callable[[], list[Path]]
) -> Callable[[], None]:
    """Remove the pages, their files from memory too, and wait until the disk is at rest.

    What was read before lies in memory in other pieces than what was written, which makes a write over it
    slower; files made and deleted keep the disk busy for a while.
    """

    def empty() -> None:
        remove()
        rig.drop([path for path in files() if path.exists()])
        settle(rig.folder)

    return empty


def _check(rig: StorageRig, name: str, peer: Peer) -> None:
    peer.write()
    rig.blank_spare()
    peer.read()
    if peer.moves_pages:
        rig.compare(name, range(rig.shape.case.pages))


def _writing(peer: Peer, *, cold: bool) -> Callable[[], float | None]:
    """Have the clock stop when the device has the bytes; who measures itself sees to that itself."""

    def write() -> float | None:
        seconds = peer.write()
        if cold and seconds is None and peer.cache is Cache.DROPPED:
            write_out(peer.files())
        return seconds

    return write


def _dropping(peer: Peer, *, cold: bool) -> Callable[[], None] | None:
    return (lambda: drop(peer.files())) if cold and peer.cache is Cache.DROPPED else None
