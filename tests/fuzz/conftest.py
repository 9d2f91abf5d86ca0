from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkout():
    return Path(__file__).resolve().parents[2]
