"""What ships for tests: suites, faults, and the torture.

`testing.transfer.CopyEngineSuite` for copy engines, `testing.engine.ByteEngineSuite` for byte engines and
`testing.store.PageStoreSuite` for stores: one of your own passes them as a subclass of ten lines. They need
pytest, so nothing here imports them. `testing.faults` makes any engine or store misbehave, `testing.torture`
is what `scripts/torture.py` runs.
"""
