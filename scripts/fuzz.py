#!/usr/bin/env python
"""Fuzzing of everything that reads untrusted bytes: see `--help`."""

from hicache_tier.testing.fuzz.command import main

if __name__ == "__main__":
    main()
