"""Training in int8 arithmetic: the engine, its algorithms, rescaling, batch splitting, graph reuse and placement."""

from socflower.precision.accelerator import Int8Backend, NativeInt8Backend
from socflower.precision.algorithm import (
    ADAPTIVE_FIXED_POINT,
    ALGORITHMS,
    NITI,
    REAL_SCALES,
    TrainingAlgorithm,
    int8_algorithm,
)
from socflower.precision.cpu_share import MERGES, MIXING_RULES
from socflower.precision.int8.model import EngineSettings, Int8Model, StepResult
from socflower.precision.int8.requantisation import RescalingPolicy

__all__ = [
    "ADAPTIVE_FIXED_POINT",
    "ALGORITHMS",
    "MERGES",
    "MIXING_RULES",
    "NITI",
    "REAL_SCALES",
    "EngineSettings",
    "Int8Backend",
    "Int8Model",
    "NativeInt8Backend",
    "RescalingPolicy",
    "StepResult",
    "TrainingAlgorithm",
    "int8_algorithm",
]
