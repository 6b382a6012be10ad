"""Mandheling beside ours: the cells of its text, and batches and rounds of its phones by hand."""

import json
import re

import pytest

from socflower.cluster import device
from socflower.cluster.device_catalog import link_bytes_per_s
from socflower.paper.comparison import SCORED, Item, compare_item, read_paper
from socflower.paper.mandheling.items import COMPUTE
from socflower.paper.mandheling.predictions import (
    CLIENTS,
    CLIENTS_A_ROUND,
    DSP,
    MNN,
    MNN_INT8,
    PHONES,
    REDMI,
    XIAOMI_11,
    batch_cost,
    federated_cost,
    federated_round,
    model_bytes,
    profile_of,
)
from tests.command_line import Socflower

PAPER = read_paper("mandheling")


def test_every_table_and_figure_is_listed() -> None:
    numbers = {re.sub(r"[a-z]$", "", item.id) for item in PAPER.items}
    assert numbers >= {f"table-{number}" for number in range(1, 9)}
    assert numbers >= {f"figure-{number}" for number in range(1, 12)}


def test_table_7_has_all_core_sets_of_which_the_default_ones_are_scored() -> None:
    printed = [cell for cell in PAPER.item("table-7").cells if cell.value is not None]
    assert len(printed) == 3 * 6 * 4
    scored = {cell.key for cell in printed if cell.use == SCORED}
    default = ("MNN-FP32/BIG 4x/H", "MNN-INT8/BIG 4x/H", "Ours/BIG 2x/H")
    assert scored == {f"{cores}: {what}" for cores in default for what in ("time", "energy")}


# Without trainings and a network of 25 million weights, which the test of the states computes.
LONG = ("figure-1", "figure-4", "figure-11")
QUICK = [item for item in PAPER.items if item.cells and item.id not in LONG]


@pytest.mark.parametrize("item", QUICK, ids=lambda item: item.id)
def test_what_is_scored_is_computed_and_texts_are_for_what_is_not(item: Item) -> None:
    for row in compare_item(PAPER, item):
        assert row.cell.use != SCORED or not isinstance(row.ours, str), row.cell.key


def test_a_batch_takes_its_operations_at_the_rate_of_its_processor() -> None:
    for method, processor in ((MNN, "cpu"), (MNN_INT8, "cpu-int8"), (DSP, "npu")):
        own = device(XIAOMI_11).processor(processor)
        operations = 64 * profile_of("VGG-16").training_flops
        cost = batch_cost("VGG-16", method)
        assert cost.duration_s == pytest.approx(operations / own.flops_per_s, rel=0.05)
        assert cost.energy_j == cost.duration_s * own.active_w


def test_gains_are_least_on_the_phone_of_which_the_text_says_so() -> None:
    gains = {
        phone: batch_cost("VGG-16", MNN, phone).duration_s
        / batch_cost("VGG-16", DSP, phone).duration_s
        for phone in PHONES
    }
    assert min(gains, key=gains.__getitem__) == REDMI


@pytest.mark.parametrize("method", [MNN, DSP])
def test_a_round_is_the_hubs_transfers_and_one_training(method: str) -> None:
    one, num_bytes = federated_round("VGG-16", method), model_bytes("VGG-16", method)
    transfers_s = 2 * CLIENTS_A_ROUND * num_bytes / link_bytes_per_s()
    clients, num_samples = CLIENTS["VGG-16"]
    batches = num_samples / clients / 20
    training_s = batches * batch_cost("VGG-16", method, batch=20).duration_s
    assert max(transfers_s, training_s) < one.duration_s < 1.1 * (transfers_s + training_s)
    whole = federated_cost("VGG-16", method, 100.0)
    assert whole.duration_s == pytest.approx(100.0 * one.duration_s)
    # A client is drawn in one round of fifty.
    assert whole.energy_j == pytest.approx(2.0 * one.energy_j)


def test_int8_models_are_a_quarter_on_the_wire() -> None:
    for label in CLIENTS:
        assert model_bytes(label, MNN) == 4.0 * model_bytes(label, DSP)


def test_a_number_shows_both_parts_of_its_table(socflower: Socflower) -> None:
    shown = json.loads(socflower("paper", "mandheling", "--table", "8", "--json").out)["items"]
    assert [item["id"] for item in shown] == ["table-8a", "table-8b"]
    listed = socflower("paper", "mandheling", "--list", "--json")
    assert {item["id"] for item in json.loads(listed.out)["items"] if item["num_cells"]} == {
        *COMPUTE
    }
