"""Allowed and tested versions of the packages that socflower depends on, from its installation's metadata.

`pyproject.toml` is the only source of both; the tested versions are the extra `tested`.
"""

from dataclasses import dataclass
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

_TESTED = "tested"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependency:
    """A package with a known tested version."""

    name: str
    # None if the package is not installed.
    installed: str | None
    # Empty if every version is allowed.
    allowed: SpecifierSet
    tested: str

    @property
    def is_allowed(self) -> bool:
        """Whether the installed version, if any, is within socflower's requirements."""
        return self.installed is None or self.allowed.contains(self.installed, prereleases=True)

    @property
    def is_tested(self) -> bool:
        """Whether it is the tested version, of any build ("2.13.0+cpu" is 2.13.0)."""
        return self.installed is not None and self.installed.partition("+")[0] == self.tested


@cache
def dependencies() -> dict[str, Dependency]:
    """Return the packages that the extra `tested` names, by name."""
    required = [Requirement(text) for text in metadata.requires("socflower") or ()]
    allowed = {one.name: one.specifier for one in required if one.marker is None}
    found = {}
    for one in required:
        if _belongs_to(one, _TESTED):
            found[one.name] = Dependency(
                name=one.name,
                installed=_installed(one.name),
                tested=next(iter(one.specifier)).version,
                allowed=allowed.get(one.name, SpecifierSet()),
            )
    return found


def _belongs_to(requirement: Requirement, extra: str) -> bool:
    return (
        requirement.marker is not None
        and requirement.marker.evaluate({"extra": extra})
        and not requirement.marker.evaluate({"extra": ""})
    )


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
