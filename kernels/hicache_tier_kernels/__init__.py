"""Copy plans and the engines that run them; knows neither pools nor stores."""

from .choice import CalibrationTable, Choice, Measurement, PlanFacts, choose, table_for
from .engine import Engine, EngineOptions, Prepared
from .plan import INDEX_DTYPES, CopyPlan, RowMap, byte_plane
from .reference import run_reference
from .registry import engine_named, engines, run_plan
from .support import Support

__all__ = [
    "INDEX_DTYPES",
    "CalibrationTable",
    "Choice",
    "CopyPlan",
    "Engine",
    "EngineOptions",
    "Measurement",
    "PlanFacts",
    "Prepared",
    "RowMap",
    "Support",
    "byte_plane",
    "choose",
    "engine_named",
    "engines",
    "run_plan",
    "run_reference",
    "table_for",
]
