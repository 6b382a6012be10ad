"""Models, data sets, partitions among clients, and evaluation."""

from socflower.workloads.click_through import ClickData, click_data
from socflower.workloads.data_source import DataSource
from socflower.workloads.dataset import DataSet, LabelledData, concatenate
from socflower.workloads.evaluation import Evaluation, EvaluationStep, EvaluationWeight, evaluate
from socflower.workloads.map_dataset import MapDataset, as_data_source
from socflower.workloads.models import (
    ClickModel,
    build_click_model,
    build_generator,
    build_model,
    model_names,
)
from socflower.workloads.partition import dirichlet_partition, iid_partition, partition
from socflower.workloads.sample_tensors import GeneratorSamples, VerticalSamples, generator_codes
from socflower.workloads.sources import DataShape, data_names, data_shape, load_data
from socflower.workloads.transfer import class_subset, load_weights

__all__ = [
    "ClickData",
    "ClickModel",
    "DataSet",
    "DataShape",
    "DataSource",
    "Evaluation",
    "EvaluationStep",
    "EvaluationWeight",
    "GeneratorSamples",
    "LabelledData",
    "MapDataset",
    "VerticalSamples",
    "as_data_source",
    "build_click_model",
    "build_generator",
    "build_model",
    "class_subset",
    "click_data",
    "concatenate",
    "data_names",
    "data_shape",
    "dirichlet_partition",
    "evaluate",
    "generator_codes",
    "iid_partition",
    "load_data",
    "load_weights",
    "model_names",
    "partition",
]
