"""`[thermal]` and `[background_load]` of a scenario: heat, fans, surroundings, and other users of the SoCs."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from socflower.errors import ConfigError
from socflower.field_rules import OneOf, Pairs, Positive
from socflower.scenario.schema.key_rules import is_set, require_distinct, require_reader, shown
from socflower.thermal.fans.fan_curve import rack_fans
from socflower.thermal.fans.objectives import Objective
from socflower.thermal.fans.policies import PassiveCooling
from socflower.thermal.model.background_load import (
    GAME,
    PartBusy,
    Tide,
    idle_windows,
)
from socflower.thermal.sensors.reading import COLDEST_C, HOTTEST_C
from socflower.toml_file import Table

FAN_POLICIES = ("fixed", "passive", "predictive", "objective")
GAMES = ("none", "tidal")

_READERS = {
    "high_rpm": ("passive", "predictive"),
    "hot_c": ("passive",),
    "cool_c": ("passive",),
    "max_slowdown": ("predictive",),
    "objective": ("objective",),
}
"""Keys that only some fan policies read."""

Temperature = Annotated[float, Field(ge=COLDEST_C, le=HOTTEST_C)]
FanSpeed = Annotated[float, Field(ge=rack_fans().min_rpm, le=rack_fans().max_rpm)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Hour = Annotated[float, Field(ge=0, lt=24)]
Change = Annotated[float, Field(ge=0)]


class ThermalConfig(Table):
    """`[thermal]`: heat, clocks and fans of one chassis like a rack of 60 SoCs; without this table nothing gets hot."""

    fan: Annotated[str, OneOf(FAN_POLICIES)] = Field(
        "fixed",
        description=(
            "`fixed`: one speed; `passive`: slow until the hottest SoC is at `hot_c`, then fast until `cool_c`; "
            "`predictive`: by the planned load ([fans](guides/heat.md#fans-socflower-fan) has its settings); "
            "`objective`: what costs least by `objective`"
        ),
    )
    objective: Objective = Field(
        "energy-delay",
        description=(
            "what `objective` fans minimise over the whole work: the joules of SoCs and fans (`energy`), the seconds "
            "(`time`), or joules times seconds (`energy-delay`)"
        ),
    )
    rpm: FanSpeed = Field(
        3250.0, description="of `fixed` fans; the low speed of `passive` and `predictive` ones"
    )
    high_rpm: FanSpeed = Field(
        11000.0, description="the high speed of `passive` fans, the most of `predictive` ones"
    )
    hot_c: Temperature = Field(
        35.0, description="of `passive` fans, as their sensor shows it, in steps of 0.5 °C"
    )
    cool_c: Temperature = Field(33.5, description="the same")
    max_slowdown: Fraction = Field(
        0.0,
        description=(
            "of `predictive` fans: the part of the time that may be lost to lower clocks, to spare the fans"
        ),
    )
    ambient_c: Temperature | tuple[tuple[Change, Temperature], ...] = Field(
        25.0,
        description="of the room, or pairs [seconds, °C], the first at 0: from when on it has another temperature",
    )
    fans_working_changes: tuple[tuple[Change, Annotated[float, Field(ge=0, le=1)]], ...] = Field(
        (), description=("[seconds, 0 to 1]: from when on only this part of the fans turns")
    )
    start_c: Temperature = Field(28.0, description="of everything, at the beginning")
    hot_boards: dict[Annotated[int, Field(ge=0)], Positive] = Field(
        {},
        description=(
            "boards behind a blocked grille, and what they have of the others' conductance to the air: `{ 2 = 0.1 }`"
        ),
    )
    spread: Fraction = Field(
        0.0,
        description=(
            "how unequally SoCs sit on their boards: the standard deviation of the logarithm of "
            "their conductance, drawn "
            "from the scenario's seed"
        ),
    )

    def check(self) -> None:
        """Refuse what the fans do not read, and what the fans and the rack refuse."""
        require_reader(self, "fan", _READERS)
        if self.fan != "fixed":
            self.passive_cooling()
        require_distinct(
            "fans_working_changes", [time_s for time_s, _ in self.fans_working_changes]
        )
        times_s = [time_s for time_s, _ in self.ambient_changes]
        require_distinct("ambient_c", times_s)
        if 0.0 not in times_s:
            raise ConfigError(f"{shown(self, 'ambient_c')}: which temperature has the room at 0 s?")

    @property
    def ambient_changes(self) -> tuple[tuple[float, float], ...]:
        """The seconds from which on the room has a temperature, and that in °C."""
        return self.ambient_c if isinstance(self.ambient_c, tuple) else ((0.0, self.ambient_c),)

    @property
    def first_ambient_c(self) -> float:
        """The temperature of the room at 0 s."""
        return dict(self.ambient_changes)[0.0]

    def passive_cooling(self) -> PassiveCooling:
        """Return this table as `passive` fans; `predictive` fans need the same order of speeds."""
        try:
            return PassiveCooling(
                low_rpm=self.rpm, high_rpm=self.high_rpm, hot_c=self.hot_c, cool_c=self.cool_c
            )
        except ConfigError as error:
            # The table's key for the low speed is `rpm`.
            line = str(error).removeprefix("PassiveCooling: ").replace("low_rpm", "rpm")
            raise ConfigError(line) from None


class BackgroundLoadConfig(Table):
    """`[background_load]`: games that share or take SoCs, and the hours in which training may run."""

    games: Annotated[str, OneOf(GAMES)] | tuple[PartBusy, ...] = Field(
        "none",
        description=(
            "`tidal`: the part of SoCs that are in a game follows a cosine over the day, least at 5 o'clock; a list: "
            "the part in each hour from midnight on, again and again; the name of a `.csv` beside this file reads it "
            "there, under `hour,part_busy`; `none` reads no key of games"
        ),
    )
    start_hour: Hour = Field(0.0, description="of the day, when training begins")
    low: Fraction = Field(
        0.05, description="the least part of SoCs in a `tidal` game, at most `high`"
    )
    high: Fraction = Field(0.6, description="the same twelve hours later")
    mean_session_s: float = Field(
        2400.0, gt=0, description=("how long a game lasts on average; exponentially distributed")
    )
    takes_soc: bool = Field(
        False,
        description=("training leaves a SoC that is in a game, until the round after it is free"),
    )
    idle_windows: Pairs = Field(
        (),
        description=(
            "[hour, hour]: when training may run, from and to, also past midnight; none: the whole day"
        ),
    )

    def check(self) -> None:
        """Refuse keys that these games do not read; the pattern of games and the windows check themselves."""
        for key in ("low", "high"):
            if isinstance(self.games, tuple) and is_set(self, key):
                raise ConfigError(f"{shown(self, key)} is for games = 'tidal'; leave it out")
        if not self.games:
            raise ConfigError("games = [] must have a number for each hour, such as [0.1]")
        self.tide.loads(0, 0.0, self.start_hour, seed=0)
        idle_windows(self.idle_windows, 0.0, self.start_hour)

    @property
    def tide(self) -> Tide:
        """The daily pattern of games."""
        return Tide(
            low=self.low,
            high=self.high,
            mean_session_s=self.mean_session_s,
            game=replace(GAME, taken=self.takes_soc),
            recorded=self.games if isinstance(self.games, tuple) else (),
        )
