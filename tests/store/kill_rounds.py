"""Rounds of SIGKILL: a child stores pages and says what it stored, the parent kills it and looks.

Usage: python kill_rounds.py ROOT ROUNDS SEED [QUEUE]. Prints one JSON object. Runs without torch and with one
thread in the parent, so that forking is cheap. With QUEUE (aio, io_uring) the children use the engine nixl.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path

from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import StoreRig

SMALL = 640 << 10  # about 64 pages, so that slots are reused all the time
LARGE = 32 << 20  # room for everything, so that nothing may be missing


def engine():
    """Return what the children move bytes with."""
    if len(sys.argv) < 5:
        return "auto"
    from hicache_tier_storage.nixl_engine import NixlEngine

    return NixlEngine(direct=False, queue=sys.argv[4], threads=2, min_piece_nbytes=1)


def child(root, turn, capacity, pipe):
    """Store, read, delete, pin; report each batch once its put has returned."""
    rig = StoreRig(root)
    rng = random.Random(turn)
    store = rig.open(capacity_bytes=capacity, engine=engine())
    for step in range(10_000):
        if capacity == SMALL:
            keys = keys_of(f"round{turn}", rng.randrange(1, 12), first=step * 12)
        else:
            keys = keys_of("large", rng.randrange(1, 12), first=rng.randrange(600))
        os.write(pipe, (json.dumps({"will_put": [key.hex() for key in keys]}) + "\n").encode())
        put = rig.chain(store, keys)
        good = [key.hex() for key, reason in zip(keys, put, strict=True) if reason.endswith("stored")]
        if rng.random() < 0.3:
            rig.get(store, keys[:4])
        with store._core.lock:
            store._core.writer._times.used[:] += 1  # makes the next line publish every record anew
            store._core.writer.publish_access(older_than_s=0)
        gone = good[:1] if rng.random() < 0.2 else []
        os.write(pipe, (json.dumps({"will_delete": gone}) + "\n").encode())
        store.delete(gone)
        held = [key.hex() for key in store._core.index]
        os.write(pipe, (json.dumps({"put": good, "deleted": gone, "held": held}) + "\n").encode())


def look(root, capacity, pipe):
    """Open what the killed child left; tell what is there."""
    rig = StoreRig(root)
    store = rig.open(capacity_bytes=capacity)
    there = list(store._core.index)
    reasons = rig.get(store, there)  # raises on wrong bytes
    found = {key.hex() for key, reason in zip(there, reasons, strict=True) if reason == "loaded"}
    answer = {"found": sorted(found), "bad": [reason for reason in reasons if reason != "loaded"]}
    answer["leftovers"] = [
        str(path) for path in root.rglob("*") if ".tmp" in path.name or "probe" in path.name
    ]
    answer["files"] = sum(1 for path in root.rglob("*") if path.is_file())
    answer["free_and_held"] = len(store._core.writer._free) + len(there)
    answer["slots"] = len(store._core.writer.slabs) * store._core.writer.facts.shape.slots
    rig.close()
    os.write(pipe, (json.dumps(answer) + "\n").encode())


def fork(work, *arguments):
    """Run `work` in a child; return its pid and the pipe that it writes to."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        code = 1
        try:
            work(*arguments, writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    return pid, reader


def drain(fd, deadline=None):
    """Read lines until the writer is gone, or until a deadline."""
    raw = b""
    while deadline is None or time.monotonic() < deadline:
        wait = 20 if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([fd], [], [], wait)[0]:
            break
        part = os.read(fd, 1 << 16)
        if not part:
            break
        raw += part
    return raw


def lines(raw):
    return [json.loads(line) for line in raw.decode().split("\n")[:-1]]  # the last may be torn


def main(root, rounds, seed):
    rng = random.Random(seed)
    totals = {"rounds": 0, "acknowledged": 0, "missing": 0, "alien": 0, "bad": 0, "leftovers": 0, "files": []}
    left = {SMALL: set(), LARGE: set()}
    for turn in range(rounds):
        capacity = LARGE if turn % 2 else SMALL
        place, before = root / str(capacity), left[capacity]
        pid, pipe = fork(child, place, seed * 1000 + turn, capacity)
        raw = drain(pipe, time.monotonic() + rng.uniform(0.03, 0.35))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raw += drain(pipe)
        os.close(pipe)
        reports = lines(raw)
        held = [set(report["held"]) for report in reports if "held" in report]
        maybe_gone = {key for report in reports[-1:] for key in report.get("will_delete", ())}
        maybe_back = set(next((r["will_put"] for r in reversed(reports) if "will_put" in r), ()))
        deleted = {key for report in reports for key in report.get("deleted", ())}
        last = (held[-1] if held else before) - maybe_gone
        ever = before.union(*held)
        pid, pipe = fork(look, place, capacity)
        answers = lines(drain(pipe))
        os.close(pipe)
        _, status = os.waitpid(pid, 0)
        if status or not answers:
            totals["error"] = f"round {turn}: the survivor ended with {status}"
            break
        answer = answers[0]
        found = set(answer["found"])
        # The batch under way at the kill may have been stored and may have evicted what it needed room for.
        in_flight = found - ever
        totals["missing"] += max(0, len(last - found) - (12 if capacity == SMALL else 0))
        totals["alien"] += len(in_flight) > 12
        totals["alien"] += len(found & deleted - maybe_gone - maybe_back - last)
        totals["bad"] += len(answer["bad"]) + (answer["free_and_held"] != answer["slots"])
        totals["acknowledged"] += len(last)
        totals["leftovers"] += len(answer["leftovers"])
        if capacity == SMALL:
            totals["files"].append(answer["files"])
        totals["rounds"] += 1
        left[capacity] = found
    print(json.dumps(totals))


if __name__ == "__main__":
    if len(sys.argv) > 4:
        from hicache_tier_storage.nixl_package import nixl_module

        nixl_module()  # once, not in every child
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
