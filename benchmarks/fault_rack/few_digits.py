"""A few of the embedded digits, so that an interval takes seconds."""

import numpy as np

from socflower.workloads.dataset import LabelledData
from socflower.workloads.sources import load_data


def few_digits() -> tuple[LabelledData, LabelledData]:
    """Return every eighth image of the training data, and all of the test data."""
    digits = load_data("digits")
    return digits.train.select(np.arange(0, len(digits.train), 8)), digits.test
