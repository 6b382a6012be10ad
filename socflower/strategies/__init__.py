"""Flower strategies: adapters from plans to messages and back."""

from socflower.strategies.baselines import OrderedFedAvg, RingAllReduce, SingleDevice
from socflower.strategies.group_count import profile_group_count
from socflower.strategies.resuming import Resumable
from socflower.strategies.rings import RingSettings
from socflower.strategies.socflow import RoundReport, SoCFlow
from socflower.strategies.split_replay import CloudSessions, SplitReplay, SplitRoundReport

__all__ = [
    "CloudSessions",
    "OrderedFedAvg",
    "Resumable",
    "RingAllReduce",
    "RingSettings",
    "RoundReport",
    "SingleDevice",
    "SoCFlow",
    "SplitReplay",
    "SplitRoundReport",
    "profile_group_count",
]
