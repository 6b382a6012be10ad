"""The scenarios of a byte-level GPT: their sizes, and the bytes of LoRA adapters on real sockets."""

from pathlib import Path

import pytest

from benchmarks import byte_gpt
from socflower.scenario.schema.file import load_scenario
from socflower.scenario.schema.scenario_file import Scenario
from socflower.scenario.workload import initial_model, scenario_data
from socflower.training.model_state import trainable_state


def with_base(folder: Path) -> tuple[Scenario, Path, int]:
    """Return the scenario of the adapters on a base with random weights, its file, and the bytes of the whole model."""
    full, base = initial_model(load_scenario(byte_gpt.FULL)), byte_gpt.untrained_base(folder)
    scenario = load_scenario(byte_gpt.LORA, (f"model.arguments.base={base}",))
    return scenario, base, sum(tensor.nbytes for tensor in full.state_dict().values())


@pytest.mark.slow
def test_adapters_are_a_fiftieth_of_a_model_of_one_to_five_million_parameters(
    tmp_path: Path,
) -> None:
    pytest.importorskip("peft")
    scenario, _, full_bytes = with_base(tmp_path)
    assert 1e6 < full_bytes / 4 < 5e6
    sent = trainable_state(initial_model(scenario))
    assert all("lora" in name for name in sent)
    assert sum(tensor.nbytes for tensor in sent.values()) < byte_gpt.MOST_OF_FULL * full_bytes


def test_training_and_test_text_do_not_overlap() -> None:
    data = scenario_data(load_scenario(byte_gpt.FULL))
    last, first = (
        part.batch([index])["text"]
        for part, index in ((data.train, len(data.train) - 1), (data.test, 0))
    )
    assert (len(data.train), len(data.test)) == (2048, 256)
    assert (
        last.shape == first.shape == (1, 129) and last[0, -1] == first[0, 0]
    )  # what the last window predicts


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_the_wire_of_a_run_adapters_take_under_a_fiftieth(tmp_path: Path) -> None:
    """Against the least that all parameters could take: their arrays without wrapping, one model at the hub (F8)."""
    pytest.importorskip("peft")
    _, base, full_bytes = with_base(tmp_path)
    measured = byte_gpt.wire_bytes(
        f"{byte_gpt.LORA.resolve()} model.arguments.base={base}", num_rounds=2
    )
    num_steps = 2048 // byte_gpt.NUM_GROUPS // byte_gpt.BATCH_SIZE
    full_rings, full_hub = byte_gpt.NUM_NODES * num_steps * full_bytes, full_bytes
    assert 0 < measured["rings"] < byte_gpt.MOST_OF_FULL * full_rings
    assert 0 < measured["hub"] + measured["rings"] < byte_gpt.MOST_OF_FULL * (full_hub + full_rings)
    assert measured["hub"] > measured["model_bytes"]
