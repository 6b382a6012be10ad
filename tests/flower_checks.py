"""The checks that Flower's commands make of an app folder, without its network."""

import sys
import zipfile
from io import BytesIO
from pathlib import Path

import tomli


def flower_accepts(app: Path) -> None:
    """Fail with Flower's own message if `flwr build` or `flwr app publish` would refuse the app."""
    from flwr.cli.app_cmd.publish import (
        _collect_file_paths,
        _validate_app_name,
        _validate_description,
        _validate_files,
    )
    from flwr.cli.build import build_fab_from_files
    from flwr.cli.config_utils import load_and_validate
    from flwr.cli.utils import collect_files

    modules, path = set(sys.modules), list(sys.path)
    try:
        config, warnings = load_and_validate(app / "pyproject.toml", check_module=True)
    finally:  # it may import the app's package, and another app's may have the same name
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(app)):
                del sys.modules[name]
    assert warnings == []
    _validate_app_name(app.name, "Flower App directory name")
    _validate_app_name(config["project"]["name"], "The Flower App [project].name")
    _validate_description(config["project"]["description"])
    files = _collect_file_paths(app)
    _validate_files(files)
    assert {"LICENSE", "README.md", "pyproject.toml"} <= {path.name for path in files}
    bundle, metadata = build_fab_from_files(collect_files(app.resolve()))
    assert metadata.fab_format_version == 1
    assert metadata.flwr_version_min is not None and metadata.flwr_version_target is not None
    with zipfile.ZipFile(BytesIO(bundle)) as built:
        packed = tomli.loads(built.read("pyproject.toml").decode())
        assert packed["project"]["name"] == config["project"]["name"]
        assert {"LICENSE", "README.md"} <= set(built.namelist())
