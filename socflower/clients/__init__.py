"""Flower clients: trainers, the wrapper that makes a ClientApp of two functions, and mods."""

from socflower.clients.app import make_client_app
from socflower.clients.fp32_trainer import FP32Trainer, cosine_annealing, sgd
from socflower.clients.group import train_group
from socflower.clients.heat_guard import HeatLimits
from socflower.clients.int8_trainer import Int8Trainer
from socflower.clients.mixed_precision import MixedPrecisionTrainer
from socflower.clients.mods import heat_mod
from socflower.clients.split import make_split_client_app
from socflower.clients.split_batches import Samples
from socflower.clients.split_cloud import CloudClient, session_factory
from socflower.clients.split_edge import CloudLink, cloud_link
from socflower.clients.split_here import SplitSettings
from socflower.clients.split_program import JoinedProgram, LayeredProgram, SplitProgram
from socflower.clients.split_samples import CodeSamples, FeatureSamples, ImageTargets, LabelledSamples
from socflower.clients.trainer import SessionEnd, Trainer, TrainingSession, TrainingSpan

__all__ = [
    "CloudClient",
    "CloudLink",
    "CodeSamples",
    "FP32Trainer",
    "FeatureSamples",
    "HeatLimits",
    "ImageTargets",
    "Int8Trainer",
    "JoinedProgram",
    "LabelledSamples",
    "LayeredProgram",
    "MixedPrecisionTrainer",
    "Samples",
    "SessionEnd",
    "SplitProgram",
    "SplitSettings",
    "Trainer",
    "TrainingSession",
    "TrainingSpan",
    "cloud_link",
    "cosine_annealing",
    "heat_mod",
    "make_client_app",
    "make_split_client_app",
    "session_factory",
    "sgd",
    "train_group",
]
