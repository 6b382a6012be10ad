"""`[thermal]` and `[background_load]` of a scenario: heat, fans, surroundings, and other users of the SoCs."""

import math
from dataclasses import dataclass

from socflower.cluster.toml_file import Pairs
from socflower.errors import ConfigError
from socflower.thermal.fans.fan_curve import rack_fans
from socflower.thermal.model.background_load import Game, Tide, idle_windows
from socflower.thermal.sensors.reading import COLDEST_C, HOTTEST_C

FAN_POLICIES = ("fixed", "passive", "predictive")
GAMES = ("none", "tidal")


@dataclass(frozen=True, kw_only=True, slots=True)
class ThermalConfig:
    """`[thermal]`: without this table heat is not simulated."""

    fan: str = "fixed"
    rpm: float = 3250.0  # for fixed: the speed; for the others: the low speed
    high_rpm: float = 11000.0  # for passive: the high speed; for predictive: the maximum
    hot_c: float = 35.0  # for passive: high speed from here on, until
    cool_c: float = 33.5
    max_slowdown: float = 0.0  # for predictive: fraction of time that may be lost to lower clocks, to save fan power
    ambient_c: float = 25.0
    ambient_changes: Pairs = ()  # [seconds, degrees]
    fans_working_changes: Pairs = ()  # [seconds, fraction of the fans that turn]
    start_c: float = 28.0
    hot_boards: tuple[int, ...] = ()  # behind a blocked grille
    hot_board_airflow: float = 0.1  # their conductance to the air, as a fraction of the others'
    spread: float = 0.0  # relative spread of the SoCs' conductances to their boards; drawn by the scenario's seed

    def __post_init__(self) -> None:
        if self.fan not in FAN_POLICIES:
            raise ConfigError(f"[thermal] fan = {self.fan!r} is unknown; use one of {', '.join(FAN_POLICIES)}")
        fans = rack_fans()
        for key in ("rpm", "high_rpm"):
            if not fans.min_rpm <= getattr(self, key) <= fans.max_rpm:
                raise ConfigError(f"[thermal] {key} = {getattr(self, key)} must lie between {fans.min_rpm:g} and "
                                  f"{fans.max_rpm:g}, what the rack's fans can do")
        if self.fan != "fixed" and not self.rpm < self.high_rpm:
            raise ConfigError(f"[thermal] rpm = {self.rpm}, the low speed, must be below high_rpm = {self.high_rpm}")
        if not 0.0 < self.hot_board_airflow < math.inf:
            raise ConfigError(f"[thermal] hot_board_airflow = {self.hot_board_airflow} must be above 0 and finite")
        for key in ("hot_c", "cool_c", "ambient_c", "start_c"):
            _check_temperature(f"[thermal] {key} =", getattr(self, key))
        if not self.cool_c < self.hot_c:
            raise ConfigError(f"[thermal] cool_c = {self.cool_c} must be below hot_c = {self.hot_c}")
        if not 0.0 <= self.max_slowdown < 1.0 or not 0.0 <= self.spread < 1.0:
            raise ConfigError(f"[thermal] max_slowdown = {self.max_slowdown} and spread = {self.spread} must be 0 or "
                              "more and below 1")
        if any(board < 0 for board in self.hot_boards):
            raise ConfigError(f"[thermal] hot_boards = {list(self.hot_boards)}: boards are numbered from 0")
        for key in ("ambient_changes", "fans_working_changes"):
            _check_changes(f"[thermal] {key}", getattr(self, key))
        for _, temperature_c in self.ambient_changes:
            _check_temperature("[thermal] ambient_changes:", temperature_c)
        if any(not 0.0 <= part <= 1.0 for _, part in self.fans_working_changes):
            raise ConfigError("[thermal] fans_working_changes: parts must lie between 0 and 1, got "
                              f"{list(self.fans_working_changes)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackgroundLoadConfig:
    """`[background_load]`: games that share or take SoCs, and the hours in which training may run."""

    games: str = "none"
    start_hour: float = 0.0  # hour of the day at the start of training
    low: float = 0.05  # fraction of SoCs in a game at low_hour
    high: float = 0.6  # the same twelve hours later
    low_hour: float = 5.0
    mean_session_s: float = 2400.0
    share: float = 0.5  # fraction of its SoC's processors that a game uses
    power_w: float = 2.5  # of a game
    takes_soc: bool = False  # a game preempts training on its SoC
    idle_windows: Pairs = ()  # [from hour, to hour]; none: the whole day

    def __post_init__(self) -> None:
        if self.games not in GAMES:
            raise ConfigError(f"[background_load] games = {self.games!r} is unknown; use one of {', '.join(GAMES)}")
        if not (0.0 <= self.start_hour < 24.0 and 0.0 <= self.low_hour < 24.0):
            raise ConfigError(f"[background_load] start_hour = {self.start_hour} and low_hour = {self.low_hour} must "
                              "be 0 or more and below 24")
        try:
            self.tide.loads(0, 0.0, self.start_hour, seed=0)
            idle_windows(self.idle_windows, 0.0, self.start_hour)
        except ConfigError as error:
            raise ConfigError(f"[background_load] {error}") from None

    @property
    def tide(self) -> Tide:
        """The daily pattern of games."""
        return Tide(low=self.low, high=self.high, low_hour=self.low_hour, mean_session_s=self.mean_session_s,
                    game=Game(share=self.share, power_w=self.power_w, takes_soc=self.takes_soc))


def _check_temperature(where: str, temperature_c: float) -> None:
    if not COLDEST_C <= temperature_c <= HOTTEST_C:
        raise ConfigError(f"{where} {temperature_c} must lie between {COLDEST_C:g} and {HOTTEST_C:g} °C, what SoCs' "
                          "sensors can show")


def _check_changes(where: str, changes: Pairs) -> None:
    times_s = [time_s for time_s, _ in changes]
    if not all(math.isfinite(number) for pair in changes for number in pair):
        raise ConfigError(f"{where}: times and values must be finite, got {list(changes)}")
    if any(time_s < 0.0 for time_s in times_s):
        raise ConfigError(f"{where}: times must not be negative, got {list(changes)}")
    if len(set(times_s)) < len(times_s):
        raise ConfigError(f"{where}: one change at a time, got {list(changes)}")
