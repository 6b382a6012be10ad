"""Small image classifiers, an image generator and a click model; torch.fx can capture each of them."""

from socflower.workloads.models.classifiers import build_model, model_names
from socflower.workloads.models.click_model import ClickModel, build_click_model
from socflower.workloads.models.generator import build_generator

__all__ = ["ClickModel", "build_click_model", "build_generator", "build_model", "model_names"]
