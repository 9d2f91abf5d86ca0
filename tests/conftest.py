"""For all tests: tables are as wide as where nobody says how wide, also in workers of a run in parallel."""

from __future__ import annotations

import os

os.environ.pop("COLUMNS", None)  # readline tells children of the width of a terminal that is not theirs
