"""`socflower new`: the app of each template is what Flower builds and publishes, and it learns."""

import json
import math
import re
import shutil
import string
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from socflower.engines.installed import dependencies
from socflower.errors import ConfigError
from socflower.scenario.app_template import app_names, missing_package, template_names
from tests.command_line import Socflower, is_mistake
from tests.flower_checks import flower_accepts

ROOT = Path(__file__).parents[2]
FILES = {
    ".gitignore",
    "LICENSE",
    "README.md",
    "cluster.toml",
    "pyproject.toml",
    *(f"my_app/{name}.py" for name in ("__init__", "client_app", "server_app", "task")),
}
TEMPLATES = ["image", "text"]


def test_these_are_the_templates() -> None:
    assert template_names() == TEMPLATES


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_new_app_passes_the_checks_of_flowers_build_and_publishing(
    template: str,
    socflower: Socflower,
    tmp_path: Path,
) -> None:
    ran = socflower("new bird-songs --template", template)
    assert ran.status == 0 and "note" not in ran.out
    app = tmp_path / "bird-songs"
    files = [path for path in app.rglob("*") if path.is_file()]
    names = {str(path.relative_to(app)).replace("bird_songs", "my_app") for path in files}
    assert names == FILES
    assert not any(re.search("my[-_]app", path.read_text("utf-8")) for path in files)
    flower_accepts(app)


@pytest.mark.parametrize("app", ["before", "after"])
def test_the_quickstart_passes_the_same_checks(app: str) -> None:
    flower_accepts(ROOT / "docs" / "examples" / "pytorch_quickstart" / app)


@pytest.mark.parametrize("template", ["image", pytest.param("text", marks=pytest.mark.slow)])
def test_flwr_build_makes_a_bundle_of_a_new_app(
    template: str, socflower: Socflower, tmp_path: Path
) -> None:
    name = f"built-{template}"
    new_app(socflower, name, template)
    subprocess.run(
        [Path(sysconfig.get_path("scripts")) / "flwr", "build", "--app", name],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=100.0,
    )
    assert next(tmp_path.glob("*.fab")).name.startswith(f"example.{name}.1-0-0.")


@pytest.mark.parametrize("template", TEMPLATES)
def test_its_flwr_is_the_one_that_socflower_needs(template: str) -> None:
    text = (ROOT / "templates" / template / "pyproject.toml").read_text("utf-8")
    required = Requirement(re.findall(r'"(flwr[^"]*)"', text)[0])
    flwr = dependencies()["flwr"]
    assert required.specifier == flwr.allowed
    assert f'flwr-version-target = "{flwr.tested[0]}"' in text


def test_the_command_names_the_files_and_what_to_do(socflower: Socflower, tmp_path: Path) -> None:
    ran = socflower("new apps/my_app --json")
    document = json.loads(ran.out)
    assert {str(Path(name).relative_to("apps/my_app")) for name in document["files"]} == FILES
    assert document["run"] == "socflower run apps/my_app --cluster apps/my_app/cluster.toml"
    assert ["rename it to my-app" in note for note in document["notes"]] == [True]


def test_an_app_whose_data_set_is_not_installed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(
        (ROOT / "templates" / "image" / "pyproject.toml").read_text("utf-8")
    )
    assert missing_package(tmp_path) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'socflower[demo]'" in str(missing_package(tmp_path))


@given(st.text(st.sampled_from(string.ascii_letters + string.digits + "-_.é/ "), max_size=40))
def test_a_name_that_is_accepted_is_one_that_flower_accepts(name: str) -> None:
    from flwr.supercore.utils import is_valid_name

    try:
        project, package = app_names(Path("/nowhere") / name)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert is_valid_name(project)[0]
    assert package.isidentifier() and package.replace("_", "-") == project


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("3d-app", "begins with a letter"),
        ("a" * 33, "at most 32"),
        ("été", "letters, digits"),
        ("torch", "would hide the module"),
        ("class", "would hide the module"),
        ("mine --template audio", "image, text"),
        ("full", "not an empty folder"),
        ("full/file", "not an empty folder"),
        ("full/file/app", "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(
    arguments: str, named: str, socflower: Socflower, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("kept")
    is_mistake(socflower(f"new {arguments}"), named)
    assert (tmp_path / "full" / "file").read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} <= {"full"}


def scores(printed: str) -> list[tuple[float, float]]:
    """Return accuracy and loss after each round."""
    return [
        (float(accuracy), float(loss))
        for accuracy, loss in re.findall(
            r"^round \d+: accuracy ([\d.]+), loss ([\d.]+)$", printed, re.MULTILINE
        )
    ]


def new_app(socflower: Socflower, folder: str, template: str) -> None:
    assert socflower(f"new {folder} --template {template}").status == 0


def run_in_virtual_time(socflower: Socflower, folder: str) -> list[tuple[float, float]]:
    ran = socflower(f"run {folder} --cluster {folder}/cluster.toml --workers 2")
    assert ran.status == 0, ran.err[-2000:]
    return scores(ran.err)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_image_app_learns_the_digits(socflower: Socflower) -> None:
    new_app(socflower, "images_run", "image")
    of_rounds = run_in_virtual_time(socflower, "images_run")
    assert len(of_rounds) == 4 and of_rounds[-1][0] > 0.9


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_text_app_predicts_better_than_the_frequencies_of_bytes(socflower: Socflower) -> None:
    new_app(socflower, "text_run", "text")
    of_rounds = run_in_virtual_time(socflower, "text_run")
    text = b"".join(
        path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:10]
    )
    shares = [count / len(text) for count in Counter(text).values()]
    (first, _), (accuracy, loss) = of_rounds[0], of_rounds[-1]
    assert loss < -sum(share * math.log(share) for share in shares) - 0.5
    assert first < 0.05 < max(shares) + 0.1 < accuracy


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("template", TEMPLATES)
def test_flwr_run_trains_the_app_unchanged(
    template: str, socflower: Socflower, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="flwr run needs socflower[simulation]")
    from socflower.engines.simulation import flower_environment, running_superlink

    new_app(socflower, f"{template}-flwr", template)
    environment = flower_environment(tmp_path)
    with running_superlink(tmp_path, environment):
        ran = subprocess.run(
            [
                shutil.which("flwr", path=environment["PATH"]) or "flwr",
                "run",
                f"{template}-flwr",
                "scenario",
                "--stream",
                "--federation-config",
                "num-supernodes=4 client-resources-num-cpus=1",
            ],
            capture_output=True,
            text=True,
            timeout=500.0,
            cwd=tmp_path,
            env=dict(environment),
            check=False,
        )
    of_rounds = scores(ran.stdout)
    assert of_rounds, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert of_rounds[-1][0] > of_rounds[0][0] + 0.3
    assert of_rounds == run_in_virtual_time(socflower, f"{template}-flwr")
