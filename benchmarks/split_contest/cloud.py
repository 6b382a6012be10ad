"""The cloud: `python -m benchmarks.split_contest.cloud` hosts back halves until its input ends.

It says its address and the operator's token first, and the seconds of its halves whenever a line `measure N` asks.
"""

import json
import sys

import torch

from benchmarks.split_contest.plan import measuring, program
from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.session import CloudHalf, SessionTerms
from socflower.edgecloud.halves import Weights
from socflower.edgecloud.runtime.measuring import measure_cloud
from socflower.edgecloud.stream.credentials import new_token


def half(terms: SessionTerms, weights: Weights) -> CloudHalf:
    """Return the back half that an edge's run is about."""
    return program().back(int(terms.settings["cut"])).half


def main() -> int:
    """Serve."""
    torch.set_num_threads(1)
    token = new_token()
    service = CloudService("127.0.0.1:0", half, operator_token=token)
    print(json.dumps({"address": service.address, "token": token}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure_cloud(program().split, measuring(int(line.split()[1])))), flush=True)
    service.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
