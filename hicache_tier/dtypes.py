"""Logical dtypes of KV caches and how they are stored.

The store keeps portable dtypes that any Zarr reader knows (`storage`); what the bytes mean is the logical
dtype in the store's attributes.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from .errors import not_known

if TYPE_CHECKING:
    import torch


class DType(Enum):
    """A logical dtype: its name, bytes per element, and the NumPy/Zarr dtype its bytes are stored as."""

    FLOAT16 = ("float16", 2, "float16")
    BFLOAT16 = ("bfloat16", 2, "uint16")
    FLOAT32 = ("float32", 4, "float32")
    FLOAT8_E4M3FN = ("float8_e4m3fn", 1, "uint8")
    FLOAT8_E5M2 = ("float8_e5m2", 1, "uint8")
    INT8 = ("int8", 1, "int8")
    UINT8 = ("uint8", 1, "uint8")

    def __init__(self, label: str, itemsize: int, storage: str) -> None:
        self.label = label
        self.itemsize = itemsize
        self.storage = storage

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype of the same name."""
        import torch

        dtype = getattr(torch, self.label)
        assert isinstance(dtype, torch.dtype)  # noqa: S101 - tells the type checker; names are a closed set
        return dtype

    @classmethod
    def parse(cls, value: object) -> DType:
        """Take a `DType`, its name, or the torch dtype of that name.

        Raises
        ------
        InvalidArgumentError
            For anything else; the message lists the allowed names and the nearest one.
        """
        if isinstance(value, cls):
            return value
        name = str(value).removeprefix("torch.")
        for member in cls:
            if member.label == name:
                return member
        allowed = [member.label for member in cls]
        raise not_known("dtype", value, allowed, name)
