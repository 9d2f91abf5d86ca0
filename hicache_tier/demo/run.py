"""Leading the demo: two workers, one after the other, and the verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hicache_tier.errors import HiCacheTierError

from .job import Job, Phase
from .models import find_model
from .report import DemoReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .options import DemoOptions

_LEAVING_SECONDS = 60.0
_GRACE_SECONDS = 5.0
_LAST_WORDS = 12


class DemoError(HiCacheTierError, RuntimeError):
    """A worker of the demo ended without a result."""

    kind = "demo"


def run_demo(
    options: DemoOptions, root: str | None = None, say: Callable[[str], None] | None = None
) -> DemoReport:
    """Run both phases.

    Parameters
    ----------
    root : str, optional
        Where the store is to be, and stays. A temporary folder that is removed where left out.
    say : callable, optional
        Takes a line on what is going on now.

    Raises
    ------
    HiCacheTierError
        What went wrong in a worker, in its words.
    """
    source = find_model(options.model)
    with tempfile.TemporaryDirectory(prefix="hicache-demo-") as folder:
        scratch = Path(folder)
        store = root or str(scratch / "store")
        found = {}
        for phase in Phase:
            job = Job(phase, store, folder, source, options)
            found[phase] = _run_worker(job, scratch, say or (lambda _: None))
    return DemoReport.of(source, options, root, found[Phase.COLD], found[Phase.WARM])


def _run_worker(job: Job, scratch: Path, say: Callable[[str], None]) -> dict[str, Any]:
    path = scratch / f"{job.phase.value}.json"
    path.write_text(json.dumps(job.as_dict()))
    command = [sys.executable, "-m", f"{__package__}.worker", str(path)]
    with (scratch / f"{job.phase.value}.log").open("w+") as log, _process(command, log) as process:
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "stage":
                say(event["text"])
            elif event["event"] == "error":
                raise _error(event)
            else:
                return {name: value for name, value in event.items() if name != "event"}
        code = process.wait()
        log.seek(0)
        tail = log.read().strip().splitlines()[-_LAST_WORDS:]
    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    raise DemoError(f"the {job.phase.value} process ended {how} without a result: {' | '.join(tail)}")


@contextmanager
def _process(command: list[str], log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a child; on the way out wait for it a while, or end it at once where the body did not get that far.

    A worker that has said what it found only has memory to give back, which can take seconds.
    """
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
    )
    try:
        yield process
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVING_SECONDS)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _error(event: dict[str, Any]) -> HiCacheTierError:
    """Return a worker's error with the kind that it had there."""
    kind = type("DemoError", (DemoError,), {"kind": event["kind"]})
    error: HiCacheTierError = kind(event["text"])
    return error
