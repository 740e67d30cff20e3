"""The HTTP API against a broker in a process of its own, as `curl` and a browser call it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sava.client import Client
from tests.support.brokers import Standalone
from tests.support.pages import blocks

NDJSON = "application/x-ndjson"
TOPICS = (f"/v1/topics/default/t{number}" for number in count())


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with Standalone(tmp_path_factory.mktemp("broker")) as running:
        running.ready()
        yield running


@pytest.fixture
async def http(broker: Standalone) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{broker.http_port}", timeout=timeout) as session:
        yield session


@pytest.fixture
def topic() -> str:
    return next(TOPICS)


async def answer(response: aiohttp.ClientResponse, status: int = 200) -> Any:
    body = await response.json()
    assert response.status == status, body
    return body


async def publish(http: aiohttp.ClientSession, topic: str, *messages: dict[str, Any]) -> Any:
    return await answer(await http.post(f"{topic}/messages", json=list(messages)))


def name_of(topic: str) -> str:
    return topic.removeprefix("/v1/topics")


# -- administration --------------------------------------------------------------------------------


async def test_a_topic_is_created_shown_and_deleted(http: aiohttp.ClientSession, topic: str) -> None:
    asked = {"name": name_of(topic), "reliable": True, "partitions": 3}
    created = await answer(await http.post("/v1/topics", json=asked))
    assert created["name"] == name_of(topic)
    shown = await answer(await http.get(topic))
    assert [each[-1] for each in shown["partitions"]] == ["0", "1", "2"]
    assert isinstance(shown["topic_id"], str), "numbers of 64 bits lose digits in JavaScript"
    await answer(await http.delete(topic))
    gone = await answer(await http.get(topic), 404)
    assert gone["error"]["code"] == "topic_unknown"
    assert gone["error"]["outcome"] == "not done"


async def test_an_answer_in_several_parts_comes_as_lines(http: aiohttp.ClientSession, topic: str) -> None:
    await publish(http, topic, {"payload": "a"})
    response = await http.post(f"{topic}/unload", json={})
    lines = [json.loads(line) for line in (await response.text()).splitlines()]
    assert lines, "one broker has nowhere to move it to, and says so"
    assert "error" in lines[-1]


async def test_every_listing_answers(http: aiohttp.ClientSession) -> None:
    for path in (
        *("cluster", "brokers", "brokers/balance", "namespaces", "schemas", "ledgers", "writers"),
        *("remotes", "pipelines", "pipelines/runners", "doctor"),
    ):
        assert isinstance(await answer(await http.get(f"/v1/{path}")), dict), path


async def test_the_api_describes_itself(http: aiohttp.ClientSession) -> None:
    described = await answer(await http.get("/v1/openapi.json"))
    paths = described["paths"]
    assert "get" in paths["/v1/topics/{namespace}/{name}"]
    assert "post" in paths["/v1/topics/{namespace}/{name}/messages"]
    for path, verbs in paths.items():
        for verb, operation in verbs.items():
            assert operation["responses"], (verb, path)


@pytest.mark.parametrize(
    ("verb", "path", "body", "status", "part"),
    [
        ("GET", "/v1/cluster?what=1", None, 400, "what is no parameter"),
        ("POST", "/v1/topics", b"{", 400, "not JSON"),
        ("POST", "/v1/topics", b"[]", 400, "JSON object"),
        ("POST", "/v1/topics", b'{"nam": "x"}', 400, "NewTopicRequest"),
        ("POST", "/v1/topics", b'{"name": 7}', 400, "fit"),
        ("POST", "/v1/topics", b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, ""),
        ("POST", "/v1/topics", b" " * (2 << 20), 413, ""),
        ("GET", "/v1/nothing", None, 404, "Not Found"),
        ("PUT", "/v1/cluster", b"{}", 405, "Method Not Allowed"),
        ("GET", "/console/../../config.py", None, 404, ""),
        ("GET", "/console/%2e%2e/port.py", None, 404, ""),
    ],
)
async def test_what_is_wrong_is_refused_with_the_reason(
    http: aiohttp.ClientSession, verb: str, path: str, body: bytes | None, status: int, part: str
) -> None:
    headers = {"Content-Type": "application/json"} if body is not None else {}
    data = None if body is None else BytesIO(body)
    response = await http.request(verb, path, data=data, headers=headers)
    error = (await answer(response, status))["error"]
    assert part.replace("NewTopicRequest", "CreateTopicRequest") in error["message"]
    assert len(error["message"]) < 500


# -- pages of other sites ----------------------------------------------------------------------------


async def test_a_page_of_another_site_has_no_way_in(http: aiohttp.ClientSession) -> None:
    for headers, status in (
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example:9040"}, 421),  # DNS rebinding
    ):
        refused = await http.post("/v1/topics", json={"name": "/default/evil"}, headers=headers)
        assert refused.status == status, headers
    plain = await http.post(
        "/v1/topics", data=b'{"name": "/default/evil"}', headers={"Content-Type": "text/plain"}
    )
    assert plain.status == 415, "a form of another site can send this without asking first"
    own = f"http://127.0.0.1:{http._base_url.port}"  # type: ignore[union-attr]
    assert (await http.get("/v1/cluster", headers={"Origin": own})).status == 200
    listed = await answer(await http.get("/v1/topics/default/evil"), 404)
    assert listed["error"]["code"] == "topic_unknown"


async def test_answers_forbid_what_a_page_needs_not(http: aiohttp.ClientSession) -> None:
    response = await http.get("/v1/cluster")
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["X-Frame-Options"] == "DENY"


# -- messages ----------------------------------------------------------------------------------------


async def test_messages_are_published_and_read(http: aiohttp.ClientSession, topic: str) -> None:
    stored = await publish(
        http,
        topic,
        {"payload": "text", "key": "k", "attributes": {"region": "eu"}},
        {"payload": {"amount": 7}},
        {"payload_base64": "AP8="},
    )
    assert stored == {"stored": [{"topic": name_of(topic), "offset": 0, "count": 3}]}
    read = await answer(await http.get(f"{topic}/messages"))
    first, second, third = read["messages"]
    assert (first["payload"], first["key"], first["attributes"]) == ("text", "k", {"region": "eu"})
    assert json.loads(second["payload"]) == {"amount": 7}
    assert (third["payload_base64"], third["size"]) == ("AP8=", 2)
    assert read["next"] == read["end"] == {name_of(topic): 3}


async def test_lines_and_arrow_are_taken(http: aiohttp.ClientSession, topic: str) -> None:
    lines = b"".join(b'{"payload": "%d"}\n' % number for number in range(1000))
    headers = {"Content-Type": NDJSON}
    stored = await answer(await http.post(f"{topic}/messages", data=lines, headers=headers))
    assert stored["stored"][0]["count"] == 1000
    sink = pa.BufferOutputStream()
    table = pa.table({"payload": [b"a", b"b"], "key": ["x", None]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    arrow = {"Content-Type": "application/vnd.apache.arrow.stream"}
    data = sink.getvalue().to_pybytes()
    await answer(await http.post(f"{topic}/messages", data=data, headers=arrow))
    read = await answer(await http.get(f"{topic}/messages?start=998&limit=10"))
    assert [each["payload"] for each in read["messages"]] == ["998", "999", "a", "b"]
    assert [each["key"] for each in read["messages"]] == [None, None, "x", None]


async def test_a_reader_filters_and_continues(http: aiohttp.ClientSession, topic: str) -> None:
    messages = [
        {"payload": f"number {n}", "key": f"k{n % 10}", "attributes": {"even": str(n % 2 == 0)}}
        for n in range(100)
    ]
    await publish(http, topic, *messages)
    found, start = [], 0
    while start < 100:
        query = {"key": "k3", "start": str(start), "limit": "4"}
        page = await answer(await http.get(f"{topic}/messages", params=query))
        found += [each["offset"] for each in page["messages"]]
        start = page["next"][name_of(topic)]
    assert found == list(range(3, 100, 10))
    even = await answer(
        await http.get(f"{topic}/messages", params={"attribute": "even=False", "contains": "9"})
    )
    assert [each["offset"] for each in even["messages"]] == [
        9,
        19,
        29,
        39,
        49,
        59,
        69,
        79,
        89,
        91,
        93,
        95,
        97,
        99,
    ]


async def test_latest_shows_the_last_ones(http: aiohttp.ClientSession, topic: str) -> None:
    await publish(http, topic, *({"payload": str(n)} for n in range(20)))
    read = await answer(await http.get(f"{topic}/messages?start=latest&limit=3"))
    assert [each["payload"] for each in read["messages"]] == ["17", "18", "19"]
    minute = await answer(await http.get(f"{topic}/messages?start=-1m&limit=100"))
    assert len(minute["messages"]) == 20


async def test_a_range_is_downloaded_as_parquet(http: aiohttp.ClientSession, topic: str) -> None:
    await publish(http, topic, {"payload": "a", "key": "k"}, {"payload": "b", "attributes": {"x": "y"}})
    response = await http.get(f"{topic}/messages", headers={"Accept": "application/vnd.apache.parquet"})
    table = pq.read_table(BytesIO(await response.read()))
    assert table.column("payload").to_pylist() == [b"a", b"b"]
    assert table.column("attributes").to_pylist() == [[], [("x", "y")]]


async def test_a_large_payload_is_cut_between_characters(http: aiohttp.ClientSession, topic: str) -> None:
    await publish(http, topic, {"payload": "ä" * 100_000})
    shown = (await answer(await http.get(f"{topic}/messages?max_payload=7")))["messages"][0]
    assert (shown["payload"], shown["is_cut"], shown["size"]) == ("äää", True, 200_000)


async def test_keys_have_their_partitions(http: aiohttp.ClientSession, topic: str) -> None:
    await answer(
        await http.post("/v1/topics", json={"name": name_of(topic), "reliable": True, "partitions": 3})
    )
    sent = [{"payload": "x", "key": f"key-{n % 7}"} for n in range(70)]
    stored = (await publish(http, topic, *sent))["stored"]
    assert sum(each["count"] for each in stored) == 70
    assert len(stored) > 1
    read = await answer(await http.get(f"{topic}/messages?limit=100"))
    places = {(each["key"], each["topic"]) for each in read["messages"]}
    assert len(places) == 7


async def test_followers_get_events_and_resume(http: aiohttp.ClientSession, topic: str) -> None:
    await publish(http, topic, {"payload": "0"})

    async def events(number: int, **headers: str) -> list[tuple[str, str]]:
        seen, event = [], ""
        async with http.get(f"{topic}/messages/follow?start=earliest", headers=headers) as response:
            assert response.content_type == "text/event-stream"
            async for raw in response.content:
                text = raw.decode().rstrip("\n")
                if text.startswith("id: "):
                    event = text.removeprefix("id: ")
                elif text.startswith("data: "):
                    seen.append((event, json.loads(text.removeprefix("data: "))["payload"]))
                    if len(seen) == number:
                        break
        return seen

    following = asyncio.create_task(events(3))
    await publish(http, topic, {"payload": "1"}, {"payload": "2"})
    seen = await following
    assert [payload for _, payload in seen] == ["0", "1", "2"]
    again = await events(1, **{"Last-Event-ID": seen[1][0]})
    assert [payload for _, payload in again] == ["2"]


async def test_a_subscription_delivers_until_acked(http: aiohttp.ClientSession, topic: str) -> None:
    await publish(http, topic, *({"payload": str(n)} for n in range(5)))
    held = f"{topic}/subscriptions/s"
    got = await answer(await http.post(f"{held}/receive", json={"start": "earliest", "wait_ms": 30_000}))
    assert [each["payload"] for each in got["messages"]] == ["0", "1", "2", "3", "4"]
    consumer = got["consumer"]
    acked = {"consumer": consumer, "messages": [{"offset": n} for n in (0, 1, 2, 4)]}
    await answer(await http.post(f"{held}/ack", json=acked))
    await answer(await http.post(f"{held}/nack", json={"consumer": consumer, "messages": [3]}))
    again = await answer(await http.post(f"{held}/receive", json={"consumer": consumer, "wait_ms": 30_000}))
    assert [(each["offset"], each["attempt"]) for each in again["messages"]] == [(3, 2)]
    await answer(await http.post(f"{held}/ack", json={"consumer": consumer, "messages": [3]}))
    shown = await answer(await http.get(f"{topic}/subscriptions/s"))
    assert shown["subscription"] == "s"


async def test_a_consumer_belongs_to_its_caller(http: aiohttp.ClientSession, topic: str) -> None:
    await publish(http, topic, {"payload": "0"})
    held = f"{topic}/subscriptions/s"
    got = await answer(await http.post(f"{held}/receive", json={"start": "earliest", "wait_ms": 1000}))
    stolen = {"consumer": got["consumer"], "messages": [0]}
    other = await http.post(f"{held}/ack", json=stolen, headers={"Authorization": "Bearer other"})
    assert (await answer(other, 404))["error"]["code"] == "consumer_unknown"


@pytest.mark.parametrize(
    ("kind", "body", "part"),
    [
        (NDJSON, b"{", "not a message"),
        (NDJSON, b'{"payload": "a", "colour": "red"}', "colour"),
        ("application/json", b"[]", "0 messages"),
        ("application/json", b'{"payload_base64": "%%"}', "base64"),
        ("application/vnd.apache.arrow.stream", b"garbage", "Arrow"),
    ],
)
async def test_a_message_that_is_none_is_refused(
    http: aiohttp.ClientSession, topic: str, kind: str, body: bytes, part: str
) -> None:
    response = await http.post(f"{topic}/messages", data=body, headers={"Content-Type": kind})
    assert part in (await answer(response, 400))["error"]["message"]


async def test_a_schema_decodes_what_is_shown(
    http: aiohttp.ClientSession, broker: Standalone, topic: str
) -> None:
    subject = name_of(topic).strip("/").replace("/", "-")
    definition = b'{"type": "object", "properties": {"id": {"type": "integer"}}}'
    registered = {
        "subject": subject,
        "schema_type": "json_schema",
        "schema_definition": b64encode(definition).decode(),
    }
    await answer(await http.post("/v1/schemas", json=registered))
    async with Client(broker.url) as client:
        codec = await client.schema(subject)
        async with client.producer(name_of(topic), schema=subject, codec=codec) as producer:
            await producer.send({"id": 7})
    shown = (await answer(await http.get(f"{topic}/messages")))["messages"][0]
    assert (shown["value"], shown["schema_version"]) == ({"id": 7}, 1)
    assert json.loads(shown["payload"]) == {"id": 7}


def test_the_page_of_the_api_runs(broker: Standalone, tmp_path: Path) -> None:
    commands = "\n".join(blocks("http-api.md", "sh")).replace(":9040", f":{broker.http_port}")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "topic_unknown" in done.stdout
    assert "error" not in done.stdout.replace('{"error":{"code":"topic_unknown"', "")
    received = json.loads((tmp_path / "received.json").read_text())
    assert 1 <= len(received["messages"]) <= 5
    assert pq.read_table(tmp_path / "coffee.parquet").num_rows == 5
