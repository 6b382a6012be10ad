"""Virtual time of int8 and of CPU and NPU at once: the slower processor ends a step, and the rules bound the gain."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.cluster import (
    FP32,
    Device,
    LayerProfile,
    ModelProfile,
    Processor,
    StepTimings,
    device,
)
from socflower.precision.cpu_share import (
    MIXING_RULES,
    RULES_BY_THROUGHPUT,
    accuracy_floor,
    cpu_samples,
)
from socflower.precision.processor_costs import (
    MERGE_PASSES,
    REQUANTISE_PASSES,
    Int8Pricing,
    MixedPricing,
)
from tests.one_line import refused


def profile(name, input_bytes, *layers):
    keys = ("name", "kind", "forward_flops", "output_bytes", "weight_bytes", "num_tensors")
    made = tuple(LayerProfile(**dict(zip(keys, layer, strict=True))) for layer in layers)
    return ModelProfile(name=name, input_bytes=input_bytes, layers=made)


MODEL = profile(
    "m", 100.0, ("a", "Conv2d", 2e6, 400.0, 40.0, 2), ("b", "Linear", 1e6, 40.0, 60.0, 1)
)
VGG11 = profile("vgg11", 12288.0, ("all", "Conv2d", 0.917e9 / 3, 4e5, 36.9e6, 34))
SOC = device("snapdragon-865")

many = settings(max_examples=60)
rates = st.floats(1e8, 1e13)
fractions = st.floats(0.0, 1.0)
counts = st.integers(0, 2000)
rules = st.sampled_from(MIXING_RULES)


def machine(cpu=9e6, npu=36e6, **changes):
    """Return a device of a CPU and, unless `npu` is 0, an NPU, with a CPU path in int8 that shares the CPU."""
    processors = {
        "cpu": Processor(name="cpu", flops_per_s=cpu, active_w=5.0),
        "cpu-int8": Processor(
            name="cpu-int8", flops_per_s=cpu * 1.5, active_w=5.0, number_format="int8", shares="cpu"
        ),
    }
    if npu:
        processors["npu"] = Processor(
            name="npu", flops_per_s=npu, active_w=3.0, number_format="int8"
        )
    values = {
        "name": "d",
        "idle_w": 1.0,
        "network_w": 0.5,
        "memory_bytes": 1e9,
        "memory_bytes_per_s": 500.0,
        "layer_overhead_s": 0.0,
        "processors": processors,
    }
    return Device(**(values | changes))


def slowest_s(cost):
    return max(part.compute_s for part in cost.processors)


def samples_on_cpu(pricing, soc, num_samples):
    floor = accuracy_floor(pricing.rule, pricing.alpha)
    return cpu_samples(num_samples, pricing.share("m", soc), floor)


@many
@given(rates, rates, counts, fractions, st.floats(0, 1))
def test_at_rule_fp32_a_step_costs_what_it_costs_in_fp32(cpu, npu, num_samples, alpha, overhead_s):
    soc = machine(cpu, npu, layer_overhead_s=overhead_s)
    pricing = MixedPricing(rule="fp32", alpha=alpha)
    assert pricing.step_cost(MODEL, soc, num_samples) == FP32.step_cost(MODEL, soc, num_samples)
    assert pricing.rate("m", soc) == pytest.approx(FP32.rate("m", soc), rel=1e-15)


@many
@given(rules, rates, rates, st.integers(0, 2000), fractions)
def test_a_step_takes_the_samples_of_the_slower_processor_over_its_rate(
    rule, cpu, npu, num_samples, alpha
):
    """Merging is paid if both work, 3 passes over 100 bytes at 500 bytes/s; rounding the masters if the NPU does."""
    soc = machine(cpu, npu)
    pricing = MixedPricing(rule=rule, alpha=alpha)
    cost = pricing.step_cost(MODEL, soc, num_samples)
    fp32 = FP32.step_cost(MODEL, soc, num_samples)
    on_cpu = samples_on_cpu(pricing, soc, num_samples)
    counts = {"cpu": on_cpu, "npu": num_samples - on_cpu}
    expected = MODEL.training_flops * max(counts["cpu"] / cpu, counts["npu"] / npu)
    assert slowest_s(cost) == pytest.approx(expected, rel=1e-12)
    if num_samples:
        assert {part.processor for part in cost.processors} == {
            name for name, count in counts.items() if count
        }
    assert cost.merge_s == pytest.approx(MERGE_PASSES * 0.2 if all(counts.values()) else 0.0)
    rounding_s = REQUANTISE_PASSES * 0.2 if counts["npu"] else 0.0
    assert cost.update_s - fp32.update_s == pytest.approx(rounding_s)
    assert cost.processor == "cpu"


@many
@given(rules, rates, rates, fractions)
def test_rate_is_the_inverse_of_a_samples_step_time_without_overhead(rule, cpu, npu, alpha):
    """In the limit of a batch so large that whole samples do not round: 1e15 of them here."""
    soc = machine(cpu, npu)
    pricing = MixedPricing(rule=rule, alpha=alpha)
    num_samples = 10**15
    seconds = slowest_s(pricing.step_cost(MODEL, soc, num_samples)) / num_samples
    assert MODEL.training_flops / pricing.rate("m", soc) == pytest.approx(seconds, rel=1e-9)


def test_both_processors_pay_their_own_overhead():
    cost = MixedPricing(rule="half").step_cost(MODEL, machine(layer_overhead_s=0.01), 10)
    assert [part.compute_s for part in cost.processors] == pytest.approx([5.0 + 0.02, 1.25 + 0.02])


def test_timings_of_a_device_profile_win_on_both_sides():
    processors = dict(machine().processors)
    for name, step_s in (("cpu", 3.0), ("npu", 0.5)):
        timings = {"m": StepTimings(batches=(1,), step_s=(step_s,))}
        processors[name] = dataclasses.replace(processors[name], timings=timings)
    cost = MixedPricing(rule="half").step_cost(MODEL, machine(processors=processors), 10)
    assert [part.compute_s for part in cost.processors] == pytest.approx([15.0, 2.5])


# ------------------------------------------------------------------------- devices without an accelerator


@many
@given(st.sampled_from([*RULES_BY_THROUGHPUT, "fp32"]), counts, fractions, st.none() | fractions)
def test_a_device_without_an_accelerator_trains_in_fp32_under_the_rules_that_follow_throughput(
    rule, num_samples, alpha, share
):
    """Also in a group whose other devices' share of the CPU is given; int8 on the CPU itself is no accelerator."""
    soc = machine(npu=0)
    pricing = MixedPricing(rule=rule, alpha=alpha, cpu_share=share)
    assert pricing.step_cost(MODEL, soc, num_samples) == FP32.step_cost(MODEL, soc, num_samples)
    assert pricing.rate("m", soc) == pytest.approx(FP32.rate("m", soc), rel=1e-15)


@pytest.mark.parametrize("share", [None, 0.5])
@pytest.mark.parametrize("rule", ["half", "int8"])
def test_a_device_without_an_accelerator_is_refused_under_fixed_shares(rule, share):
    pricing = MixedPricing(rule=rule, cpu_share=share)
    soc = machine(npu=0)
    for call in (lambda: pricing.step_cost(MODEL, soc, 8), lambda: pricing.rate("m", soc)):
        refused(call, "device d", "cpu", f"rule = '{rule}'")


@many
@given(rules, rates, rates, st.integers(1, 2000), fractions)
def test_a_given_share_of_the_cpu_holds_whatever_the_rule(rule, cpu, npu, num_samples, share):
    soc = machine(cpu, npu)
    cost = MixedPricing(rule=rule, cpu_share=share).step_cost(MODEL, soc, num_samples)
    on_cpu = cpu_samples(num_samples, share)
    assert cost.compute_s == pytest.approx(MODEL.training_flops * on_cpu / cpu)
    assert sum(part.compute_s for part in cost.concurrent) == pytest.approx(
        MODEL.training_flops * (num_samples - on_cpu) / npu
    )


@given(fractions)
def test_another_confidence_changes_nothing_else(alpha):
    pricing = MixedPricing(rule="normalised", cpu_share=0.25)
    assert pricing.with_alpha(alpha) == MixedPricing(rule="normalised", alpha=alpha, cpu_share=0.25)
    assert pricing.alpha == 1.0


# ----------------------------------------------------------------------------------------- a real device


def joules(cost, soc):
    """Return the device's energy while it computes: at rest for the whole step, and each processor's own on top."""
    work = sum(
        part.compute_s * (soc.processor(part.processor).active_w - soc.idle_w)
        for part in cost.processors
    )
    return slowest_s(cost) * soc.idle_w + work


def test_shares_of_a_snapdragon_865_on_vgg11():
    """65.6 and 254.8 GFLOP/s (as a Snapdragon 888): beta = 0.795, so that the paper's floor of e^-1 decides."""
    pricing = MixedPricing()
    assert pricing.npu_ratio("vgg11", SOC) == pytest.approx(254.8 / 320.4)
    assert pricing.share("vgg11", SOC) == pytest.approx(math.exp(-1.0))
    assert MixedPricing(rule="normalised").share("vgg11", SOC) == pytest.approx(65.6 / 320.4)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("batch", [1, 4, 61, 64, 1000])
def test_fp32_takes_less_than_e_times_the_papers_time_and_joules_on_a_snapdragon_865(alpha, batch):
    fp32 = FP32.step_cost(VGG11, SOC, batch)
    mixed = MixedPricing(alpha=alpha).step_cost(VGG11, SOC, batch)
    assert slowest_s(fp32) / slowest_s(mixed) <= math.e
    least = 2.0 if alpha == 1.0 and batch >= 64 else 0.0
    whole = [slowest_s(cost) + cost.merge_s + cost.update_s for cost in (fp32, mixed)]
    assert least < whole[0] / whole[1] < math.e
    assert least < joules(fp32, SOC) / joules(mixed, SOC) < math.e


def test_int8_runs_on_the_fastest_int8_processor_or_the_default_one():
    pricing = Int8Pricing()
    assert pricing.step_cost(VGG11, SOC, 8).processor == "npu"
    assert pricing.rate("vgg11", SOC) == 254.8e9
    assert pricing.step_cost(MODEL, machine(npu=0), 8).processor == "cpu-int8"
    plain = machine(processors={"cpu": Processor(name="cpu", flops_per_s=9e6, active_w=5.0)})
    assert pricing.step_cost(MODEL, plain, 8) == FP32.step_cost(MODEL, plain, 8)
    assert pricing.rate("m", plain) == FP32.rate("m", plain)


@many
@given(rules, rates, rates, st.integers(0, 2000), fractions)
def test_weights_are_merged_at_synchronisations_and_not_in_steps(
    rule, cpu, npu, num_samples, alpha
):
    soc = machine(cpu, npu)
    by_step = MixedPricing(rule=rule, alpha=alpha).step_cost(MODEL, soc, num_samples)
    pricing = MixedPricing(rule=rule, alpha=alpha, merge="weights")
    cost = pricing.step_cost(MODEL, soc, num_samples)
    assert cost.processors == by_step.processors
    assert cost.merge_s == 0.0
    assert cost.update_s == FP32.step_cost(MODEL, soc, num_samples).update_s
    assert MixedPricing(rule=rule).at_synchronisation is None
    merging = pricing.at_synchronisation
    if rule == "fp32":
        assert merging is None
        return
    merge = merging.step_cost(MODEL, soc, num_samples)
    assert (merge.forward_s, merge.backward_s, merge.concurrent) == (0.0, 0.0, ())
    assert merge.update_s == pytest.approx((MERGE_PASSES + REQUANTISE_PASSES) * 0.2)
    assert merging.step_cost(MODEL, machine(cpu, None), 1).update_s == 0.0
