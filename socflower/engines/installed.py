"""What socflower allows of the packages it stands on, and what it was tested with, by its installation's metadata.

`pyproject.toml` has both, the tested versions as the extra `tested`; nothing else states them a second time.
"""

from dataclasses import dataclass
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

_TESTED = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependency:
    """A package of which a tested version is known."""

    name: str
    installed: str | None  # None: it is not here
    allowed: SpecifierSet  # empty where every version is
    tested: str

    @property
    def is_allowed(self) -> bool:
        """Whether the installed version, if any, is one that socflower may be installed with."""
        return self.installed is None or self.allowed.contains(self.installed, prereleases=True)

    @property
    def is_tested(self) -> bool:
        """Whether it is the tested version, of whichever build ("2.13.0+cpu" is 2.13.0)."""
        return self.installed is not None and self.installed.partition("+")[0] == self.tested


@cache
def dependencies() -> dict[str, Dependency]:
    """Return each package that the extra `tested` names, by its name."""
    required = [Requirement(text) for text in metadata.requires("socflower") or ()]
    tested = {one.name: next(iter(one.specifier)).version for one in required if _belongs_to(one, _TESTED)}
    return {name: Dependency(name=name, installed=_installed(name), tested=version,
                             allowed=next((one.specifier for one in required
                                           if one.name == name and one.marker is None), SpecifierSet()))
            for name, version in tested.items()}


def _belongs_to(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is not None and requirement.marker.evaluate({"extra": extra}) \
        and not requirement.marker.evaluate({"extra": ""})


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
