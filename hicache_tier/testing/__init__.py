"""Suites that ship: an engine or a store of your own passes them as a subclass of ten lines.

`testing.transfer.CopyEngineSuite` for copy engines, `testing.engine.ByteEngineSuite` for byte engines and
`testing.store.PageStoreSuite` for stores. They need pytest, so nothing here imports them.
"""
