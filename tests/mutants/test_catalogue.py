"""The catalogue keeps pace with the code: a mutant that no longer applies tests nothing.

Running them takes minutes (``python -m tests.mutants``); whether they still apply is told at once."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants.everything import MUTANTS
from tests.mutants.runner import Mutant, check_applies


def test_each_mutant_has_an_id_of_its_own() -> None:
    assert [each for each, count in Counter(mutant.id for mutant in MUTANTS).items() if count > 1] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_the_mutant_applies_and_somebody_is_to_kill_it(mutant: Mutant) -> None:
    check_applies(mutant)
    assert mutant.seeds or mutant.tests
    assert mutant.old != mutant.new


def test_all_thirty_dangers_are_there() -> None:
    assert {f"m{number}" for number in range(1, 31)} <= {mutant.id for mutant in MUTANTS}


def test_the_dangers_of_the_mirrored_journal_are_there() -> None:
    assert {"j2", "j3", "j4", "j5", "j6", "j7", "j8", "j9", "j10"} <= {each.id for each in MUTANTS}
