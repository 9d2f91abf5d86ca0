"""Fuzzing for a while: each target in a process of its own, which it may end; findings become files."""

from __future__ import annotations

import hashlib
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .guided import ENTRY
from .mutation import mutant

if TYPE_CHECKING:
    from collections.abc import Sequence

_MEMORY_NBYTES = 1 << 30
_GRACE_S = 60.0
_MOST_FINDINGS = 20


def fuzz(name: str, seconds: float, seed: int, corpus: Path, findings: Path) -> dict[str, Any]:
    """Fuzz one target in this process; return `{target, engine, runs, findings}`.

    An input that the target raises at is written to `findings`, one for each place in the code that raises.
    """
    from .target import targets

    target = targets()[name]
    rng, until, seen, runs = random.Random(seed), time.monotonic() + seconds, set[str](), 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        found = [path.read_bytes() for path in sorted((corpus / name).glob("*"))]
        seeds = [*target.seeds(folder), *found]
        _limit_memory()
        while time.monotonic() < until and len(seen) < _MOST_FINDINGS:
            data = mutant(seeds, rng)
            pending = findings / f"{name}-running"
            pending.write_bytes(data)  # left there where the process ends
            runs += 1
            try:
                target.read(data, folder)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
                if where not in seen:
                    seen.add(where)
                    digest = hashlib.sha256(data).hexdigest()[:16]
                    (findings / f"{name}-{digest}").write_bytes(data)
                    print(f"{name}: {where}: {error}", file=sys.stderr)
            pending.unlink()
    return {"target": name, "runs": runs, "findings": sorted(seen)}


def _limit_memory() -> None:
    """Let a size that is taken unchecked be a MemoryError."""
    taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY_NBYTES, resource.RLIM_INFINITY))


def campaign(
    names: Sequence[str], seconds: float, seed: int, corpus: Path, findings: Path, *, guided: bool
) -> list[dict[str, Any]]:
    """Fuzz several targets, one after another, for `seconds` in all; return what came of each."""
    findings.mkdir(parents=True, exist_ok=True)
    share = seconds / len(names)
    entry = ["-c", ENTRY] if guided else ["-m", __name__]
    return [
        _child(entry, [name, share, seed + number, str(corpus), str(findings)], share + _GRACE_S, findings)
        for number, name in enumerate(names)
    ]


def _child(entry: list[str], order: list[Any], patience_s: float, findings: Path) -> dict[str, Any]:
    """Fuzz one target in a process of its own."""
    name = order[0]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, *entry, json.dumps(order)], stdout=pipe, stderr=pipe, text=True, errors="replace"
    )
    try:
        output, errors = process.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
    lines = output.strip().splitlines() or [""]
    if not process.returncode and lines[-1].startswith("{"):
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    runs = re.search(r"number_of_executed_units: (\d+)", errors)
    told = {"target": name, "runs": int(runs[1]) if runs else 0, "findings": []}
    if process.returncode:
        left = findings / f"{name}-running"
        if left.exists():
            left.rename(findings / f"{name}-ended-{process.returncode}")
        said = next((line for line in lines if line.startswith(f"{name}: ")), errors.strip()[-400:])
        told["findings"] = [f"ended with {process.returncode}: {said}"]
    return told


if __name__ == "__main__":
    _name, _seconds, _seed, _corpus, _findings = json.loads(sys.argv[1])
    print(json.dumps(fuzz(_name, _seconds, _seed, Path(_corpus), Path(_findings))))
