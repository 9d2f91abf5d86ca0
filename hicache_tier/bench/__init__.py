"""Benchmarks: every figure is a ratio to a ceiling measured in the same run, after every byte was checked."""
