"""Torture: processes that put, get, evict, clear and export on shared roots while everything happens to them.

They are killed and stopped, their disk fills up, their files are damaged and rewritten, their clocks jump. A
page's bytes follow from its key, so every byte that any reader gets is checked. `session` is where it is run
from, `worker` and the roles are what the processes do, `vandal` what is done to the files; `command` is the
command line.
"""
