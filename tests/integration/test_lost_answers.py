"""A change whose answer is lost: the broker makes it, and the caller must not be told that it failed.

Each test sends a change through a proxy that forwards the request and loses the answer, looks at the broker
itself until the change is there, and only then cuts the connection (or lets the deadline pass).
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio

from sava.api.admin_client import AdminClient
from sava.client import Client
from sava.errors import Outcome, SavaError
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.proto import admin_pb2 as pb
from sava.proto import ledgers_pb2 as ledgers_pb
from sava.proto import ledgers_pb2_grpc as ledgers_rpc
from sava.proto import topics_admin_pb2 as topics_pb
from tests.support.brokers import Cluster, sava
from tests.support.clients import Writing
from tests.support.network import LostAnswers
from tests.support.objects import batch
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

UNKNOWN = 4
"""The exit code of a command whose outcome is not known."""
SCHEMA = '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}'

Happened = Callable[[], Awaitable[bool]]


class Site:
    """One broker behind a proxy, a second one that waits to be added, and a third that is another cluster."""

    def __init__(self, cluster: Cluster, proxy: LostAnswers) -> None:
        self.cluster = cluster
        self.proxy = proxy
        self.broker, self.newcomer, self.west = cluster.brokers

    async def read(self, line: str) -> Any:
        """What a reading command says, asked of the broker itself; None if it refuses."""
        code, out, _ = await sava(*shlex.split(line), "-o", "json", admin=self.broker.admin, check=False)
        return json.loads(out) if code == 0 else None

    async def do(self, line: str) -> None:
        await sava(*shlex.split(line), admin=self.broker.admin)

    async def lose(self, path: str, line: str, happened: Happened) -> None:
        """Run a command, lose its answer, cut the connection once the change is there."""
        self.proxy.lose(path)
        running = asyncio.create_task(sava(*shlex.split(line), admin=self.proxy.address, check=False))
        async with asyncio.timeout(PATIENCE_S):
            await self.proxy.seen.wait()
            while not await happened():
                assert not running.done(), (line, running.result())
        self.proxy.cut()
        code, _, errors = await running
        assert code == UNKNOWN, (line, code, errors)
        assert "it may or may not have happened" in errors, (line, errors)
        found = re.search(r"`sava (.+?)` shows which", errors)
        assert found is not None, (line, errors)
        code, _, _ = await sava(*shlex.split(found[1]), admin=self.broker.admin, check=False)
        # What was deleted is not found (1); a command that does not exist is wrong usage (2).
        assert code in (0, 1), (line, found[1])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """For all tests: each has topics of its own, and leaves nothing of what it sets for others."""
    async with Cluster(0, tmp_path_factory.mktemp("brokers")) as cluster:
        broker, newcomer, west = [await cluster.prepare() for _ in range(3)]
        await asyncio.gather(broker.start(), newcomer.start(), west.start(SAVA__CLUSTER_NAME="west"))
        await cluster.init([broker])
        await cluster.init([west])
        await sava("wait", admin=broker.admin)
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def site(cluster: Cluster) -> AsyncIterator[Site]:
    async with LostAnswers(cluster.brokers[0].admin) as proxy:
        yield Site(cluster, proxy)


# -- connections that break ------------------------------------------------------------------------


async def test_metadata_that_was_written_is_not_called_unwritten(site: Site) -> None:
    """put, then delete: each is applied, then its connection breaks."""

    async def written() -> bool:
        return await site.broker.get("/a") == b"1"

    async def deleted() -> bool:
        return await site.broker.get("/a") is None

    await site.lose("/sava.admin.Meta/Put", "meta put /a 1", written)
    await site.lose("/sava.admin.Meta/Delete", "meta delete /a", deleted)


async def test_namespaces_and_topics_that_were_changed(site: Site) -> None:
    """A namespace and a topic from their creation to their end; every answer is lost."""

    async def namespace() -> bool:
        return await site.read("namespaces describe shop") is not None

    async def limited() -> bool:
        described = await site.read("namespaces describe shop")
        return bool(described["policy"]["max_producers_per_topic"] == 7)

    async def topic() -> bool:
        return await site.read("topics describe /shop/orders") is not None

    async def grown() -> bool:
        return len((await site.read("topics describe /shop/orders"))["partitions"]) == 3

    async def topic_limited() -> bool:
        described = await site.read("topics describe /shop/orders")
        return bool(described["policy"]["max_producers_per_topic"] == 5)

    async def no_topic() -> bool:
        return not await topic()

    async def no_namespace() -> bool:
        return not await namespace()

    services = "/sava.admin.Namespaces", "/sava.admin.Topics"
    await site.lose(f"{services[0]}/CreateNamespace", "namespaces create shop", namespace)
    await site.lose(
        f"{services[0]}/SetNamespacePolicy",
        "namespaces set-policy shop --max-producers-per-topic 7",
        limited,
    )
    await site.lose(f"{services[1]}/CreateTopic", "topics create /shop/orders --partitions 2", topic)
    await site.lose(f"{services[1]}/GrowTopic", "topics partitions /shop/orders --grow 3", grown)
    await site.lose(
        f"{services[1]}/SetTopicPolicy",
        "topics set-policy /shop/orders --max-producers-per-topic 5",
        topic_limited,
    )
    await site.lose(f"{services[1]}/DeleteTopic", "topics delete /shop/orders --yes", no_topic)
    await site.lose(f"{services[0]}/DeleteNamespace", "namespaces delete shop --yes", no_namespace)


async def test_subscriptions_that_were_changed(site: Site) -> None:
    """The seek goes back over ten messages that the subscription began behind."""
    subscription = "/default/subscribed billing"
    await site.do("topics create /default/subscribed")
    async with (
        Client(site.broker.client_url) as client,
        client.producer("/default/subscribed", reliable=True) as producer,
    ):
        await producer.send_many([b"x"] * 10)

    async def described() -> Any:
        return await site.read(f"subscriptions describe {subscription}")

    async def created() -> bool:
        return await described() is not None

    async def configured() -> bool:
        return bool((await described())["max_unacked_messages"] == 9)

    async def sought() -> bool:
        return bool((await described())["cursor"] == 0)

    async def deleted() -> bool:
        return await described() is None

    service = "/sava.admin.Subscriptions"
    await site.lose(f"{service}/CreateSubscription", f"subscriptions create {subscription}", created)
    await site.lose(
        f"{service}/ConfigureSubscription",
        f"subscriptions configure {subscription} --max-unacked 9",
        configured,
    )
    await site.lose(f"{service}/SeekSubscription", f"subscriptions seek {subscription} --earliest", sought)
    await site.lose(f"{service}/DeleteSubscription", f"subscriptions delete {subscription} --yes", deleted)


async def test_schemas_that_were_changed(site: Site, tmp_path: Path) -> None:
    await site.do("topics create /default/typed")
    file = tmp_path / "order.avsc"
    file.write_text(SCHEMA)

    async def registered() -> bool:
        return bool(await site.read("schemas versions order"))

    async def has_mode() -> bool:
        return "full" in str(await site.read("schemas mode order")).lower()

    async def bound() -> bool:
        return "order" in str(await site.read("schemas topic /default/typed"))

    async def deleted() -> bool:
        return not await site.read("schemas versions spare")

    service = "/danube_schema.SchemaRegistry"
    await site.lose(
        f"{service}/RegisterSchema", f"schemas register order --type avro --file {file}", registered
    )
    await site.lose(f"{service}/SetCompatibilityMode", "schemas mode order full", has_mode)
    await site.lose(
        f"{service}/ConfigureTopicSchema", "schemas configure-topic /default/typed --subject order", bound
    )
    await site.do(f"schemas register spare --type avro --file {file}")
    await site.lose(f"{service}/DeleteSchemaVersion", "schemas delete spare 1", deleted)


async def test_pipelines_that_were_changed(site: Site, tmp_path: Path) -> None:
    async def described() -> Any:
        return await site.read("pipelines describe copy")

    async def created() -> bool:
        return await described() is not None

    async def paused() -> bool:
        return bool((await described())["is_paused"])

    async def resumed() -> bool:
        return not await paused()

    async def deleted() -> bool:
        return await described() is None

    await site.do("topics create /default/piped")
    service = "/sava.admin.Pipelines"
    await site.lose(
        f"{service}/ApplyPipeline",
        "pipelines create copy --from topic=/default/piped --to topic=/default/copied",
        created,
    )
    await site.lose(f"{service}/PausePipeline", "pipelines pause copy", paused)
    await site.lose(f"{service}/ResumePipeline", "pipelines resume copy", resumed)
    await site.lose(f"{service}/DeletePipeline", "pipelines delete copy", deleted)
    file = tmp_path / "copy.yaml"
    file.write_text("name: copy\nfrom: {topic: /default/orders}\nto: {topic: /default/copy}\n")
    await site.lose(f"{service}/ApplyPipeline", f"pipelines apply -f {file}", created)


async def test_remotes_and_replication_that_were_changed(site: Site) -> None:
    await site.do("topics create /default/replicated")

    async def added() -> bool:
        return bool(await site.read("remotes list"))

    async def replicated() -> bool:
        return bool((await site.read("replication get default"))["from_scope"])

    async def cleared() -> bool:
        return not await replicated()

    async def removed() -> bool:
        return not await added()

    service = "/sava.admin.Replication"
    west = site.west.client_url.removeprefix("http://")
    await site.lose(f"{service}/AddRemote", f"remotes add west --service {west}", added)
    await site.lose(
        f"{service}/SetReplication", "replication set default --remote west --skip-checks", replicated
    )
    await site.lose(f"{service}/ClearReplication", "replication clear default", cleared)
    await site.lose(f"{service}/RemoveRemote", "remotes remove west", removed)


async def test_brokers_and_members_that_were_changed(site: Site) -> None:
    """The newcomer is added, drained, activated and removed."""
    node = await site.newcomer.node_id()
    newcomer = site.newcomer.raft_address

    async def status() -> str:
        listed = {each["broker_id"]: str(each["status"]) for each in await site.read("brokers list")}
        return listed.get(str(node), "")

    async def drained() -> bool:
        return await status() == "drained"

    async def active() -> bool:
        return await status() == "active"

    async def roles() -> dict[str, str]:
        return {each["raft_addr"]: each["role"] for each in (await site.read("cluster status"))["members"]}

    async def added() -> bool:
        return newcomer in await roles()

    async def promoted() -> bool:
        return (await roles())[newcomer] == "voter"

    async def removed() -> bool:
        return newcomer not in await roles()

    async def saved() -> bool:
        return bool((await site.read("cluster status"))["snapshot_index"])

    brokers, cluster = "/sava.admin.Brokers", "/sava.admin.Cluster"
    await site.lose(f"{cluster}/Snapshot", "cluster snapshot", saved)
    await site.lose(f"{cluster}/AddNode", f"cluster add-node --addr {newcomer}", added)
    await site.lose(f"{cluster}/PromoteNode", f"cluster promote-node --addr {newcomer}", promoted)
    async with asyncio.timeout(PATIENCE_S):
        while not await active():
            pass
    await site.lose(f"{brokers}/DrainBroker", f"brokers drain {node}", drained)
    await site.lose(f"{brokers}/ActivateBroker", f"brokers activate {node}", active)
    await site.lose(f"{cluster}/RemoveNode", f"cluster remove-node --addr {newcomer} --force", removed)


async def test_a_cluster_that_was_founded(site: Site) -> None:
    """The broker that waits to be added is made a cluster of its own."""
    async with LostAnswers(site.newcomer.admin) as proxy:
        alone = Site(site.cluster, proxy)
        alone.broker = site.newcomer

        async def founded() -> bool:
            return bool((await alone.read("cluster status"))["leader_id"] not in ("", "0"))

        await alone.lose(
            "/sava.admin.Cluster/Init", f"cluster init --nodes {site.newcomer.raft_address}", founded
        )


async def test_a_writer_that_was_forgotten(site: Site) -> None:
    await site.do("topics create /default/orders")
    async with Writing(site.broker.client_url, "loader") as writing:
        await writing.commit(0, await writing.stage(orders=[batch([b"0"])]))

    async def forgotten() -> bool:
        return not await site.read("writers list")

    assert not await forgotten()
    await site.lose("/sava.writers.Writers/ForgetWriter", "writers forget loader", forgotten)


class LossyLedgers(ledgers_rpc.LedgersServicer):
    """The service of a broker whose journal waits: it says what would be lost, takes the operator's word for
    it, and its answer to that is lost."""

    def __init__(self) -> None:
        self.given_up = asyncio.Event()

    async def RecoverLedger(  # noqa: N802
        self, request: ledgers_pb.RecoverLedgerRequest, context: Any
    ) -> ledgers_pb.RecoverLedgerResponse:
        if request.HasField("accepted"):
            self.given_up.set()
            await asyncio.Event().wait()
        return ledgers_pb.RecoverLedgerResponse(loss=ledgers_pb.LedgerLoss(silent=["disk-1"]))


async def test_a_journal_that_was_given_up() -> None:
    """The first call only tells, the second one gives up. A real journal that waits needs brokers that died;
    what this is about is the command, which asks a real server through a connection that breaks."""
    ledgers, server = LossyLedgers(), aio.server()
    ledgers_rpc.add_LedgersServicer_to_server(ledgers, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with LostAnswers(f"127.0.0.1:{port}") as proxy:
        line = ("ledgers", "recover", "7/3", "--yes")
        running = asyncio.create_task(sava(*line, admin=proxy.address, check=False))
        async with asyncio.timeout(PATIENCE_S):
            await ledgers.given_up.wait()
            proxy.cut()
            code, _, errors = await running
    await server.stop(None)
    assert code == UNKNOWN, errors
    assert "it may or may not have happened, `sava ledgers describe 7/3` shows which" in errors


# -- deadlines that pass ---------------------------------------------------------------------------


async def held(site: Site, path: str, call: Callable[[AdminClient], Awaitable[Any]]) -> SavaError:
    """What a caller gets whose deadline passes while the answer is held back."""
    async with AdminClient(site.proxy.address) as client:
        site.proxy.lose(path)
        with pytest.raises(SavaError) as failed:
            await call(client)
    return failed.value


async def test_a_deadline_that_passes_after_the_request_has_gone_out(site: Site) -> None:
    """The broker puts, commits and creates; its answers come after the caller's deadline."""
    put = pb.Operation(put=pb.Operation.Put(key="/txn", value=b"2"))
    failures = [
        await held(
            site,
            "/sava.admin.Meta/Put",
            lambda client: client.call(client.meta.Put, pb.PutRequest(key="/put", value=b"1"), timeout=2),
        ),
        await held(
            site,
            "/sava.admin.Meta/Txn",
            lambda client: client.call(client.meta.Txn, pb.TxnRequest(then=[put]), timeout=2),
        ),
        await held(
            site,
            "/sava.admin.Topics/CreateTopic",
            lambda client: client.call(
                client.topics.CreateTopic, topics_pb.CreateTopicRequest(name="/default/late"), timeout=2
            ),
        ),
    ]
    assert (await site.broker.get("/put"), await site.broker.get("/txn")) == (b"1", b"2")
    assert await site.read("topics describe /default/late") is not None
    for failure in failures:
        assert isinstance(failure, OutcomeUnknown)
        assert "did not answer within the deadline; it may or may not have happened" in str(failure)


async def test_a_read_whose_answer_is_lost_has_no_unknown_outcome(site: Site) -> None:
    failure = await held(
        site,
        "/sava.admin.Meta/Get",
        lambda client: client.call(client.meta.Get, pb.GetRequest(key="/a"), timeout=1),
    )
    assert (type(failure), failure.outcome) == (Unavailable, Outcome.NOT_DONE)


async def test_a_change_that_was_never_sent_is_not_called_unknown(site: Site) -> None:
    """The proxy takes the connection and forwards nothing. The deadline passes before a connection stands,
    so that the put has not gone out, and never does."""
    site.proxy.forward_nothing()
    async with AdminClient(site.proxy.address) as client:
        with pytest.raises(Unavailable) as failed:
            await client.call(client.meta.Put, pb.PutRequest(key="/never", value=b"1"), timeout=1)
    assert failed.value.outcome is Outcome.NOT_DONE
    assert await site.broker.get("/never") is None
    code, _, errors = await sava("meta", "put", "/never", "1", admin="127.0.0.1:1", check=False)
    assert code == 1, errors
