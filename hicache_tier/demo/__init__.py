"""`hicache-tier demo`: one prompt, two processes, and a tier between them.

The first process reads a prompt with a causal language model that has no cache, goes on writing, and puts the
prompt's KV pages into a store. A second process, started afresh, finds them by their keys, loads them, reads
only what is left of the prompt, and writes the same tokens.

`options` says what can be chosen, `run` leads the two workers, `report` holds what they found. `worker` is
what runs inside each of the processes; `models`, `toy`, `bridge`, `generate` and `stages` are its parts.
"""
