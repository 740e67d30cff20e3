"""The house: a class name stands for one thing in the whole tree, and a folder is small enough to read."""

from __future__ import annotations

import pytest

from tools.house import LARGEST_FOLDER, SHARED_NAMES, House, measure


@pytest.fixture(scope="module")
def house() -> House:
    return measure()


def test_a_class_name_stands_for_one_thing(house: House) -> None:
    # Rename one of the two. If both mean the same, list the name in tools.house.SHARED_NAMES with the reason.
    assert house.several() == {}


def test_every_shared_name_is_still_shared_and_has_a_reason(house: House) -> None:
    for name, (places, reason) in SHARED_NAMES.items():
        assert places <= {*house.classes[name]}, f"{name} is not defined in all of {sorted(places)}"
        assert len(places) > 1, f"{name} is in one place only"
        assert reason, f"{name} has no reason"


def test_no_folder_has_more_files_than_one_can_read(house: House) -> None:
    large = {folder: count for folder, count in house.folders.items() if count > LARGEST_FOLDER}
    assert large == {}
