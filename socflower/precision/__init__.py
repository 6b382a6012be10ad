"""Training in int8 arithmetic: the engine, its algorithms, rescaling, batch splitting, graph reuse and placement."""

from socflower.precision.algorithm import ADAPTIVE_FIXED_POINT, ALGORITHMS, NITI, TrainingAlgorithm, int8_algorithm
from socflower.precision.int8_backend import Int8Backend
from socflower.precision.int8_model import EngineSettings, Int8Model, StepResult
from socflower.precision.mixing import MIXING_RULES
from socflower.precision.native_backend import NativeInt8Backend
from socflower.precision.rescaling import RescalingPolicy

__all__ = [
    "ADAPTIVE_FIXED_POINT",
    "ALGORITHMS",
    "MIXING_RULES",
    "NITI",
    "EngineSettings",
    "Int8Backend",
    "Int8Model",
    "NativeInt8Backend",
    "RescalingPolicy",
    "StepResult",
    "TrainingAlgorithm",
    "int8_algorithm",
]
