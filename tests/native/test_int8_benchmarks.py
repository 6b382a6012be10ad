"""The int8 benchmarks on their smallest cases: what they check must hold. Times decide nothing here."""

import pytest

from benchmarks import int8_step
from benchmarks.int8_settings import Setting, in_setting, rows_of, settings


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    in_setting(settings()[0], "benchmarks.int8_step:save_models", folder=str(folder))
    return folder


def test_a_setting_lifts_the_limits_of_its_caller(monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    free = Setting(kernel="avx512-vnni", avx2_only=False).environment()
    held = Setting(kernel="avx2", avx2_only=True).environment()
    assert "ATEN_CPU_CAPABILITY" not in free
    assert held["ATEN_CPU_CAPABILITY"] == "avx2"
    assert {free["OMP_NUM_THREADS"], held["OMP_NUM_THREADS"]} == {"1"}


@pytest.mark.parametrize("name", ["gemm", pytest.param("conv", marks=pytest.mark.slow)])
def test_every_product_equals_the_exact_one(name):
    rows = rows_of(settings()[0], f"benchmarks.{name}:rows", quick=True)
    assert rows and all(row.ok for row in rows), [row.case for row in rows if not row.ok]
    assert not any("wrong" in row.peer for row in rows if "_int_mm" not in row.peer)


@pytest.mark.slow
def test_a_saved_model_trains_in_int8_where_torch_cannot_be_imported(saved_models):
    found = in_setting(
        settings()[0], "benchmarks.int8_step_isolated:saved_model_step",
        kernel=settings()[0].kernel, model=str(saved_models / "lenet5.npz"), blocked=True, repeats=1,
    )  # fmt: skip
    assert found["wrong"] == []


@pytest.mark.slow
def test_two_threads_end_with_the_parameters_of_one(saved_models):
    found = in_setting(
        settings()[0], "benchmarks.int8_step_isolated:thread_times",
        kernel=settings()[0].kernel, model=str(saved_models / "lenet5.npz"), steps=2, repeats=1,
    )  # fmt: skip
    assert found["same"]


@pytest.mark.slow
def test_peers_are_described_with_their_threads_limits_and_build():
    setting = settings()[0]
    described = in_setting(
        setting, "benchmarks.int8_settings:describe_torch", avx2_only=setting.avx2_only
    )
    assert described["num_threads"] == 1 and described["build"]
    assert described["environment"].items() <= setting.environment().items()


@pytest.mark.slow
def test_the_quick_run_of_whole_steps_is_right():
    rows = int8_step.run(quick=True)
    assert rows and all(row.ok for row in rows), [row.case for row in rows if not row.ok]
