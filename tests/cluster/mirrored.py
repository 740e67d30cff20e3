"""Brokers whose messages stay in their journals, so that whatever is found again after a failure was found on
mirrors; and what is asked about journals."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

from sava.proto import ledgers_pb2 as pb
from tests.cluster.trapped import TrappedBrokers
from tests.support.brokers import CALL_S, BrokerProcess, sava
from tests.support.waiting import PATIENCE_S, until


class MirroredBrokers(TrappedBrokers):
    """Nothing is uploaded before an hour has passed."""

    def __init__(self, size: int, directory: Path, **settings: Any) -> None:
        settings.setdefault("upload_interval_s", 3600)
        settings.setdefault("cluster", {"registration_ttl_ms": 2500})
        super().__init__(size, directory, **settings)

    async def journals(self, *, through: BrokerProcess | None = None) -> list[pb.Ledger]:
        client = (through or self.running[0]).client
        response = await client.call(client.ledgers.ListLedgers, pb.ListLedgersRequest(), timeout=CALL_S)
        return list(response.ledgers)

    async def journal_of(self, broker: BrokerProcess, *, through: BrokerProcess | None = None) -> pb.Ledger:
        """The newest one."""
        client = (through or self.running[0]).client
        request = pb.DescribeLedgerRequest(broker_id=await self.id_of(broker))
        found: pb.Ledger = await client.call(client.ledgers.DescribeLedger, request, timeout=CALL_S)
        return found

    async def mirrors_of(self, broker: BrokerProcess) -> list[BrokerProcess]:
        found = await self.journal_of(broker)
        return [
            await self.by_id(member.broker_id)
            for member in found.members
            if not member.is_owner and member.broker_id
        ]

    async def disk_of(self, broker: BrokerProcess) -> str:
        owner = await self.id_of(broker)
        members = [member for each in await self.journals() for member in each.members]
        return next(member.storage_id for member in members if member.broker_id == owner)

    async def mirrored(self, *, copies: int = 3, without: str = "") -> None:
        """Until every broker that runs writes a journal that so many disks hold, and not this one: a record
        names a disk that is lost until its owner has found out."""

        async def are_complete() -> bool:
            open_ones = [each for each in await self.journals() if each.state == "open"]
            ids = {await self.id_of(broker) for broker in self.running}
            full = {
                each.broker_id
                for each in open_ones
                if each.write_quorum >= copies
                and len(each.fragments[-1].storage_ids) >= copies
                and without not in each.fragments[-1].storage_ids
            }
            return ids <= full

        await until(are_complete, f"all journals are on {copies} disks")

    async def forgotten(self, broker: BrokerProcess) -> None:
        """Until nothing is left of its earlier journals, which are on other disks than the one it writes."""
        owner = await self.id_of(broker)

        async def are_gone() -> bool:
            return all(each.state == "open" for each in await self.journals() if each.broker_id == owner)

        await until(are_gone, "the earlier journals are forgotten", timeout=90)

    async def all_running(self) -> None:
        await super().all_running()
        await self.mirrored(copies=min(3, len(self.brokers)))

    async def until_served(
        self, topic: str, *, but_not: BrokerProcess | None = None, timeout: float = PATIENCE_S
    ) -> float:
        """By one that runs; the seconds until then."""
        began = time.monotonic()
        excluded = await self.id_of(but_not) if but_not is not None else 0
        await self.served(topic, by_other_than=excluded, timeout=timeout)
        return time.monotonic() - began

    async def until_gone(self, broker: BrokerProcess, *, timeout: float = PATIENCE_S) -> None:
        """Until nobody needs the journals of this broker, which is not there."""
        gone = await self.id_of(broker)

        async def are_gone() -> bool:
            return all(each.broker_id != gone for each in await self.journals())

        await until(are_gone, f"the journals of broker {gone} are gone", timeout=timeout)

    async def lose_disk(self, broker: BrokerProcess) -> None:
        """Of its messages, and of the copies that it kept: the metadata store is on another one."""
        assert not broker.is_running
        await asyncio.to_thread(shutil.rmtree, broker.data_dir / "journal")

    def break_store(self) -> None:
        """No broker can write to the object store, or read from it."""
        self.segments.rename(self.segments.with_name("segments-away"))
        self.segments.write_bytes(b"no directory")

    def mend_store(self) -> None:
        self.segments.unlink()
        self.segments.with_name("segments-away").rename(self.segments)

    async def begin_anew(self, broker: BrokerProcess) -> None:
        """It has lost all that it had, its name included. As an operator does it: the one that it was is
        removed when its topics are gone, and the empty one is added."""
        assert not broker.is_running
        gone = await self.id_of(broker)
        await asyncio.to_thread(shutil.rmtree, broker.data_dir)
        del self._ids[broker.number]
        there, address = self.running[0].admin, ("--addr", broker.raft_address)
        await self._until_done(there, "remove-node", "--node-id", str(gone))
        await broker.start()
        await self._until_done(there, "add-node", *address)
        await self._until_done(there, "promote-node", *address)

    async def _until_done(self, admin: str, *words: str) -> None:
        async def is_done() -> bool:
            return (await sava("cluster", *words, admin=admin, check=False))[0] == 0

        await until(is_done, f"sava cluster {' '.join(words)}", timeout=60)

    async def asked(self, broker: BrokerProcess) -> str:
        """``sava ledgers recover``, without ``--yes``, or why there is nothing to tell."""
        found = await self.journal_of(broker)
        name = f"{found.broker_id}/{found.incarnation}"
        code, out, err = await self.command("ledgers", "recover", name, check=False)
        return out if code == 0 else err
