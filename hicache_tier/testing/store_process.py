"""Stores in processes of their own, told what to do line by line, so that tests can have several writers.

`python -m hicache_tier.testing.store_process` reads one JSON object a line and answers with one.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from .array_pool import keys_of
from .store_rig import StoreRig

_TIMEOUT_S = 60.0


class StoreProcess:
    """A process with one store open in it.

    Parameters
    ----------
    root : Path
    options
        As of `StoreRig.open`.
    """

    def __init__(self, root: Path, **options: Any) -> None:  # noqa: ANN401 - as of open_store
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        self.call("open", **options)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def tell(self, verb: str, **arguments: Any) -> None:  # noqa: ANN401 - plain data
        """Ask for something without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = _TIMEOUT_S) -> Any:  # noqa: ANN401 - plain data
        """Wait for the next answer; raises `RuntimeError` with what the process raised."""
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no answer within {timeout_s} s") from None
        if not line:
            raise RuntimeError(f"the process ended with {self._process.wait(5)}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def call(self, verb: str, **arguments: Any) -> Any:  # noqa: ANN401 - plain data
        """Ask for something and wait for the answer."""
        self.tell(verb, **arguments)
        return self.answer()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()
        self._process.wait(10)

    def end(self) -> None:
        """Close the store and end the process."""
        if self._process.poll() is None:
            self.tell("close")
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(20)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            self._process.kill()
            self._process.wait(10)
            self._reader.join(5)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()


class _Server:
    def __init__(self, root: Path) -> None:
        self._rig = StoreRig(root)

    def open(self, **options: Any) -> str:  # noqa: ANN401 - as of open_store
        self._store = self._rig.open(**options)
        return repr(self._store)

    def put(self, salt: str, count: int, first: int = 0, *, chain: bool = False) -> list[str]:
        keys = keys_of(salt, count, first)
        return self._rig.chain(self._store, keys) if chain else self._rig.put(self._store, keys)

    def get(self, salt: str, count: int, first: int = 0) -> list[str]:
        return self._rig.get(self._store, keys_of(salt, count, first))

    def match(self, salt: str, count: int, first: int = 0) -> int:
        return self._store.match_prefix(keys_of(salt, count, first))

    def delete(self, salt: str, count: int, first: int = 0) -> list[str]:
        return [status.reason for status in self._store.delete(keys_of(salt, count, first))]

    def stats(self) -> dict[str, Any]:
        return self._store.stats()

    def wait_for(self, salt: str, number: int, timeout_s: float = 5.0) -> float:
        """Return the time at which a page was first seen."""
        keys = keys_of(salt, 1, number)
        deadline = time.monotonic() + timeout_s
        while not self._store.match_prefix(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"page {number} of {salt} was not seen")
            time.sleep(0.001)
        return time.monotonic()

    def hammer(self, salt: str, count: int, seconds: float, seed: int) -> dict[str, int]:
        """Put, get and delete the same pages over and over; every page read is checked."""
        keys = keys_of(salt, count)
        turn, loaded, deadline = seed, 0, time.monotonic() + seconds
        while time.monotonic() < deadline:
            turn += 1
            first = turn * 7 % count
            some = (keys[first:] + keys[:first])[: 1 + turn % 16]
            self._rig.put(self._store, some)
            loaded += self._rig.get(self._store, some[::-1]).count("loaded")
            if turn % 3 == 0:
                self._store.delete(some[::2])
        return {"turns": turn - seed, "loaded": loaded}

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        self._rig.close()


def main() -> None:
    """Answer until there are no more lines."""
    server = _Server(Path(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            value = getattr(server, request.pop("verb"))(**request)
            answer = {"value": value}
        except Exception as error:  # noqa: BLE001 - the test is told
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
