"""The cloud: `python -m benchmarks.split_contest.cloud` hosts back halves until its input ends.

It writes its address and the operator's token first. A line `measure N` asks for the seconds of its halves, `echoes`
for the processor seconds of a batch in the latest two echoes.
"""

import json
import sys

import torch

from benchmarks.split_contest.plan import measuring, program
from benchmarks.split_contest.stream_costs import Echo
from socflower.edgecloud.cloud.cloud_service import CloudService
from socflower.edgecloud.cloud.session import CloudHalf, SessionTerms
from socflower.edgecloud.half_protocols import Weights
from socflower.edgecloud.runtime.measuring import measure_cloud
from socflower.edgecloud.stream.credentials import new_token

_echoes: list[Echo] = []


def half(terms: SessionTerms, weights: Weights) -> CloudHalf:
    """Return the back half of an edge's run, or an echo."""
    if "echo" in terms.settings:
        _echoes.append(Echo(int(terms.settings["echo"])))
        return _echoes[-1]
    return program().back(int(terms.settings["cut"])).half


def main() -> int:
    """Serve."""
    torch.set_num_threads(1)
    token = new_token()
    service = CloudService("127.0.0.1:0", half, operator_token=token)
    print(json.dumps({"address": service.address, "token": token}), flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        if what == "echoes":
            answer = [echo.batch_s() for echo in _echoes[-2:]]
        else:
            answer = list(measure_cloud(program().split, measuring(int(numbers[0]))))
        print(json.dumps(answer), flush=True)
    service.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
