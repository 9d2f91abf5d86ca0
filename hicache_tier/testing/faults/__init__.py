"""Faults of storage, for tests of whatever stands above an engine or a store.

Put together at will around any byte engine and any page store::

    hang = Hang(on_call(3, when=coming_in))
    engine = FaultyEngine(PosixEngine(direct=False), Delay(0.01), hang, FlipBits(0.1))
    with open_store(root, geometry, layout, engine=engine, verify="always") as store: ...
    hang.gate.open()

| fault | what happens |
|---|---|
| `Delay` | a call takes longer |
| `Hang` | it waits at a gate, before its bytes move or after |
| `Fail` | it gives a reason for every page, or raises |
| `FailPages` | some pages are said to have failed |
| `ForgetVerdicts` | there are fewer verdicts than pages |
| `FlipBits` | a bit of a page is another as it comes in |
| `ReturnShort` | the first bytes of a page come in only |
| `OutOfSpace` | there is room for so many pages more |
| `TearWrites` | the first bytes of a page reach the file only (engines) |
| `LoseUnsynced` | a power loss undoes what was not synced (engines) |

A fault befalls the calls that its `when` names: `always`, `coming_in`, `going_out`, `verbs("match_prefix")`,
`on_call(3)`, `every(10)`. One of your own is a subclass of `Fault` with a method `strike`.
"""

from __future__ import annotations

from .call import Call, Failed, always, coming_in, every, going_out, on_call, verbs
from .disk import LoseUnsynced, TearWrites
from .fault import Delay, Fail, FailPages, Fault, FlipBits, ForgetVerdicts, Hang, OutOfSpace, ReturnShort
from .gate import Gate
from .wrapped import FaultyEngine, FaultyStore

__all__ = [
    "Call",
    "Delay",
    "Fail",
    "FailPages",
    "Failed",
    "Fault",
    "FaultyEngine",
    "FaultyStore",
    "FlipBits",
    "ForgetVerdicts",
    "Gate",
    "Hang",
    "LoseUnsynced",
    "OutOfSpace",
    "ReturnShort",
    "TearWrites",
    "always",
    "coming_in",
    "every",
    "going_out",
    "on_call",
    "verbs",
]
