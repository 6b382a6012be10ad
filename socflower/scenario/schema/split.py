"""`[edgecloud]` of a scenario: the cloud, the link to it, and how a model is trained over both."""

from typing import Annotated

from pydantic import Field

from socflower.edgecloud.plan.decision import WindowSchedule
from socflower.errors import ConfigError
from socflower.field_rules import OneOf, Pairs
from socflower.scenario.schema.key_rules import (
    is_set,
    require_reader,
    shown,
)
from socflower.strategies.presets import SPLIT_STRATEGIES
from socflower.toml_file import Table
from socflower.wire.codecs.quantisation import BITS

CLICK_MODEL, GENERATOR = "click-model", "digit-generator"
"""Models of parties with different features, and of a reverse split."""

CLICKS = "clicks"
"""The data of parties with different features."""

# The most batches that may be in flight at the same time.
_MAX_BATCHES = 10_000

Rate = Annotated[float, Field(gt=0)]
Auto = Annotated[str, OneOf(("auto",))]
_Width = Annotated[int, OneOf(BITS)]
_BY_CALIBRATION = "[calibrates](guides/split-training.md#k-and-bits-by-calibration) it"
_CALIBRATED = ("window", "bits", "gradient_bits")


class EdgeCloudConfig(Table):
    """`[edgecloud]`: each SoC of the cluster is an edge with a link of its own to the cloud."""

    cloud_device: str = Field(
        "gpu-v100", description="device of the catalogue that each cloud half has"
    )
    link: str | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        "wifi",
        description=(
            "a generated bandwidth profile: `4g-foot`, `4g-bicycle`, `4g-bus`, `4g-car`, "
            "`4g-tram`, `4g-train`, `wifi`, "
            "`one-hop` (an access point at home), `5g`; `constant`; or a recorded one, a path relative to the scenario "
            "that ends in `.csv`. Or a list, one for each edge, without files"
        ),
    )
    bytes_per_s: tuple[Rate, Rate] | None = Field(
        None, description="[up, down]: of `constant`, which needs it"
    )
    latency_s: float = Field(0.005, ge=0, description="of `constant` and of `segments`, one way")
    segments: tuple[tuple[float, float, float], ...] = Field(
        (),
        description=(
            "[seconds, bytes/s up, bytes/s down]: a link in parts, in place of `link`; 0 is an outage"
        ),
    )
    repeats: bool = Field(
        False, description="whether `segments` begin again at their end; else the last one stays"
    )
    jitter: float = Field(
        0.0,
        ge=0,
        description="of `constant` and of `segments`: standard deviation of the rates as "
        "a part of their mean, changing within about ten seconds",
    )
    shared_bytes_per_s: tuple[Rate, Rate] | None = Field(
        None, description="[up, down]: of an uplink that all edges share behind their own links"
    )
    cloud_processors: int | None = Field(
        None, ge=1, description=("how many cloud halves of `own` work at a time; default: all")
    )
    cut: int | Annotated[str, Field(min_length=1)] = Field(
        "auto",
        description=(
            "the front half's last layer by name, or the number of the place from 0; an error lists all names"
        ),
    )
    adapt: bool = Field(
        True,
        description="whether the cut moves as the link changes; `split-replay` alone, with a "
        "cloud half for each edge",
    )
    allow_edge_only: bool = Field(
        False, description="whether the engine may take the cloud out of it"
    )
    window: Annotated[Pairs, Field(min_length=1)] | Auto = Field(
        ((0.0, 5.0),),
        description=(
            "[part of training, K]: from which part of all batches on gradients may be how stale; "
            f'"auto" {_BY_CALIBRATION}'
        ),
    )
    grouped: bool = Field(
        False,
        description="whether batches go in groups of K + 1, each of which waits for the one before, as the paper "
        "draws it; else the window of K slides",
    )
    bits: Annotated[tuple[_Width, ...], Field(min_length=1)] | Auto = Field(
        (8,),
        description=f'widths of features that the engine chooses among; "auto" {_BY_CALIBRATION}',
    )
    gradient_bits: _Width | Auto = Field(
        32, description=f'width of gradients on their way back; "auto" {_BY_CALIBRATION}'
    )
    loss_budget: float | None = Field(
        None,
        ge=0,
        description="of `auto`, which needs it: how much more loss on the test set than with K = 0 and 32 bits is "
        "accepted at the end of the calibration, as a part of it; with 0 there is no calibration",
    )
    codec_for: Annotated[str, OneOf(("all", "ours"))] = Field(
        "all",
        description="which strategies have `bits`, `gradient_bits`, `error_feedback` and `delta`: `all`, or "
        "`split-replay` alone, while the others send 32 bits",
    )
    error_feedback: Annotated[str, OneOf(("none", "diagonal", "rank-one"))] = Field(
        "none", description=("how gradients are corrected by what the codec lost")
    )
    delta: bool = Field(
        False,
        description=(
            "send what a sample's features changed by since they were last sent, without error feedback. It remembers "
            "within a round, which therefore needs 2 epochs or more"
        ),
    )
    cloud_model: Annotated[str, OneOf(("own", "shared"))] = Field(
        "own",
        description=(
            "cloud halves of several edges: `own`, one for each, averaged with the edge halves after each round; or "
            "`shared`, one that takes the edges' batches in turn"
        ),
    )
    frozen: str = Field("", description="name of the last layer that is not trained")
    costs: str = Field(
        "",
        description="a `.json` of costs measured on the devices themselves "
        "([how](guides/split-training.md#when-it-pays)), for all edges; without it those of the "
        "catalogue",
    )
    classes: tuple[int, ...] = Field(
        (), description="train and test on images of these classes only"
    )

    def check(self) -> None:
        """Refuse keys that this kind of link does not read, and an invalid window."""
        is_constant = "constant" in self.link_names and not self.segments
        if is_set(self, "bytes_per_s") != is_constant:
            raise ConfigError(
                f'{shown(self, "bytes_per_s")}: link = "constant" needs it, and no other link takes it'
            )
        if isinstance(self.link, tuple) and self.segments:
            raise ConfigError(f"{shown(self, 'link')} and segments: leave one of the two out")
        for key in ("latency_s", "jitter", "repeats"):
            read = self.segments or (is_constant and key != "repeats")
            if is_set(self, key) and not read:
                raise ConfigError(f"{shown(self, key)}: the link does not read it; leave it out")
        require_reader(self, "cloud_model", {"cloud_processors": ("own",)})
        if self.grouped and not isinstance(self.window, str) and not any(k for _, k in self.window):
            raise ConfigError(
                f"{shown(self, 'grouped')}: with K = 0 every batch waits for the one before; leave it out, or raise "
                "window"
            )
        self._check_calibration()
        self.window_schedule()

    def _check_calibration(self) -> None:
        """Refuse a calibration without its budget, a budget without calibration, and what is not calibrated."""
        if self.calibrated:
            at = " and ".join(shown(self, key) for key in self.calibrated)
            if self.loss_budget is None:
                raise ConfigError(f"{at}: needs loss_budget, such as 0.05")
            for key, why in (
                ("delta", "remembers features for longer than a calibration"),
                ("codec_for", "gives the other strategies no bits to calibrate"),
            ):
                if is_set(self, key):
                    raise ConfigError(f"{shown(self, key)} {why}; leave it out, or give {at}")
        elif self.loss_budget is not None:
            keys = ", ".join(_CALIBRATED)
            raise ConfigError(
                f'{shown(self, "loss_budget")} is for {keys} = "auto"; set one of them, or leave it out'
            )

    @property
    def calibrated(self) -> tuple[str, ...]:
        """The keys whose values are chosen by a calibration at the start of the training."""
        return tuple(key for key in _CALIBRATED if getattr(self, key) == "auto")

    def is_coded(self, strategy: str) -> bool:
        """Return whether a strategy sends features and gradients in the given bits."""
        return strategy == SPLIT_STRATEGIES[0] or self.codec_for == "all"

    def widths(self, strategy: str) -> tuple[tuple[int, ...], int]:
        """Return the bits of a strategy's features, among which it chooses, and those of its gradients.

        What is to be calibrated has 32 bits until then.
        """
        if not self.is_coded(strategy):
            return (32,), 32
        return (
            (32,) if isinstance(self.bits, str) else self.bits,
            32 if isinstance(self.gradient_bits, str) else self.gradient_bits,
        )

    @property
    def link_names(self) -> tuple[str, ...]:
        """The links of the edges, or the one that all have."""
        return self.link if isinstance(self.link, tuple) else (self.link,)

    def window_schedule(self) -> WindowSchedule:
        """Return how stale gradients may be, by the part of the training; `ConfigError` if the parts do not rise.

        What is to be calibrated is 0 until then.
        """
        if isinstance(self.window, str):
            return WindowSchedule(steps=((0.0, 0),), grouped=self.grouped)
        if any(limit > _MAX_BATCHES or limit != int(limit) for _, limit in self.window):
            raise ConfigError(
                f"{shown(self, 'window')}: each K is a whole number, at most {_MAX_BATCHES}"
            )
        try:
            steps = tuple((part, int(limit)) for part, limit in self.window)
            return WindowSchedule(steps=steps, grouped=self.grouped)
        except ConfigError as error:
            raise ConfigError(f"{shown(self, 'window')}: {error}") from None
