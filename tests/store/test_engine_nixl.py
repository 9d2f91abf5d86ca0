"""The engine `nixl`, with the real package, in every queue and mode passes the suite that ships."""

from __future__ import annotations

import pytest

from hicache_tier.testing.engine import ByteEngineSuite
from hicache_tier_storage.nixl_engine import NixlEngine
from hicache_tier_storage.nixl_package import why_no_nixl

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(bool(why_no_nixl()), reason=why_no_nixl()),
]


class TestAioBuffered(ByteEngineSuite):
    def make_engine(self, directory):
        return NixlEngine(direct=False, queue="aio", threads=2, min_piece_nbytes=1)


class TestAioDirect(ByteEngineSuite):
    def make_engine(self, directory):
        return NixlEngine(direct=True, queue="aio", threads=2, min_piece_nbytes=1)


class TestUringBuffered(ByteEngineSuite):
    def make_engine(self, directory):
        return NixlEngine(direct=False, queue="io_uring", threads=2, min_piece_nbytes=1)


class TestUringDirect(ByteEngineSuite):
    def make_engine(self, directory):
        return NixlEngine(direct=True, queue="io_uring", threads=1)
