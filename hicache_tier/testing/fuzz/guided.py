"""Fuzzing led by coverage, through atheris: input that takes a new path is kept and changed on."""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .target import Target

ENTRY = """
import json, sys
import atheris
with atheris.instrument_imports(include=["hicache_tier", "hicache_tier_storage"]):
    from hicache_tier.testing.fuzz.guided import run
    from hicache_tier.testing.fuzz.target import targets
    targets()  # imports what is fuzzed
run(atheris, *json.loads(sys.argv[1]))
"""


def run(  # noqa: PLR0917 - as they come from the command line
    atheris: Any,  # noqa: ANN401 - an optional package
    name: str,
    seconds: float,
    seed: int,
    corpus: str,
    findings: str,
) -> None:
    """Fuzz one target until the time is over, or something is found; ends the process.

    What was found is in `findings`, in a file named after the target. Exit code 77 says so.
    """
    from .target import targets

    target: Target = targets()[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder, pool = Path(scratch) / "files", Path(scratch) / "pool"
        folder.mkdir()
        pool.mkdir()
        known = [path.read_bytes() for path in sorted(Path(corpus, name).glob("*"))]
        for number, data in enumerate([*target.seeds(folder), *known]):
            (pool / f"{number}").write_bytes(data)

        def one(data: bytes) -> None:
            try:
                target.read(data, folder)
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
                print(f"{name}: {where}: {error}")
                raise

        options = [
            f"-max_total_time={seconds:.0f}",
            f"-seed={seed}",
            f"-artifact_prefix={findings}/{name}-",
            "-max_len=16384",
            "-rss_limit_mb=4096",
            "-malloc_limit_mb=1024",
            "-timeout=60",
            "-verbosity=0",
            "-print_final_stats=1",
        ]
        atheris.Setup([sys.argv[0], *options, str(pool)], one)
        atheris.Fuzz()
