"""Allowed and tested versions of the packages that socflower depends on, from its installation's metadata.

`pyproject.toml` is the only source of both; the tested versions are the extras `tested` and `also-tested`.
"""

from dataclasses import dataclass
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

_TESTED = ("tested", "also-tested")


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependency:
    """A package with known tested versions."""

    name: str
    # None if the package is not installed.
    installed: str | None
    # Empty if every version is allowed.
    allowed: SpecifierSet
    tested: tuple[str, ...]

    @property
    def is_allowed(self) -> bool:
        """Whether the installed version, if any, is within socflower's requirements."""
        return self.installed is None or self.allowed.contains(self.installed, prereleases=True)

    @property
    def is_tested(self) -> bool:
        """Whether it is a tested version, of any build ("2.13.0+cpu" is 2.13.0)."""
        return self.installed is not None and self.installed.partition("+")[0] in self.tested


@cache
def dependencies() -> dict[str, Dependency]:
    """Return the packages that the extras of tested versions name, by name."""
    required = [Requirement(text) for text in metadata.requires("socflower") or ()]
    allowed = {one.name: one.specifier for one in required if one.marker is None}
    tested: dict[str, list[str]] = {}
    for one in required:
        if any(_belongs_to(one, extra) for extra in _TESTED):
            tested.setdefault(one.name, []).append(next(iter(one.specifier)).version)
    return {
        name: Dependency(
            name=name,
            installed=_installed(name),
            tested=tuple(sorted(versions, key=Version)),
            allowed=allowed.get(name, SpecifierSet()),
        )
        for name, versions in tested.items()
    }


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
