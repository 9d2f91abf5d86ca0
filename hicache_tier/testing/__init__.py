"""Placeholder docstring, replaced by the owner of the package."""
