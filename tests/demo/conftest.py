from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="the demo needs transformers (extra `demo`)")


@pytest.fixture(scope="session")
def demo():
    """Run the command as a user does, in processes of its own; return exit code, JSON, and what it said."""

    def run(*arguments, timeout=300):
        # Passive: on a machine with other work, threads that spin at barriers make it many times slower.
        environment = dict(os.environ, HF_HUB_OFFLINE="1", OMP_WAIT_POLICY="PASSIVE")
        command = [sys.executable, "-m", "hicache_tier", "demo", *map(str, arguments), "--json"]
        out = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
        return out.returncode, json.loads(out.stdout) if out.stdout else None, out.stderr

    return run
