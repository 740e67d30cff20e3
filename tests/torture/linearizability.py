"""Whether the answers of a register with revisions fit one order of calls, as Wing and Gong search it.

Keys are independent, so each is checked by itself. A call takes effect at one moment between its beginning
and its end. The search takes, again and again, a call that began before every open one ended, and asks the
model whether its answer fits the state; it goes back when none fits, and never looks at the same set of
finished calls with the same state twice (Lowe's improvement of the search by Wing and Gong, as in Porcupine).

Every write shows a revision that no other has, and every answer shows the state before it. So the search
hardly branches. What makes others undecidable are calls of unknown outcome; here they fall into two kinds:

* a write whose value is in some answer took effect, at the revision that the answer shows;
* one whose value is in none may be left out, since every later answer would have shown it.

Unknown deletions stay as calls that may take effect at any time or never.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.torture.history import Called


@dataclass(frozen=True, slots=True)
class Verdict:
    key: str
    is_decided: bool
    is_linearizable: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class _State:
    value: str | None = None
    mod: int = 0
    last: int = 0
    """The revision of the last change, deletions included."""


def check(calls: Iterable[Called], *, limit_s: float = 10.0) -> list[Verdict]:
    """One verdict for each key; ``limit_s`` holds for each."""
    by_key: dict[str, list[Called]] = defaultdict(list)
    for call in calls:
        by_key[call.key].append(call)
    return [check_key(key, each, limit_s=limit_s) for key, each in by_key.items()]


def check_key(key: str, calls: Sequence[Called], *, limit_s: float = 10.0) -> Verdict:
    verdict = _check_key(key, calls, limit_s)
    gone = [call for call in calls if (call.kind, call.outcome) == ("delete", "failed")]
    if not verdict.is_decided or verdict.is_linearizable or not gone:
        return verdict
    # A deletion leaves no value behind that would name it, so ask whether it is what is wrong.
    others = [call for call in calls if call not in gone]
    supposed = [_without_end(call, 0) for call in gone]
    if _check_key(key, [*others, *supposed], limit_s).is_linearizable:
        why = f"a deletion that failed for certain took effect, one of {gone}"
        return Verdict(key, True, False, why)
    return verdict


def _check_key(key: str, calls: Sequence[Called], limit_s: float) -> Verdict:
    shown: dict[str, set[int]] = defaultdict(set)
    for call in calls:
        if call.seen is not None and call.outcome in ("ok", "refused"):
            shown[call.seen].add(call.seen_mod)
        if call.kind in ("put", "cas") and call.outcome == "ok":
            shown[call.value].add(call.revision)
    twice = {value: sorted(revisions) for value, revisions in shown.items() if len(revisions) > 1}
    if twice:
        return Verdict(key, True, False, f"values with several revisions: {twice}")
    taken: list[Called] = []
    for call in calls:
        writes = call.kind in ("put", "cas")
        if call.outcome == "failed":
            if writes and call.value in shown:
                return Verdict(key, True, False, f"a write that failed for certain took effect: {call}")
            continue
        if call.outcome != "unknown":
            taken.append(call)
        elif call.kind == "delete":
            taken.append(_without_end(call, 0))
        elif writes and call.value in shown:
            (revision,) = shown[call.value]
            taken.append(_without_end(call, revision))
    return _search(key, sorted(taken, key=lambda call: call.began), limit_s)


def _without_end(call: Called, revision: int) -> Called:
    """A call of unknown outcome may take effect at any later time."""
    return Called(
        call.began, math.inf, call.client, call.kind, call.key, call.value, call.expect, "unknown", revision
    )


def _step(call: Called, state: _State) -> _State | None:
    """The state after the call; None: its answer does not fit."""
    if call.outcome == "unknown":
        if call.kind == "delete":
            return _State(None, 0, state.last + 1) if state.value is not None else None
        if call.revision <= state.last or (call.kind == "cas" and call.expect != state.mod):
            return None
        return _State(call.value, call.revision, call.revision)
    if (call.seen, call.seen_mod) != (state.value, state.mod):
        return None
    if call.kind == "get":
        return state
    if call.kind == "cas":
        if call.outcome == "refused":
            return state if call.expect != state.mod else None
        if call.expect != state.mod:
            return None
    if call.kind == "delete" and state.value is None:
        return state  # nothing was there, and nothing has changed
    if call.revision <= state.last:
        return None
    if call.kind == "delete":
        return _State(None, 0, call.revision)
    return _State(call.value, call.revision, call.revision)


def _search(key: str, calls: Sequence[Called], limit_s: float) -> Verdict:
    deadline = time.monotonic() + limit_s
    finite = sum(1 << number for number, call in enumerate(calls) if call.ended != math.inf)
    start = _State()
    seen: set[tuple[int, _State]] = {(0, start)}
    stack: list[tuple[int, _State]] = [(0, start)]
    furthest = 0
    while stack:
        if time.monotonic() > deadline:
            return Verdict(key, False, False, f"not decided within {limit_s:g} s")
        done, state = stack.pop()
        if done & finite == finite:
            return Verdict(key, True, True)
        if (done & finite).bit_count() >= (furthest & finite).bit_count():
            furthest = done
        first_end = math.inf
        for number, call in enumerate(calls):
            if done >> number & 1:
                continue
            if call.began > first_end:
                break  # an open call ended before this one began, and so do all that follow
            first_end = min(first_end, call.ended)
        for number, call in enumerate(calls):
            if call.began > first_end:
                break
            if done >> number & 1:
                continue
            after = _step(call, state)
            if after is not None and (following := (done | 1 << number, after)) not in seen:
                seen.add(following)
                stack.append(following)
    stuck = [call for number, call in enumerate(calls) if not furthest >> number & 1]
    return Verdict(key, True, False, f"no order fits; the furthest one stops before {stuck[:3]}")


def out_of_order(calls: Iterable[Called]) -> list[str]:
    """Calls that show an older revision than a call that had ended before they began: over all keys."""
    answered = [call for call in calls if call.outcome in ("ok", "refused") and call.revision]
    ended = sorted(answered, key=lambda call: call.ended)
    found: list[str] = []
    floor, position = None, 0
    for call in sorted(answered, key=lambda call: call.began):
        while position < len(ended) and ended[position].ended < call.began:
            if floor is None or ended[position].revision > floor.revision:
                floor = ended[position]
            position += 1
        if floor is None:
            continue
        changes = call.outcome == "ok" and call.kind in ("put", "cas")
        if call.revision < floor.revision or (changes and call.revision == floor.revision):
            found.append(f"{call} after {floor}")
    return found
