#!/usr/bin/env python
"""Torture of the store: see `--help`."""

from hicache_tier.testing.torture.command import main

if __name__ == "__main__":
    main()
