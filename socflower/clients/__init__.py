"""Flower clients: trainers, the wrapper that makes a ClientApp of two functions, and mods."""

from socflower.clients.app import make_client_app
from socflower.clients.fp32_trainer import FP32Trainer, cosine_annealing, sgd
from socflower.clients.group import train_group
from socflower.clients.heat_guard import HeatLimits
from socflower.clients.int8_trainer import Int8Trainer
from socflower.clients.mixed_precision import MixedPrecisionTrainer
from socflower.clients.mods import heat_mod
from socflower.clients.trainer import SessionEnd, Trainer, TrainingSession, TrainingSpan

__all__ = [
    "FP32Trainer",
    "HeatLimits",
    "Int8Trainer",
    "MixedPrecisionTrainer",
    "SessionEnd",
    "Trainer",
    "TrainingSession",
    "TrainingSpan",
    "cosine_annealing",
    "heat_mod",
    "make_client_app",
    "sgd",
    "train_group",
]
