"""Devices below a made-up /sys: whatever numbers they get, none is taken for another."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from socflower.thermal.sensors.sysfs import DeviceFolder, DeviceIdentity, OpenFolder, identity_of

IDENTITIES = st.builds(
    DeviceIdentity,
    st.sampled_from(["nct6798", "amdgpu", "ina3221"]),
    st.sampled_from([None, "nct6775.656", "1-0040"]),
)


def make(folder: Path, identity: DeviceIdentity, owner: int) -> None:
    folder.mkdir(parents=True)
    if identity.name is not None:
        (folder / "name").write_text(f"{identity.name}\n")
    if identity.device is not None:
        (folder / "device").symlink_to(f"../../../{identity.device}")
    (folder / "owner").write_text(f"{owner}\n")


@given(identities=st.lists(IDENTITIES, unique=True, min_size=1, max_size=5), data=st.data())
@settings(max_examples=40)
def test_a_device_is_found_under_any_number_and_no_other_is_taken_for_it(
    tmp_path_factory,
    identities,
    data,
):
    """Against a table of who is where: devices get other numbers, and some are removed."""
    root = tmp_path_factory.mktemp("root") / "sys/class/hwmon"
    for owner, identity in enumerate(identities):
        make(root / f"hwmon{owner}", identity, owner)
    devices = [DeviceFolder(root / f"hwmon{owner}") for owner in range(len(identities))]
    for _ in range(data.draw(st.integers(1, 3))):
        shutil.rmtree(root)
        root.mkdir()
        there = data.draw(st.sets(st.sampled_from(range(len(identities)))))
        numbers = data.draw(st.permutations(range(12)))
        for owner in there:
            make(root / f"hwmon{numbers[owner]}", identities[owner], owner)
        for owner, device in enumerate(devices):
            if owner in there:
                with device.open() as folder:
                    assert folder.read_integer("owner") == owner
                assert device.path == root / f"hwmon{numbers[owner]}"
            else:
                with pytest.raises(FileNotFoundError), device.open():
                    raise AssertionError("another device was taken for it")
    shutil.rmtree(root.parents[2])


def test_a_device_without_an_identity_is_not_looked_for(tmp_path):
    nobody = DeviceIdentity(None, None)
    make(tmp_path / "hwmon0", nobody, 0)
    device = DeviceFolder(tmp_path / "hwmon0")
    with device.open() as folder:
        assert folder.read_integer("owner") == 0
    (tmp_path / "hwmon0").rename(tmp_path / "hwmon1")
    with pytest.raises(FileNotFoundError, match="there is no hwmon0 now"), device.open():
        raise AssertionError
    assert identity_of(tmp_path / "hwmon0") == nobody


def test_an_open_folder_that_is_removed_leads_to_no_other_and_makes_no_file(tmp_path):
    make(tmp_path / "hwmon0", DeviceIdentity("nct6798", None), 0)
    with OpenFolder(tmp_path / "hwmon0") as folder:
        shutil.rmtree(tmp_path / "hwmon0")
        make(tmp_path / "hwmon0", DeviceIdentity("amdgpu", None), 1)
        for act in (lambda: folder.read_integer("owner"), lambda: folder.write("owner", 3)):
            with pytest.raises(FileNotFoundError):
                act()
        assert folder.identity() == (None, None)
    assert (tmp_path / "hwmon0/owner").read_text() == "1\n"


def test_an_hid_device_that_is_seen_again_is_the_same(tmp_path):
    make(tmp_path / "hwmon3", DeviceIdentity("kraken", "0003:1E71:2007.0003"), 0)
    device = DeviceFolder(tmp_path / "hwmon3")
    shutil.rmtree(tmp_path / "hwmon3")
    make(tmp_path / "hwmon5", DeviceIdentity("kraken", "0003:1E71:2007.0009"), 0)
    make(tmp_path / "hwmon3", DeviceIdentity("kraken", "0003:1E71:2011.0004"), 1)
    with device.open() as folder:
        assert folder.path == tmp_path / "hwmon5"
