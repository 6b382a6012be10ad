"""Small image classifiers, every one traceable with torch.fx."""

from socflower.workloads.models.registry import build_model, model_names

__all__ = ["build_model", "model_names"]
