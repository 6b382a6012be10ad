"""What the tables of a scenario need of each other: rules that concern keys of more than one table, or a strategy."""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from socflower.errors import ConfigError
from socflower.hierarchy.exchange.coding_bytes import gradient_coding
from socflower.hierarchy.exchange.models import AUTO, NONE, STAR, compression_fault
from socflower.hierarchy.group_preemption import GROUPS
from socflower.hierarchy.spare_socs import spares_fault
from socflower.hierarchy.sync_intervals import MOST_INTERVALS
from socflower.scenario.schema.config import (
    COUNTED,
    OF_LEADERS,
    READ_BY_PIPELINES,
    DataConfig,
    OwnSettings,
    StrategyConfig,
    own_settings_by_table,
    unread_keys,
)
from socflower.scenario.schema.key_rules import is_set, shown
from socflower.scenario.schema.outer import OUTER_SGD
from socflower.scenario.schema.pipeline import LANGUAGE_MODELS, PipelineConfig
from socflower.scenario.schema.split import (
    CLICK_MODEL,
    GENERATOR,
)
from socflower.strategies.presets import (
    CLUSTER_STRATEGIES,
    SPLIT_STRATEGIES,
    STRATEGIES,
    GroupStrategy,
    family_of,
)
from socflower.wire.message_keys import WIRES

if TYPE_CHECKING:
    from socflower.scenario.schema.scenario_file import ScenarioFile

_READ_BY_SPLITS = ("name", "socs", "sync_interval_epochs", "tolerate_client_errors")

_INT8_WIRE = ("fedavg", "local-sgd", "socflow")

Rule = tuple[object, str, str]
"""Whether a rule is broken, the key that breaks it, and the reason with the remedy."""


def require_fitting_tables(file: "ScenarioFile") -> None:
    """Raise `ConfigError` for the first rule that a file breaks."""
    for rules in (
        _rules_of_groups,
        _rules_of_clouds,
        _rules_of_arithmetic,
        _rules_of_pipelines,
        _rules_of_comparisons,
    ):
        for broken, key, why in rules(file):
            if broken:
                raise ConfigError(f"{key}: {why}")
    for name, own in file.compare.train.items():
        _require_own(file, name, own)


def _name(file: "ScenarioFile") -> str:
    return file.at("strategy", "name")


def _rules_of_groups(file: "ScenarioFile") -> Iterator[Rule]:
    """Yield what several groups, their leaders and their servers need."""
    strategy, groups = file.strategy, file.strategy.groups
    num_servers = file.site.servers if file.site else 1
    # A pipeline, whose groups are "auto" here, has a rule of its own.
    if strategy.server_interval > 1 and groups != "auto":
        yield (
            not 1 < num_servers <= int(groups),
            file.at("strategy", "server_interval"),
            f"it is for [site] servers with a group each; there are {num_servers}, and {groups} "
            "groups",
        )
    for key in sorted(unread_keys(strategy.name)):
        why = f"{_name(file)} does not read it; leave it out"
        at = "[strategy.streaming]" if key == "streaming" else file.at("strategy", key)
        yield is_set(strategy, key), at, why
    for key in OF_LEADERS if groups == 1 else ():
        why = "it is for leaders of several groups, and groups is 1; leave it out"
        yield is_set(strategy, key), file.at("strategy", key), why
    yield from _rules_of_preemption(file)
    yield from _rules_of_dispatch(file)
    if strategy.use_spares:
        # Whether there are spare ones is known with the cluster.
        fault = spares_fault(1, reshuffle=strategy.reshuffle, preemption=strategy.preemption)
        yield fault, file.at("strategy", "use_spares"), fault
    first = file.kind.is_synchronous_first
    yield (
        first and not 1 <= file.synchronous_epochs < file.train.epochs,
        file.at("strategy", "post_local_epochs"),
        f"of {file.at('train', 'epochs')}; leave at least one before and one after the switch",
    )
    for key in ("compression", "server_interval"):
        why = f"{_name(file)} has groups of two plans; leave it out"
        yield first and is_set(strategy, key), file.at("strategy", key), why
    yield from _rules_of_streaming(file)
    why = f"{_name(file)} trains on each SoC alone; leave it out"
    has_own = is_set(strategy, "groups") and groups != "auto"
    yield file.kind.has_local_epochs and has_own, file.at("strategy", "groups"), why
    yield from _rules_of_late_groups(file)
    why = f"{_name(file)} does not read it; leave it out"
    if not file.kind.is_alone:
        why = f"it is for groups = 'auto', and {file.at('strategy', 'groups')}; leave it out"
    yield (
        is_set(strategy, "group_rule") and (file.kind.is_alone or groups != "auto"),
        file.at("strategy", "group_rule"),
        why,
    )
    yield from _rules_of_exchanges(file)
    yield (
        is_set(file.train, "local_epochs") and "local_epochs" in file.kind.unread_keys,
        file.at("train", "local_epochs"),
        f"{_name(file)} does not read it; leave it out, or give it in [compare.train.fedavg]",
    )
    yield from _rules_of_leaders(file)


def _rules_of_late_groups(file: "ScenarioFile") -> Iterator[Rule]:
    """Yield what a round that does not wait for all groups needs."""
    strategy = file.strategy
    kind, quorum = strategy.kind, file.at("strategy", "quorum")
    if strategy.quorum < 1 and isinstance(kind, GroupStrategy):
        counted = kind.groups(strategy.groups, 0)
        yield counted == "auto", quorum, COUNTED
        if counted not in ("auto", 0):
            fault = strategy.waits_for.fault(int(counted))
            yield fault, quorum, fault
        arithmetic = file.at("precision", "arithmetic")
        why = f"{arithmetic}, and changes of late groups' models are added in FP32; leave it out"
        yield file.precision.arithmetic != "fp32", quorum, why


def _rules_of_exchanges(file: "ScenarioFile") -> Iterator[Rule]:
    """Yield what an exchange of gradients inside groups needs."""
    strategy = file.strategy
    coding = gradient_coding(strategy.exchanges().compression)
    yield (
        coding.applies_momentum and file.optimizer != "sgd",
        _name(file) if strategy.compression == NONE else file.at("strategy", "compression"),
        f"it takes over SGD's momentum, and {file.at('train', 'optimizer')}; use another one",
    )


def _rules_of_leaders(file: "ScenarioFile") -> Iterator[Rule]:
    """Yield what an exchange of models between leaders needs."""
    strategy = file.strategy
    needs_models = file.hub_needs_models
    yield (
        needs_models and strategy.exchanges().leaders not in (AUTO, STAR),
        file.at("strategy", "leaders"),
        f"{needs_models} needs each group's model, and not their mean; use 'star'",
    )
    compressed = file.at("strategy", "leader_compression")
    yield (
        needs_models and strategy.leader_compression != NONE,
        compressed,
        f"{needs_models} needs each group's model, and not their mean; leave it out",
    )
    # Values of its own table have been checked with it.
    fault = compression_fault(STAR, strategy.leader_compression)
    in_int8 = file.precision.wire != WIRES[0] and strategy.leaders == AUTO
    yield in_int8 and fault, compressed, f"{file.at('precision', 'wire')} needs a star: {fault}"


def _rules_of_dispatch(file: "ScenarioFile") -> Iterator[Rule]:
    """Yield what needs data at the nodes."""
    arithmetic = file.at("precision", "arithmetic")
    measures = f"{arithmetic} measures alpha on samples that nodes hold"
    for broken, why in (
        (not file.strategy.reshuffle, "reshuffle = False leaves data where they are"),
        (file.precision.arithmetic == "mixed", measures),
    ):
        is_broken = file.strategy.dispatch and broken
        yield is_broken, file.at("strategy", "dispatch"), f"{why}; leave one of the two out"


def _rules_of_preemption(file: "ScenarioFile") -> Iterator[Rule]:
    """Yield methods that do not read keys of some groups only, and what does not let whole groups end."""
    strategy, preemption = file.strategy, file.at("strategy", "preemption")
    yield (
        file.kind.is_grid and is_set(strategy, "sync_interval_epochs"),
        file.at("strategy", "sync_interval_epochs"),
        f"{_name(file)} sums gradients in each mini-batch, not later; leave it out, or use name = 'socflow'",
    )
    if strategy.preemption != GROUPS:
        return
    rebalance, quorum = file.at("strategy", "rebalance"), file.at("strategy", "quorum")
    for broken, why in (
        (strategy.groups == 1, "groups = 1, and one group always stays"),
        (strategy.rebalance in ("groups", "both"), f"{rebalance} moves SoCs between groups"),
        (strategy.quorum < 1, f"{quorum} keeps the work of groups that are late"),
    ):
        yield broken, preemption, f"{why}; leave one of the two out"


def _rules_of_streaming(file: "ScenarioFile") -> Iterator[Rule]:
    """Yield what fragments of a model do not allow."""
    strategy, said = file.strategy, f"{_name(file)} exchanges fragments of the model"
    if not file.kind.is_streaming:
        return
    interval = strategy.sync_interval_epochs
    outer, arithmetic = strategy.outer_step, file.precision.arithmetic
    for broken, key, why in (
        (isinstance(interval, str), "sync_interval_epochs", "give a number of epochs"),
        (strategy.groups != "auto", "groups", "each SoC is one; leave it out"),
        (strategy.server_interval > 1, "server_interval", "leave it out"),
    ):
        yield broken, file.at("strategy", key), f"{said}; {why}"
    yield (
        outer and outer.name not in OUTER_SGD,
        f"[strategy.outer] name = {outer and outer.name!r}",
        f"{said}; use one of {', '.join(OUTER_SGD)}",
    )
    yield arithmetic != "fp32", file.at("precision", "arithmetic"), f"{said}; use 'fp32'"


def _rules_of_arithmetic(file: "ScenarioFile") -> Iterator[Rule]:
    """Yield what training in integers does not know."""
    train, arithmetic = file.train, file.precision.arithmetic
    outer, said = file.strategy.outer_step, file.at("precision", "arithmetic")
    in_int8, in_integers = arithmetic == "int8", arithmetic != "fp32"
    for broken, key, instead in (
        (in_integers and file.optimizer != "sgd", "optimizer", "'sgd'"),
        (in_integers and train.device not in ("auto", "cpu"), "device", "'cpu'"),
        (file.precision.has_int8_weights and train.weight_decay, "weight_decay", "0"),
        (in_int8 and train.reduction != "auto", "reduction", "'auto'"),
    ):
        yield broken, file.at("train", key), f"{said} does not know it; use {instead}"
    yield (
        file.optimizer == "muon" and (file.kind.is_pipeline or file.kind.uses_cloud),
        file.at("train", "optimizer"),
        f"it needs the whole model, and {_name(file)} divides it; use 'adamw'",
    )
    yield (
        train.momentum and file.optimizer != "sgd",
        file.at("train", "momentum"),
        f"it is for 'sgd', and {_name(file)} trains by {file.optimizer!r}; leave it out, or give optimizer",
    )
    yield (
        file.strategy.name == "muloco" and file.optimizer != "muon",
        file.at("train", "optimizer"),
        f"{_name(file)} is 'diloco' with 'muon'; use name = 'diloco'",
    )
    yield (
        train.momentum and file.precision.has_int8_weights and not file.kind.uses_cloud,
        file.at("train", "momentum"),
        f"{file.at('precision', 'algorithm')} has none; leave it out, or use 'real-scales'",
    )
    yield (
        arithmetic == "mixed" and file.kind.has_local_epochs,
        said,
        f"{_name(file)} prices whole epochs, and alpha is measured by steps; use 'fp32' or 'int8'",
    )
    yield (
        file.precision.wire != "float32" and file.strategy.name not in _INT8_WIRE,
        file.at("precision", "wire"),
        f"it is for {' and '.join(map(repr, _INT8_WIRE))}, and {_name(file)}; leave it out",
    )
    yield (
        file.precision.merge == "weights" and file.strategy.name == "fedavg",
        file.at("precision", "merge"),
        f"clients of {_name(file)} keep no alpha from round to round; use 'socflow' or 'ring'",
    )
    yield (
        in_int8 and outer and outer.name == "fedprox",
        "[strategy.outer] name = 'fedprox'",
        f"{said} has no proximal term; use 'fp32' or 'mixed'",
    )


def _rules_of_pipelines(file: "ScenarioFile") -> Iterator[Rule]:
    """Yield what a pipeline does not read, and what its samples and batches need."""
    if not file.kind.is_pipeline:
        names = " and ".join(repr(name) for name, kind in STRATEGIES.items() if kind.is_pipeline)
        why = f"it is for name = {names}, and {_name(file)}; leave it out"
        yield file.pipeline is not None, "[pipeline]", why
        return
    table, batch_size = file.pipeline or PipelineConfig(), file.train.batch_size
    said = f"{_name(file)} does not read it; leave it out"
    yield file.precision.arithmetic != "fp32", file.at("precision", "arithmetic"), said
    grid = file.kind.is_grid
    yield from _unread(file, (*READ_BY_PIPELINES, "groups") if grid else READ_BY_PIPELINES)
    sample = f"[pipeline] {shown(table, 'sample')}"
    yield (
        table.sample and file.data != DataConfig(),
        "[data]",
        f"{sample} describes what there is instead; leave one of the two out",
    )
    yield (
        table.sample and file.model.pretrained,
        file.at("model", "pretrained"),
        f"{sample} has nothing to train on; leave it out",
    )
    yield (
        table.sample and table.num_samples < batch_size,
        f"[pipeline] num_samples = {table.num_samples}",
        f"it is less than [train] batch_size = {batch_size}",
    )
    for size in table.micro_batch_sizes:
        why = f"{size} does not divide [train] batch_size = {batch_size}"
        yield batch_size % size, "[pipeline] micro_batch_sizes", why
    yield (
        file.model.name in LANGUAGE_MODELS and len(table.sample) != 1,
        sample,
        f"{' and '.join(LANGUAGE_MODELS)} take [tokens]",
    )


def _unread(file: "ScenarioFile", read: Collection[str]) -> Iterator[Rule]:
    """Yield the keys of [strategy] and [train] that a strategy without groups does not read; it reads `read`."""
    why = f"{_name(file)} does not read it; leave it out"
    for key in StrategyConfig.model_fields:
        yield key not in read and is_set(file.strategy, key), f"[strategy] {key}", why
    for key in ("local_epochs", "reduction"):
        yield is_set(file.train, key), file.at("train", key), why


def _rules_of_clouds(file: "ScenarioFile") -> Iterator[Rule]:
    """Yield what training with a cloud does not read, and cannot do in integers."""
    if not file.kind.uses_cloud:
        why = f"it is for {', '.join(SPLIT_STRATEGIES)}, and {_name(file)}; leave it out"
        yield file.edgecloud is not None, "[edgecloud]", why
        return
    split, arithmetic = file.split, file.precision.arithmetic
    yield (
        file.train.epochs / file.strategy.round_epochs > MOST_INTERVALS,
        file.at("strategy", "sync_interval_epochs"),
        f"there would be more than {MOST_INTERVALS} rounds; raise it",
    )
    yield from _unread(file, _READ_BY_SPLITS)
    for event in file.events:
        why = f"{_name(file)} knows 'preempt' only; a link's outages are [edgecloud] segments"
        yield event.kind != "preempt", f"[[event]] kind = {event.kind!r}", why
    for key in split.calibrated:
        why = "a calibration needs all edges, and its trials are no rounds; leave [[event]] out, or give a value"
        yield file.events, file.at("edgecloud", key), why
    yield (
        file.precision.held_out and arithmetic != "mixed",
        file.at("precision", "held_out"),
        f"{_name(file)} trains on all samples; leave it out",
    )
    if arithmetic == "fp32":
        return
    for key, broken in (
        ("merge", file.precision.merge == "weights"),
        ("fp32_operators", bool(file.precision.fp32_operators)),
    ):
        why = f"the edge of {_name(file)} trains only a part of a model; leave it out"
        yield broken, file.at("precision", key), why
    said = file.at("precision", "arithmetic")
    why = f"{said} trains classifiers of images; leave [precision] out"
    yield file.model.name in (CLICK_MODEL, GENERATOR), file.at("model", "name"), why
    for key, reason in (
        ("frozen", "normalises by the batch, which frozen layers do not"),
        ("costs", "has other costs than those, which were measured in FP32"),
    ):
        why = f"{said} {reason}; leave one of the two out"
        yield is_set(split, key), file.at("edgecloud", key), why


def _rules_of_comparisons(file: "ScenarioFile") -> Iterator[Rule]:
    """Yield strategies that cannot run this workload, and settings of strategies that are not compared."""
    compared, family = file.compare.strategies, family_of(file.strategy.name)
    for name in compared:
        why = f"{name!r} cannot run the workload of {_name(file)}; use some of {', '.join(family)}"
        yield name not in family, "[compare] strategies", why
    why = f"it is for {', '.join(CLUSTER_STRATEGIES)}, and {_name(file)}"
    yield file.compare.predict and file.kind.uses_cloud, "[[compare.predict]]", why
    for name in file.compare.train:
        why = f"strategies = {list(compared)} does not run {name!r}; add it, or remove the table"
        yield name not in compared, f"[compare.train.{name}]", why
    for name in file.compare.epochs_to_target:
        why = f"strategies = {list(compared)} does not run {name!r}; add it, or remove the key"
        yield name not in compared, f"[compare.epochs_to_target] {name}", why


def _require_own(file: "ScenarioFile", name: str, own: OwnSettings) -> None:
    """Raise `ConfigError` for own values of a strategy that do not fit, or that it does not read."""
    at, kind = f"[compare.train.{name}]", STRATEGIES[name]
    for key in kind.unread_keys:
        if key in own:
            raise ConfigError(f"{at} {key} = {own[key]!r}: {name} does not read it; leave it out")
    of_train, of_strategy = own_settings_by_table(own, at)
    try:
        file.train.replaced(**of_train)
        file.strategy.under(name, **of_strategy)
    except ConfigError as error:
        raise ConfigError(f"{at} {error}") from None
