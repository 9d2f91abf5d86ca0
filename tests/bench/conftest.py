from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache_tier.cli import main

TRACES = Path(__file__).parents[3] / "shared" / "traces"


@pytest.fixture
def bench():
    """Run `hicache-tier bench ...` in this process; fails the test where a traceback would be shown."""

    def run(*arguments):
        result = CliRunner().invoke(main, ["bench", *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return result

    return run


@pytest.fixture
def conversation():
    """The production trace of conversations, where it is at hand."""
    path = TRACES / "conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip(f"{path.name} is not there: the production traces are no part of the repository")
    return path
