"""What edges and groups train on where they train side by side, taken apart by hand."""

import numpy as np
import torch

from socflower.workloads import DataSet, load_data


def groups(num_parts: int) -> DataSet:
    """Return the groups' samples, of which the edge took every `num_parts`-th."""
    return _without(num_parts, edges=False)


def edge(num_parts: int) -> DataSet:
    """Return the samples of one edge."""
    return _without(num_parts, edges=True)


def _without(num_parts: int, *, edges: bool) -> DataSet:
    whole = load_data("digits")
    number, share = len(whole.train), len(whole.train) // num_parts
    taken = np.isin(np.arange(number), [index * number // share for index in range(share)])
    return DataSet(whole.train.select(torch.from_numpy(np.flatnonzero(taken if edges else ~taken))), whole.test, "own",
                   whole.source)
