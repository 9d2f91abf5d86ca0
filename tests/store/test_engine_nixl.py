"""The engine `nixl`, with the real package, in every queue and mode passes the suite that ships."""

from __future__ import annotations

import pytest

from hicache_tier.testing.engine import ByteEngineSuite
from hicache_tier_storage.accelerators import nixl_posix
from hicache_tier_storage.nixl_engine import NixlEngine
from hicache_tier_storage.nixl_package import why_no_nixl

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(bool(why_no_nixl()), reason=why_no_nixl()),
]


def nixl(directory, queue, *, direct, **options):
    """Make an engine, or skip where the machine does not allow what it needs: nothing falls back unseen."""
    (found,) = [row for row in nixl_posix(directory, direct=direct) if row.mode == f"POSIX {queue}"]
    if not found.usable:
        pytest.skip(found.reason)
    return NixlEngine(direct=direct, queue=queue, **options)


class TestAioBuffered(ByteEngineSuite):
    def make_engine(self, directory):
        return nixl(directory, "aio", direct=False, threads=2, min_piece_nbytes=1)


class TestAioDirect(ByteEngineSuite):
    def make_engine(self, directory):
        return nixl(directory, "aio", direct=True, threads=2, min_piece_nbytes=1)


class TestUringBuffered(ByteEngineSuite):
    def make_engine(self, directory):
        return nixl(directory, "io_uring", direct=False, threads=2, min_piece_nbytes=1)


class TestUringDirect(ByteEngineSuite):
    def make_engine(self, directory):
        return nixl(directory, "io_uring", direct=True, threads=1)
