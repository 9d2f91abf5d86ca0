"""For all tests: what they find is the same however they were started."""

from __future__ import annotations

import os
import signal

os.environ.pop("COLUMNS", None)  # readline tells children of the width of a terminal that is not theirs
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell: for children too
    signal.signal(signal.SIGINT, signal.default_int_handler)
