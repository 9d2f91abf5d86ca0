"""`python -m hicache_tier` is `hicache-tier`."""

from hicache_tier.cli import main

if __name__ == "__main__":
    main()
