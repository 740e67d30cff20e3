"""The house: a class name stands for one thing in the whole tree, a folder is small enough to read, and tests
find what they share in one place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tools.house import LARGEST_FOLDER, SHARED_NAMES, House, measure

TESTS: Final = Path(__file__).parents[1]
LONGEST_NAME: Final = 70


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


def definitions(pattern: str) -> dict[str, list[str]]:
    """Functions of the tests whose name matches, by file."""
    wanted = re.compile(rf"^ *(?:async )?def ({pattern})\(", re.MULTILINE)
    found = {str(file.relative_to(TESTS)): wanted.findall(file.read_text()) for file in TESTS.rglob("*.py")}
    return {file: names for file, names in found.items() if names}


def test_the_name_of_a_test_is_short() -> None:
    # It tells the behaviour; the schedule stands in the docstring.
    tests = [name for names in definitions(r"test_\w+").values() for name in names]
    assert [name for name in tests if len(name) > LONGEST_NAME] == []


def test_shared_helpers_stand_in_support() -> None:
    assert {file.name for file in TESTS.glob("*.py")} == {"__init__.py", "conftest.py"}


def test_there_is_one_way_to_wait() -> None:
    # Methods that run a simulation, or watch a process meanwhile, are called run_until and reached.
    assert definitions("_?(?:until|wait_until)") == {"support/waiting.py": ["until", "wait_until"]}
