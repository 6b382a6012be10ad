"""Flower strategies: adapters from plans to messages and back."""

from socflower.strategies.baselines import OrderedFedAvg, RingAllReduce, SingleDevice
from socflower.strategies.group_count import profile_group_count
from socflower.strategies.resuming import Resumable
from socflower.strategies.rings import RingSettings
from socflower.strategies.socflow import RoundReport, SoCFlow

__all__ = ["OrderedFedAvg", "Resumable", "RingAllReduce", "RingSettings", "RoundReport", "SingleDevice", "SoCFlow",
           "profile_group_count"]
