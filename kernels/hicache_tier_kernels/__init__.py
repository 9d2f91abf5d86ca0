"""Copy plans and the engines that run them; knows neither pools nor stores."""

from .plan import INDEX_DTYPES, CopyPlan, RowMap, byte_plane
from .reference import run_reference
from .support import Support

__all__ = ["INDEX_DTYPES", "CopyPlan", "RowMap", "Support", "byte_plane", "run_reference"]
