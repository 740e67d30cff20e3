"""The tour: each step shows one thing that Sava does, checks it, and says what was measured.

All steps but Danube's are about one topic, ``/default/orders``. It is published to and read, moves, loses
its broker, is queried by Spark, copied to another cluster and read by DuckDB, and at every step order ``n``
must be at offset ``n``. Nothing is simulated, and no setting of a broker is changed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import duckdb

from examples.demo.orders import TOPIC, check_orders, order, orders, total_cents
from examples.demo.processes import SAVA, Cluster, Process, Processes
from examples.demo.steps import Measured, Step, StepFailed, require
from examples.demo.traffic import Traffic
from sava.client.blocking import Client

HERE = Path(__file__).parent
AT_ONCE = 5_000
UNDER_LOAD = 2_000
"""Orders before and after something happens to the cluster."""
ONE_BY_ONE = 10
DANUBE_TOPIC = "/default/from-danube"
COPY_TIMEOUT_S = 300.0
POLL_S = 0.5
ARRIVAL_TIMEOUT_S = 60.0
"""For one order, from here to there."""
TAILS = 5
"""How often orders are sent until some are not in segments yet: brokers upload when they think fit."""
COPIES = 2
"""Of three brokers, those that must have synced what is acknowledged."""


class Tour:
    east: Cluster
    west: Cluster

    def __init__(self, processes: Processes, port_base: int, orders: int) -> None:
        """``orders``: how many are published before anything happens."""
        self._processes = processes
        self._orders = orders
        self._port_base = port_base
        self._clusters: list[Cluster] = []
        self._sent = 0
        """Orders that were acknowledged: order n is at offset n."""

    def steps(self, say: Callable[[str], None]) -> list[Step]:
        """``say``: to whom the steps tell what they are doing."""
        self._say = say
        return [
            Step("Two clusters start, of three brokers and of one", self.start),
            Step("Sava's client publishes and consumes", self.produce_and_consume),
            Step("Danube's published client, unmodified, does the same", self.use_danube_client),
            Step("A topic is unloaded in mid-stream", self.unload),
            Step("The broker that serves it is killed with SIGKILL", self.kill),
            Step("Spark queries history and tail as one table", self.query_with_spark, is_needed=False),
            Step("The topic is copied to the other cluster", self.replicate, is_needed=False),
            Step("DuckDB reads the topic's own Parquet files", self.query_with_duckdb),
        ]

    @property
    def serves(self) -> bool:
        return bool(self._clusters) and all(cluster.brokers for cluster in self._clusters)

    def faults(self) -> str:
        """Brokers that nobody has killed here, and that do not run."""
        return ", ".join(
            f"broker {broker.number} of {cluster.name} has ended by itself"
            for cluster in self._clusters
            for broker in cluster.brokers
            if not broker.is_running
        )

    # -- the steps ---------------------------------------------------------------------------------

    def start(self) -> Measured:
        began = time.monotonic()
        self.east = Cluster("east", self._processes, brokers=3, port_base=self._port_base)
        self.west = Cluster("west", self._processes, brokers=1, port_base=self._port_base + 40)
        self._clusters = [self.east, self.west]
        for cluster in self._clusters:
            cluster.wait_ready()
        seconds = time.monotonic() - began
        pids = ", ".join(str(each.pid) for each in (*self.east.brokers, *self.west.brokers))
        return Measured(
            f"both serve {seconds:.1f} s after `sava up`; brokers are the processes {pids}",
            f"both serve after {seconds:.1f} s",
        )

    def produce_and_consume(self) -> Measured:
        count = self._orders
        with Client(self.east.service) as client:
            self._say(f"publishing {count:,} orders")
            began = time.monotonic()
            with client.producer(TOPIC, name="shop") as producer:
                for first in range(0, count, AT_ONCE):
                    [sent] = producer.send_many(orders(first, min(first + AT_ONCE, count)))
                    require(
                        sent.offset == first, f"order {first} to be stored at offset {first}", sent.offset
                    )
                require(producer.degraded == 0, "no order acknowledged with fewer copies", producer.degraded)
            published_s = time.monotonic() - began
            self._sent = count

            self._say("consuming them")
            began = time.monotonic()
            consumed = 0
            with client.consumer(TOPIC, subscription="kitchen", type="exclusive") as consumer:
                while consumed < count:
                    batch = consumer.receive_batch(timeout=10)
                    if batch is None:
                        raise StepFailed(f"{count} orders", f"{consumed}, and no more within 10 s")
                    check_orders(consumed, batch.payloads())
                    require(batch.ranges[0][0] == consumed, f"offset {consumed} next", batch.ranges[0][0])
                    consumer.ack(batch)
                    consumed += len(batch)
            consumed_s = time.monotonic() - began
        copies = self._copies()
        require(copies == COPIES, f"{COPIES} of 3 brokers to sync what is acknowledged", copies)
        publish, consume = count / published_s, count / consumed_s
        return Measured(
            f"{count:,} orders published at {publish:,.0f} a second, each synced by {copies} brokers when "
            f"acknowledged; consumed, checked and acked at {consume:,.0f} a second",
            f"{publish:,.0f}/s in, {consume:,.0f}/s out",
        )

    def use_danube_client(self) -> Measured:
        """In a process of its own: one process cannot load both sets of protocol definitions."""
        program = HERE.parent / "danube_client.py"
        broker = self.east.brokers[0]
        said = self._processes.run(sys.executable, str(program), broker.service, DANUBE_TOPIC, environment={})
        told = json.loads(said)
        with Client(self.east.service) as client, client.reader(DANUBE_TOPIC, end="latest") as reader:
            found = [message.payload.decode() for message in reader]
        require(
            found == told["sent"],
            f"the {len(told['sent'])} messages that it sent",
            f"{len(found)}: {found[:3]}",
        )
        return Measured(
            f"{len(found)} messages sent, received and acked one call at a time in {told['seconds']:.2f} s; "
            "Sava's client reads the same ones",
            f"{len(found)} messages in {told['seconds']:.2f} s",
        )

    def unload(self) -> Measured:
        with Traffic(self.east.service, self._sent) as traffic:
            traffic.wait_for(UNDER_LOAD)
            self._say(f"sava topics unload {TOPIC}")
            [move] = self.east.ask("topics", "unload", TOPIC)
            traffic.wait_for(UNDER_LOAD)
        count, self._sent = traffic.acknowledged - self._sent, traffic.acknowledged
        old, new = self.east.broker(move["from_broker_id"]), self.east.broker(move["to_broker_id"])
        require(old is not new, "another broker to serve it", f"broker {new.number} as before")
        owner = self.east.owner(TOPIC)
        require(owner is new, f"broker {new.number} to serve it", f"broker {owner.number}")
        wait_ms = 1000 * traffic.longest_wait_s
        return Measured(
            f"from broker {old.number} to {new.number}, {move['downtime_ms']} ms without an owner; offsets "
            f"go on from {move['next_offset']:,} without a hole or a repeat, {count:,} orders published "
            f"around it; the longest wait for an acknowledgement: {wait_ms:.0f} ms; {_again(traffic)}",
            f"nobody waited longer than {wait_ms:.0f} ms",
        )

    def kill(self) -> Measured:
        owner = self.east.owner(TOPIC)
        with Traffic(self.east.service, self._sent) as traffic:
            traffic.wait_for(UNDER_LOAD)
            self._say(f"kill -9 {owner.pid} (broker {owner.number}); another one takes over")
            before = traffic.acknowledged
            self.east.kill(owner)
            traffic.wait_for(UNDER_LOAD)
        self._sent = traffic.acknowledged
        self._say(f"reading {self._sent:,} orders from the brokers that are left")
        successor = self.east.owner(TOPIC)
        read = _read_all(successor.service, self._sent)
        require(read.is_in_place, "every order at its offset", "other offsets")
        require(not owner.is_running, f"process {owner.pid} to be dead", "that it runs")
        seconds = traffic.longest_wait_s
        return Measured(
            f"broker {owner.number} stays dead, broker {successor.number} goes on after {seconds:.1f} s; all "
            f"{read.orders:,} acknowledged orders are at their offsets, {before:,} of them from before the "
            f"kill; {_again(traffic)}",
            f"goes on after {seconds:.1f} s, nothing lost",
        )

    def query_with_spark(self) -> Measured:
        stored = self._publish_a_tail()
        self._say("sava spark submit --master local[2] examples/demo/revenue.py")
        began = time.monotonic()
        said = self._processes.run(
            *(*SAVA, "spark", "submit", "--service", self.east.service, "--master", "local[2]"),
            *(str(HERE / "revenue.py"), TOPIC),
            log="spark.log",
            environment=self.east.environment,
        )
        seconds = time.monotonic() - began
        stored_since = self.east.ask("topics", "describe", TOPIC)["stored_offset"]
        found = json.loads(said.splitlines()[-1])  # behind the warnings of Spark's own parts
        expected = {"orders": self._sent, "misplaced": 0, "cents": total_cents(self._sent)}
        require(found == expected, str(expected), found)
        return Measured(
            f"{found['orders']:,} orders for {found['cents'] / 100:,.2f}, as sent; "
            f"{_sources(stored, stored_since, self._sent)}; {seconds:.1f} s with the start of Spark",
            f"{found['orders']:,} orders in {seconds:.1f} s",
        )

    def replicate(self) -> Measured:
        self._say(f"sava remotes add west; sava replication set {TOPIC} --remote west; sava pipelines run")
        self.east.sava("remotes", "add", "west", "--service", self.west.service)
        self.east.sava("replication", "set", TOPIC, "--remote", "west")
        began = time.monotonic()
        runner = self.east.run_pipelines()
        self._wait_copied(runner)
        copied_s = time.monotonic() - began
        self._say(f"reading {self._sent:,} orders at the other cluster")
        copied = _read_all(self.west.service, self._sent)
        self._say("sending orders here and waiting for them there")
        lags = [1000 * lag for lag in self._lags(copied.next_offset)]
        lag = statistics.median(lags)
        return Measured(
            f"{copied.orders:,} orders copied {copied_s:.1f} s after the start of the runner, the same and "
            f"in the same order; one that is sent now is read there {lag:.0f} ms after its acknowledgement "
            f"(median of {len(lags)}, the longest {max(lags):.0f} ms)",
            f"{copied.orders:,} orders; {lag:.0f} ms behind",
        )

    def query_with_duckdb(self) -> Measured:
        self._say(f"sava topics unload {TOPIC}, which leaves all of it in segments")
        self.east.sava("topics", "unload", TOPIC)
        [topic] = self.east.ask("storage", "inspect", "--topic", TOPIC)
        store = self.east.directory / "segments"
        files = [store / segment["key"] for segment in topic["segments"]]
        began = time.monotonic()
        [found] = duckdb.execute(
            """
            select count(*), count_if(sold.order <> "offset"), sum(sold.cents)
            from (select "offset", from_json(decode(payload), '{"order": "bigint", "cents": "bigint"}') sold
                  from read_parquet(?))
            """,
            [[str(file) for file in files]],
        ).fetchall()
        seconds = time.monotonic() - began
        expected = (self._sent, 0, total_cents(self._sent))
        require(found == expected, f"count, misplaced and sum {expected}", found)
        megabytes = sum(file.stat().st_size for file in files) / 1e6
        return Measured(
            f"{found[0]:,} orders for {found[2] / 100:,.2f}, as sent, in {len(files)} files of "
            f"{megabytes:.1f} MB; {seconds:.2f} s, straight from the files",
            f"{found[0]:,} orders in {seconds:.2f} s",
        )

    # -- what they share ---------------------------------------------------------------------------

    def _publish(self, count: int) -> None:
        with Client(self.east.service) as client, client.producer(TOPIC, name="shop") as producer:
            producer.send_many(orders(self._sent, self._sent + count))
        self._sent += count

    def _publish_a_tail(self) -> int:
        """Orders that are in no segment yet. Returns where they begin: the topic has both."""
        for _ in range(TAILS):
            self._publish(1_000)
            stored = int(self.east.ask("topics", "describe", TOPIC)["stored_offset"])
            if stored < self._sent:
                require(stored > 0, "some orders in segments", "none")
                return stored
        raise StepFailed("a part of the orders in segments, not all", f"all {self._sent}")

    def _wait_copied(self, runner: Process) -> None:
        deadline = time.monotonic() + COPY_TIMEOUT_S
        copied = 0
        while copied < self._sent:
            [topic] = self.east.ask("replication", "status", TOPIC, "--remote", "west")
            [partition] = topic["partitions"]
            copied = partition["position"]
            self._say(f"{copied:,} of {self._sent:,} copied ({partition['state']})")
            runner.require_running("the runner of pipelines")
            require(time.monotonic() < deadline, f"all copied in {COPY_TIMEOUT_S:.0f} s", partition)
            time.sleep(POLL_S)  # each question is a process, which takes from the runner what it needs

    def _copies(self) -> int:
        """How many brokers must have synced what the topic's owner acknowledges."""
        owner = self.east.owner(TOPIC)
        ledgers = self.east.ask("ledgers", "list")
        [copies] = [
            each["ack_quorum"]
            for each in ledgers
            if each["broker_id"] == owner.broker_id and each["state"] == "open"
        ]
        return int(copies)

    def _lags(self, there_next: int) -> list[float]:
        """Seconds from the acknowledgement of an order here to its arrival at the other cluster."""
        lags = []
        with (
            Client(self.east.service) as here,
            Client(self.west.service) as there,
            here.producer(TOPIC, name="shop") as producer,
            there.consumer(TOPIC, subscription="arrivals", start=there_next) as arrivals,
        ):
            for _ in range(ONE_BY_ONE):
                producer.send(order(self._sent))
                began = time.monotonic()
                self._sent += 1
                batch = arrivals.receive_batch(timeout=ARRIVAL_TIMEOUT_S)
                if batch is None:
                    raise StepFailed(f"order {self._sent - 1} there within {ARRIVAL_TIMEOUT_S:.0f} s", "none")
                lags.append(time.monotonic() - began)
                check_orders(self._sent - 1, batch.payloads())
                arrivals.ack(batch)
        return lags


class Read(NamedTuple):
    orders: int
    next_offset: int
    is_in_place: bool
    """Order n was at offset n. A copy in another cluster has offsets of its own."""


def _read_all(service: str, count: int) -> Read:
    """Read a topic from its beginning to its end, which must be the first ``count`` orders, in order."""
    read, next_offset, is_in_place = 0, 0, True
    with Client(service) as client, client.reader(TOPIC, end="latest") as reader:
        for batch in reader.batches():
            check_orders(read, batch.payloads())
            is_in_place = is_in_place and batch.ranges == ((read, read + len(batch)),)
            read += len(batch)
            next_offset = batch.ranges[-1][1]
    require(read == count, f"{count} orders", read)
    return Read(read, next_offset, is_in_place)


def _sources(stored: int, stored_since: int, count: int) -> str:
    """Where a query's rows came from. Spark does not tell; it follows from how much was in segments, unless
    the broker uploaded more while the query ran."""
    if stored == stored_since:
        return f"{stored:,} rows from segments, {count - stored:,} from the broker"
    return (
        f"at least {stored:,} rows from segments; the other {count - stored:,} from segments or the broker, "
        "which uploaded some meanwhile"
    )


def _again(traffic: Traffic) -> str:
    """Deliveries are at least once: what was not acked when its broker went is delivered again."""
    return f"{traffic.repeated or 'none'} delivered to the consumer a second time"
