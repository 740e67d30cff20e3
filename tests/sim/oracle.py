"""Oracle: what clients may and may not see (I16–I21).

Every written value is unique and carries its author, so one look tells which operation wrote it. The order of
effects is the history's; linearizability then needs no search, only four questions that are each answered in
O(1) or O(log n):

* does the answer equal what the history has at that index (writes) or at that revision (reads)?
* is it newer than everything that was answered before the operation began (the *floor*)? Real-time order.
* did a write that was acknowledged take effect, at that revision, and stay in the history?
* did a write that was refused for certain stay without effect? One whose outcome is unknown may do either,
  once."""

from __future__ import annotations

from dataclasses import dataclass, field

from sava.metadata.commands import (
    AllocateResult,
    BatchResult,
    Command,
    KeyValue,
    PutResult,
    Result,
    TxnResult,
)
from tests.sim.history import History, Violation


@dataclass(slots=True)
class Operation:
    """One call of one client, over all its attempts."""

    number: int
    client: str
    what: str
    key: str = ""
    value: bytes = b""
    command: Command | None = None
    expect_mod: int | None = None
    """For a compare-and-swap: the modification revision it insists on."""
    began: int = 0
    floor_revision: int = 0
    floor_index: int = 0
    attempts: int = 0
    maybe_applied: bool = False
    outcome: str = "open"
    """open, acked, failed (certainly without effect) or unknown."""
    revision: int = 0
    batch_revision: int = 0
    """Of the part of a batch that has no condition."""

    def __str__(self) -> str:
        return f"#{self.number} {self.client} {self.what} {self.key} {self.value[:24]!r} {self.outcome}"


@dataclass(slots=True)
class Oracle:
    history: History
    floor_revision: int = 0
    floor_index: int = 0
    operations: list[Operation] = field(default_factory=list)
    allocated: dict[int, int] = field(default_factory=dict)
    """Which operation got which id; a repeated request may hear of its ids twice."""
    acked: int = 0
    reads: int = 0

    def begin(self, operation: Operation, now: int) -> Operation:
        operation.began = now
        operation.floor_revision, operation.floor_index = self.floor_revision, self.floor_index
        self.operations.append(operation)
        return operation

    # -- writes ----------------------------------------------------------------------------------------------

    def committed(self, operation: Operation, index: int, result: Result, node_revision: int) -> None:
        if index not in self.history.lines:
            raise Violation("I17", f"{operation} was acknowledged at index {index}, which nobody has applied")
        if index <= operation.floor_index:
            raise Violation(
                "I16",
                f"{operation} took index {index}, but {operation.floor_index} was answered before it began",
            )
        operation.outcome = "acked"
        self.acked += 1
        self.floor_index = max(self.floor_index, index)
        if isinstance(result, TxnResult):
            self._check_txn(operation, result, node_revision)
        if isinstance(result, BatchResult):
            self._check_batch(operation, result, node_revision)

    def _check_txn(self, operation: Operation, result: TxnResult, node_revision: int) -> None:
        if result.revision < operation.floor_revision:
            raise Violation(
                "I16", f"{operation} at revision {result.revision}, below {operation.floor_revision}"
            )
        if node_revision < result.revision:
            raise Violation("S70", f"{operation}: the node that answered has applied {node_revision} only")
        self.floor_revision = max(self.floor_revision, result.revision)
        if not result.succeeded:
            return
        operation.revision = result.revision
        for outcome in result.results:
            if isinstance(outcome, AllocateResult):
                self._check_ids(operation, outcome)
            if isinstance(outcome, PutResult) and operation.expect_mod is not None:
                found = outcome.prev.mod_revision if outcome.prev else 0
                if found != operation.expect_mod:
                    raise Violation(
                        "I20", f"{operation} insisted on {operation.expect_mod} and replaced {found}"
                    )

    def _check_batch(self, operation: Operation, result: BatchResult, node_revision: int) -> None:
        """A swap, a put without a condition, and one whose condition never holds (``Client._batch``)."""
        is_swapped, is_put, is_wrong = result.outcomes
        if not is_put or is_wrong:
            raise Violation("I16", f"{operation}: a batch whose second part must succeed alone: {result}")
        told = TxnResult(is_swapped is True, result.revision, ())
        self._check_txn(operation, told, node_revision)
        operation.batch_revision = result.revision
        before = self.history.at(operation.key, result.revision - 1)
        found = before.mod_revision if before else 0
        if is_swapped and found != operation.expect_mod:
            raise Violation("I20", f"{operation} insisted on {operation.expect_mod} and replaced {found}")

    def _check_ids(self, operation: Operation, outcome: AllocateResult) -> None:
        for number in range(outcome.first, outcome.first + outcome.count):
            owner = self.allocated.setdefault(number, operation.number)
            if owner != operation.number:
                raise Violation("I16", f"{operation}: id {number} was handed out to operation {owner} before")

    def failed(self, operation: Operation) -> None:
        operation.outcome = "unknown" if operation.maybe_applied else "failed"

    # -- reads -----------------------------------------------------------------------------------------------

    def read_index(self, operation: Operation, index: int) -> None:
        if index < operation.floor_index:
            raise Violation("I16", f"{operation}: read index {index}, below {operation.floor_index}")

    def read(
        self, operation: Operation, kv: KeyValue | None, revision: int, *, floor: int, linear: bool
    ) -> None:
        """A client saw ``kv`` in a state of ``revision``."""
        self.reads += 1
        operation.outcome = "acked"
        if revision < floor:
            raise Violation(
                "I16", f"{operation} saw revision {revision}, but {floor} was answered before it began"
            )
        expected = self.history.at(operation.key, revision)
        if kv != expected:
            rule = "I19" if kv is not None and kv.value not in self.history.values else "I18"
            raise Violation(rule, f"{operation} saw {kv} at revision {revision}; the history has {expected}")
        if linear:
            self.floor_revision = max(self.floor_revision, revision)

    # -- at the end ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """All is healed and quiet: compare what clients were told with what came of it."""
        for operation in self.operations:
            if not operation.value:
                continue
            if operation.what == "batch":
                self._settle_batch(operation)
            effect = self.history.values.get(operation.value)
            if operation.outcome == "failed" and effect is not None:
                raise Violation("I21", f"{operation} was refused for certain and took effect at {effect}")
            if operation.outcome == "acked" and operation.revision:
                if effect is None:
                    raise Violation("I17", f"{operation} was acknowledged and is not in the history")
                if effect[1] != operation.revision:
                    raise Violation(
                        "I17", f"{operation} was acknowledged at {operation.revision}, is at {effect}"
                    )
        attempted = {operation.value for operation in self.operations if operation.value}
        # A pair writes its value to one key, and the value with a suffix to another.
        phantoms = sorted(value for value in self.history.values if value.partition(b"/")[0] not in attempted)
        if phantoms:
            raise Violation("I19", f"values that nobody wrote: {phantoms[:3]}")

    def _settle_batch(self, operation: Operation) -> None:
        """Each of its transactions took effect by its own condition, and not by that of another."""
        values = self.history.values
        put, never = values.get(operation.value + b"/2"), values.get(operation.value + b"/3")
        if never is not None:
            raise Violation("I21", f"{operation}: a part whose condition never held took effect at {never}")
        if operation.outcome == "failed" and put is not None:
            raise Violation("I21", f"{operation} was refused for certain and took effect at {put}")
        if operation.outcome == "acked" and (put is None or put[1] != operation.batch_revision):
            raise Violation("I17", f"{operation} was acknowledged at {operation.batch_revision}, is at {put}")
        if operation.outcome == "acked" and not operation.revision and operation.value in values:
            raise Violation("I21", f"{operation}: its swap was refused and took effect")
