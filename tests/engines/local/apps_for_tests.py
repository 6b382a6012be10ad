"""ClientApps that worker processes of the tests import by name."""

import os
import sys
import time
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
not_an_app = 3


@app.train()
def train(message: Message, context: Context) -> Message:
    """Count calls in the node's state, and do what the config says."""
    config = message.content.config_records["config"]
    if config.get("sleep-s"):
        time.sleep(float(config["sleep-s"]))
    if config.get("die"):
        os._exit(3)
    if config.get("raise"):
        raise ValueError("on purpose")
    if "exit" in config:
        sys.exit(int(config["exit"]))
    if config.get("interrupt"):
        raise KeyboardInterrupt
    if config.get("say-nothing"):
        return cast(Message, None)  # what an app does that forgets its return
    calls = int(context.state["calls"]["n"]) + 1 if "calls" in context.state else 1
    context.state["calls"] = ConfigRecord({"n": calls})
    metrics = MetricRecord(
        {
            "calls": calls,
            "partition": int(context.node_config["partition-id"]),
            "pid": os.getpid(),
            "num-examples": int(config.get("examples", 0)),
        }
    )
    arrays = ArrayRecord({"w": Array(np.full(256, calls, np.float32))})
    return Message(RecordDict({"metrics": metrics, "arrays": arrays}), reply_to=message)
