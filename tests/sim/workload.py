"""Clients: what the cluster is there for.

A client has one operation open at a time and asks a random node for it: writes of unique values, deletes,
compare-and-swap on the revision, several keys in one transaction, several transactions in one batch, ids,
linearizable and local reads. Half of
the clients have a session of their own and repeat a request whose outcome they did not learn, through another
node and sometimes twice at once, under the same (session, seq); the others take what they get."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sava.metadata.commands import (
    AllocateId,
    Command,
    CommandRefused,
    Compare,
    Delete,
    DeletePrefix,
    Get,
    Put,
    Relation,
    SessionOpen,
    SessionResult,
    Target,
    Txn,
    TxnBatch,
)
from sava.metadata.errors import RequestForgotten, SessionExpired
from sava.metadata.peer import Committed, Failed, Propose, ReadAt, ReadIndex, Reply
from sava.raft.core import Role
from tests.sim.history import Violation
from tests.sim.node import SimNode
from tests.sim.oracle import Operation

if TYPE_CHECKING:
    from tests.sim.world import World

MS = 1000
LARGE_VALUE = 20_000
MAX_ATTEMPTS = 6
DEFINITE = (SessionExpired.code, RequestForgotten.code)


class Client:
    def __init__(self, world: World, name: str, *, with_session: bool) -> None:
        self.world = world
        self.name = name
        self.rng = world.rng(f"client-{name}")
        self.with_session = with_session
        self._session = 0
        self._seq = 0
        self._sessions = 0
        self._last_revision = 0
        self._burst = 0
        self.stopped = False

    def start(self) -> None:
        self.world.after(self.rng.randrange(500 * MS), self._next)

    # -- the loop --------------------------------------------------------------------------------------------

    def _think(self) -> None:
        if "burst" in self.world.knobs.faults:
            if self._burst > 0:
                self._burst -= 1
                self.world.after(self.rng.randrange(1, 2 * MS), self._next)
                return
            if self.rng.random() < 0.03:
                self._burst = self.rng.randrange(5, 40)
        self.world.after(self.rng.randrange(1, 2 * self.world.knobs.think_ms * MS), self._next)

    def _next(self) -> None:
        if self.stopped or len(self.world.oracle.operations) >= self.world.knobs.operations:
            return
        if self.with_session and not self._session:
            self._open_session()
            return
        choice = self.rng.random()
        if choice < 0.2:
            self._read()
        elif choice < 0.3:
            self._local_read()
        else:
            self._write()

    def _node(self) -> SimNode | None:
        nodes = list(self.world.nodes.values())
        node = self.rng.choice(nodes)
        if not node.alive and self.rng.random() < 0.8:
            nodes = self.world.running()
            node = self.rng.choice(nodes) if nodes else node
        return node if node.alive else None

    def _ask(self, request: Propose | ReadIndex, done: Callable[[SimNode, Reply | None], None]) -> bool:
        node = self._node()
        if node is None:
            return False
        timeout = self.rng.choice([300, 1000, 3000])
        node.ask(request, lambda reply: done(node, reply), timeout)
        return True

    # -- sessions --------------------------------------------------------------------------------------------

    def _open_session(self) -> None:
        # The same nonce until the opening is answered (repeating it is harmless), another one for each new
        # session: numbers begin anew, and an old session would answer them from memory.
        nonce = f"{self.name}-{self._sessions}".encode()

        def opened(_: SimNode, reply: Reply | None) -> None:
            if isinstance(reply, Committed) and isinstance(reply.result, SessionResult):
                self._session, self._seq = reply.result.session, 0
                self._sessions += 1
            self._think()

        if not self._ask(Propose(SessionOpen(nonce)), opened):
            self._think()

    # -- writes ----------------------------------------------------------------------------------------------

    def _key(self) -> str:
        return f"/k/{self.rng.randrange(self.world.knobs.keys)}"

    def _write(self) -> None:
        operation = Operation(len(self.world.oracle.operations) + 1, self.name, "put", self._key())
        command = self._command(operation)
        operation.command = command
        self.world.oracle.begin(operation, self.world.now)
        request = Propose(command)
        if self.with_session:
            self._seq += 1
            request = Propose(command, self._session, self._seq, self._seq)
        self._attempt(operation, request)
        if self.with_session and self.rng.random() < 0.1:
            operation.maybe_applied = True  # as far as the first copy can tell
            self._attempt(operation, request, copy=True)

    def _command(self, operation: Operation) -> Command:
        key = operation.key
        choice = self.rng.random()
        if choice < 0.1:
            operation.what = "delete"
            return Txn(then=(Delete(key),))
        if choice < 0.2:
            operation.what, operation.key = "allocate", "/ids/a"
            return Txn(then=(AllocateId("/ids/a", self.rng.randrange(1, 4)),))
        if choice < 0.22:
            operation.what = "delete prefix"
            return Txn(then=(DeletePrefix("/k/"),))
        operation.value = f"v{operation.number}-{self.name}".encode()
        if "largevalue" in self.world.knobs.faults and self.rng.random() < 0.05:
            operation.value += b"." * self.rng.randrange(LARGE_VALUE)
        if choice < 0.45:
            return self._swap(operation)
        if choice < 0.55:
            operation.what = "pair"
            other = f"/pair/{self.rng.randrange(3)}"
            return Txn(then=(Put(key, operation.value), Put(other, operation.value + b"/2"), Get(key)))
        if choice < 0.65:
            return self._batch(operation)
        return Txn(then=(Put(key, operation.value),))

    def _swap(self, operation: Operation) -> Command:
        """Insist on the revision that some node showed; often it is outdated, then ``otherwise`` reads."""
        node = self._node()
        kv = (
            node.replica.machine.get(operation.key) if node is not None and node.replica is not None else None
        )
        operation.what, operation.expect_mod = "swap", kv.mod_revision if kv else 0
        compare = Compare(operation.key, Target.MOD_REVISION, Relation.EQUAL, operation.expect_mod)
        return Txn((compare,), (Put(operation.key, operation.value),), (Get(operation.key),))

    def _batch(self, operation: Operation) -> Command:
        """A swap that is often refused, a put that never is, and a put that always is. What it reads and
        where it puts are not drawn, so that the other choices of a seed stay as they were."""
        running = self.world.running()
        replica = running[0].replica if running else None
        kv = replica.machine.get(operation.key) if replica is not None else None
        operation.what, operation.expect_mod = "batch", kv.mod_revision if kv else 0
        compare = Compare(operation.key, Target.MOD_REVISION, Relation.EQUAL, operation.expect_mod)
        never = Compare(operation.key, Target.VERSION, Relation.LESS, 0)
        other = f"/pair/{operation.number % 3}"
        return TxnBatch(
            (
                Txn((compare,), (Put(operation.key, operation.value),)),
                Txn(then=(Put(other, operation.value + b"/2"),)),
                Txn((never,), (Put(other, operation.value + b"/3"),)),
            )
        )

    def _attempt(self, operation: Operation, request: Propose, *, copy: bool = False) -> None:
        operation.attempts += 1

        def answered(node: SimNode, reply: Reply | None) -> None:
            self._answered(node, operation, request, reply, copy=copy)

        if not self._ask(request, answered) and not copy:
            self._again_or_give_up(operation, request)

    def _answered(
        self, node: SimNode, operation: Operation, request: Propose, reply: Reply | None, *, copy: bool
    ) -> None:
        if isinstance(reply, Committed):
            self._committed(node, operation, request, reply, copy=copy)
            return
        if reply is not None and not isinstance(reply, Failed):
            raise Violation("API", f"{operation} was answered with {reply}")
        if reply is None or reply.maybe_applied:
            operation.maybe_applied = True
        if not copy and operation.outcome == "open":
            self._again_or_give_up(operation, request)

    def _committed(
        self, node: SimNode, operation: Operation, request: Propose, reply: Committed, *, copy: bool
    ) -> None:
        if isinstance(reply.result, CommandRefused):
            if reply.result.code in DEFINITE:
                # The memory of earlier copies is gone; whether one of them took effect is anybody's guess.
                operation.maybe_applied = True
                if reply.result.code == SessionExpired.code and request.session == self._session:
                    self._session = 0
            if not copy and operation.outcome == "open":
                self.world.oracle.failed(operation)
                self._think()
            return
        assert node.replica is not None
        was_open = operation.outcome == "open"
        self.world.oracle.committed(operation, reply.index, reply.result, node.replica.machine.revision)
        self._last_revision = max(self._last_revision, operation.revision)
        if was_open and not copy:
            self._think()
        elif was_open:
            operation.outcome = "open"  # the first copy is still out; it ends the operation

    def _again_or_give_up(self, operation: Operation, request: Propose) -> None:
        if self.with_session and operation.attempts < MAX_ATTEMPTS and not self.stopped:
            self.world.after(self.rng.randrange(1, 200) * MS, self._attempt, operation, request)
            return
        self.world.oracle.failed(operation)
        self._think()

    # -- reads -----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        operation = Operation(len(self.world.oracle.operations) + 1, self.name, "read", self._key())
        self.world.oracle.begin(operation, self.world.now)

        def answered(node: SimNode, reply: Reply | None) -> None:
            if isinstance(reply, ReadAt):
                self._look(node, operation, reply)
            else:
                operation.outcome = "failed"
            self._think()

        if not self._ask(ReadIndex(), answered):
            operation.outcome = "failed"
            self._think()

    def _look(self, node: SimNode, operation: Operation, reply: ReadAt) -> None:
        assert node.replica is not None
        oracle, machine = self.world.oracle, node.replica.machine
        oracle.read_index(operation, reply.index)
        oracle.read(
            operation,
            machine.get(operation.key),
            machine.revision,
            floor=operation.floor_revision,
            linear=True,
        )

    def _local_read(self) -> None:
        """What this node has applied, but at least what this client was told of (read your writes)."""
        node = self._node()
        if node is None or node.replica is None:
            self._think()
            return
        operation = Operation(len(self.world.oracle.operations) + 1, self.name, "local read", self._key())
        self.world.oracle.begin(operation, self.world.now)
        floor, replica = self._last_revision, node.replica

        def reached() -> None:
            self.world.oracle.read(
                operation,
                replica.machine.get(operation.key),
                replica.machine.revision,
                floor=floor,
                linear=False,
            )

        node.post(lambda: replica.when_revision(floor, reached))
        self._think()


class Prober(Client):
    """Sits still until two nodes believe that they lead. In that moment, which is when stale reads happen, it
    writes to the newer one and reads from the older one, over and over."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "probe", with_session=False)
        self._target: SimNode | None = None

    def _think(self) -> None:
        """The clock of ``_next`` drives this client, not the ends of its operations."""

    def _next(self) -> None:
        if self.stopped:
            return
        self.world.after(self.rng.randrange(10, 40) * MS, self._next)
        leaders = sorted(
            (
                node
                for node in self.world.running()
                if node.status is not None and node.status.role is Role.LEADER
            ),
            key=lambda node: node.status.term if node.status else 0,
        )
        if len(leaders) < 2:
            return
        self._target = leaders[-1]
        self._write()
        self._target = leaders[0]
        self._read()

    def _node(self) -> SimNode | None:
        return self._target if self._target is not None and self._target.alive else None
