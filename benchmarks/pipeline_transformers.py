"""Small GPT-2 and BERT of `transformers` over four unequal processes at 100 Mbit/s, against the fastest of them alone.

Both have six layers of width 192, and heads that are their embeddings. They are trained on code here, and then
fine-tuned on English bytes: padded dicts with masks, of 16 to 48 bytes, next bytes for GPT-2 and masked bytes for BERT,
with AdamW and without dropout, in mini-batches of 64. Devices, links and planner are those of `bench pipeline`; seeds
1, 2 and 3 are those of the mini-batches. The loss is measured on English that is not trained on.

`ok`: the pipeline's weights equal those of the same plan in one process, bit for bit, and its loss equals that of one
device within 1e-3 nats a byte.
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.harness import Row, peer_notes
from benchmarks.pipeline_adapters import SEEDS, rows_of
from benchmarks.pipeline_contest.transformer_models import KINDS, save_base, test_loss, workload
from benchmarks.pipeline_contest.work import has_devices

# Updates of the fine-tuning, and of the base.
_NUM_UPDATES, _NUM_OF_BASE = 16, 60
_MINI_BATCH = 64
_QUICK = (4, 4)


def run(quick: bool = False) -> list[Row]:
    """Return rows of samples a second, losses and predictions; none if the testbed cannot be built."""
    if not has_devices():
        return []
    num_updates, num_of_base = _QUICK if quick else (_NUM_UPDATES, _NUM_OF_BASE)
    # As on the devices: another number of threads rounds differently.
    torch.set_num_threads(1)
    rows = []
    with TemporaryDirectory() as folder:
        for kind in KINDS:
            base = Path(folder) / f"{kind}.pt"
            peer_notes[f"loss of {kind} on code, nats a byte"] = save_base(kind, base, num_of_base)
            trained, loss_of = workload(kind, base), partial(test_loss, kind)
            for seed in SEEDS[:1] if quick else SEEDS:
                what = f"{kind}, {num_updates} updates"
                rows += rows_of(trained, seed, num_updates, loss_of, what, _MINI_BATCH)
    return rows
