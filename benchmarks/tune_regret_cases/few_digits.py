"""A quarter of the embedded digits, so that a training takes seconds."""

import numpy as np

from socflower.workloads.dataset import LabelledData
from socflower.workloads.sources import load_data

NUM_TRAIN, NUM_TEST = 1000, 500


def few_digits() -> tuple[LabelledData, LabelledData]:
    """Return every fourth image of the training data, and every second one of the test data."""
    digits = load_data("digits")
    train = np.arange(NUM_TRAIN) * (len(digits.train) // NUM_TRAIN)
    test = np.arange(NUM_TEST) * (len(digits.test) // NUM_TEST)
    return digits.train.select(train), digits.test.select(test)
