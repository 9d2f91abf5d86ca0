#!/usr/bin/env python
"""`hicache-tier bench sglang` from a checkout: see `--help`."""

import sys

from hicache_tier.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "sglang"]
    main()
