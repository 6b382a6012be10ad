"""Devices below a fake /sys: whatever numbers they get, none is taken for another."""

import shutil
from functools import partial
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.thermal.sensors.sysfs import DeviceFolder, DeviceIdentity, OpenFolder, identity_of
from tests.one_line import refused
from tests.thermal.fake_machines import write_files

NAMES, DEVICES = ["nct6798", "amdgpu", "ina3221"], [None, "nct6775.656", "1-0040"]
IDENTITIES = st.builds(DeviceIdentity, st.sampled_from(NAMES), st.sampled_from(DEVICES))


def make(folder: Path, name: str | None, device: str | None, owner: int) -> DeviceFolder:
    write_files(folder, {"name": name, "owner": owner})
    if device is not None:
        (folder / "device").symlink_to(f"../../../{device}")
    return DeviceFolder(folder)


def owner_of(device: DeviceFolder) -> int:
    with device.open() as folder:
        return folder.read_integer("owner")


not_found = partial(refused, error=FileNotFoundError)


@given(identities=st.lists(IDENTITIES, unique=True, min_size=1, max_size=5), data=st.data())
@settings(max_examples=25)
def test_a_device_is_found_under_any_number_and_no_other_is_taken_for_it(
    tmp_path_factory, identities, data
):
    """Against a table of who is where: devices get other numbers, and some are removed."""
    root = tmp_path_factory.mktemp("root")
    devices = [make(root / f"hwmon{n}", *one, n) for n, one in enumerate(identities)]
    for _ in range(data.draw(st.integers(1, 3))):
        shutil.rmtree(root)
        root.mkdir()
        there = data.draw(st.sets(st.sampled_from(range(len(identities)))))
        numbers = data.draw(st.permutations(range(12)))
        for owner in there:
            make(root / f"hwmon{numbers[owner]}", *identities[owner], owner)
        for owner, device in enumerate(devices):
            if owner in there:
                assert owner_of(device) == owner
                assert device.path == root / f"hwmon{numbers[owner]}"
            else:
                not_found(partial(owner_of, device))


def test_a_device_without_an_identity_is_not_looked_for(tmp_path):
    folder = tmp_path / "hwmon0"
    device = make(folder, None, None, 0)
    assert owner_of(device) == 0
    folder.rename(tmp_path / "hwmon1")
    not_found(partial(owner_of, device), "hwmon0")
    assert identity_of(folder) == (None, None)


def test_an_open_folder_that_is_removed_leads_to_no_other_and_creates_no_file(tmp_path):
    path = tmp_path / "hwmon0"
    make(path, "nct6798", None, 0)
    with OpenFolder(path) as folder:
        shutil.rmtree(path)
        make(path, "amdgpu", None, 1)
        not_found(partial(folder.read_integer, "owner"))
        not_found(partial(folder.write, "owner", 3))
        assert folder.identity() == (None, None)
    assert (path / "owner").read_text() == "1\n"


def test_an_hid_device_that_is_connected_again_is_the_same(tmp_path):
    path = tmp_path / "hwmon3"
    device = make(path, "kraken", "0003:1E71:2007.0003", 0)
    shutil.rmtree(path)
    make(tmp_path / "hwmon5", "kraken", "0003:1E71:2007.0009", 0)
    make(path, "kraken", "0003:1E71:2011.0004", 1)
    assert owner_of(device) == 0 and device.path == tmp_path / "hwmon5"
