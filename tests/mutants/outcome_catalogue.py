"""Known ways to call an unknown outcome a failure, or what no majority has confirmed a fact."""

from __future__ import annotations

from functools import partial

from tests.mutants.runner import Mutant

SERVICES = "sava/services"
_Outcome = partial(Mutant, tests=("tests/unit/test_outcomes.py",))
_Listing = partial(Mutant, tests=("tests/unit/services/test_brokers_admin.py",))

OUTCOME_MUTANTS: tuple[Mutant, ...] = (
    _Outcome(
        "u1",
        "a change whose answer was lost is called undone",
        f"{SERVICES}/faults.py",
        "    elif check is not None and error.code() not in REFUSALS:\n",
        "    elif False:\n",
    ),
    _Outcome(
        "u2",
        "a call that is not listed is taken for a read",
        f"{SERVICES}/effects.py",
        "    if method in READS or ",
        "    if method not in CHANGES or ",
    ),
    _Outcome(
        "u3",
        "an unknown outcome gets lost on the wire",
        f"{SERVICES}/faults.py",
        "    if outcome in _OUTCOMES:\n",
        "    if False:\n",
    ),
    _Listing(
        "u4",
        "brokers that no majority has confirmed are listed as they were",
        f"{SERVICES}/brokers_admin.py",
        "self._seen(is_confirmed=not reason)",
        "self._seen(is_confirmed=True)",
    ),
    _Listing(
        "u5",
        "a given-up broker stands beside its successor",
        f"{SERVICES}/brokers_admin.py",
        "{each for each in counts if counts[each]}",
        "counts.keys()",
    ),
    Mutant(
        "u6",
        "a client forgets that an earlier attempt may have happened",
        "sava/client/connection.py",
        "                    if isinstance(failure, Unanswered) and not isinstance(error, Unanswered):\n",
        "                    if False:\n",
        tests=("tests/unit/client/test_connection.py",),
    ),
    Mutant(
        "u7",
        "a topic that was created and cannot be described is called not created",
        f"{SERVICES}/faults.py",
        '        raise OutcomeUnknown(f"{change}, but it could not be described: {error}") from error\n',
        "        raise\n",
        tests=("tests/unit/services/test_made_changes.py",),
    ),
)
