"""What is trained on what: models, data sets, partitions among clients, and evaluation."""

from socflower.workloads.dataset import DataSet, LabelledData, concatenate
from socflower.workloads.evaluation import Evaluation, evaluate
from socflower.workloads.models import build_model, model_names
from socflower.workloads.partition import dirichlet_partition, iid_partition, partition
from socflower.workloads.sources import DataShape, data_names, data_shape, load_data

__all__ = [
    "DataSet",
    "DataShape",
    "Evaluation",
    "LabelledData",
    "build_model",
    "concatenate",
    "data_names",
    "data_shape",
    "dirichlet_partition",
    "evaluate",
    "iid_partition",
    "load_data",
    "model_names",
    "partition",
]
