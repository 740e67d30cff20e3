"""What a record batch costs: ``python -m bench.records``. The best of several runs, each long enough to
time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sava.records import STORED_COLUMNS, Compression, Message, RecordBatch

PAYLOAD = bytes(range(100))
NOW = 1_750_000_000_000_000
ROUNDS = 7
ROUND_SECONDS = 0.05


def seconds(call: Callable[[], Any]) -> float:
    """The time of one call: the best round of many calls."""
    call()
    began = time.perf_counter()
    call()
    repeats = max(1, int(ROUND_SECONDS / (time.perf_counter() - began)))
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        rounds.append((time.perf_counter() - began) / repeats)
    return min(rounds)


def line(what: str, figure: str) -> None:
    print(f"{what:<62} {figure:>24}")


def per_message(what: str, call: Callable[[], Any], count: int) -> None:
    line(what, f"{seconds(call) / count * 1e6:.3f} µs/message")


def fresh(batch: RecordBatch) -> RecordBatch:
    """The batch as a reader gets it: bytes, nothing decoded yet."""
    return RecordBatch.parse(batch.data)


def encoding() -> None:
    payloads = [bytes(PAYLOAD) for _ in range(1000)]
    keys = [f"customer-{i % 97}" for i in range(1000)]
    attributes = [{"region": "eu", "trace": f"{i:08x}"} for i in range(1000)]
    times = list(range(NOW, NOW + 1000))
    messages = [Message(p, k, a, t) for p, k, a, t in zip(payloads, keys, attributes, times, strict=True)]
    encode = RecordBatch.encode
    per_message("encode 1,000 × 100 B, one publish time", lambda: encode(payloads, publish_time=NOW), 1000)
    per_message("  with own publish times", lambda: encode(payloads, publish_time=times), 1000)
    per_message("  with keys", lambda: encode(payloads, publish_time=NOW, keys=keys), 1000)
    per_message(
        "  with keys and two attributes",
        lambda: encode(payloads, publish_time=NOW, keys=keys, attributes=attributes),
        1000,
    )
    per_message("  with all of that, from Message objects", lambda: RecordBatch.from_messages(messages), 1000)
    per_message(
        "  with the name of the producer", lambda: encode(payloads, publish_time=NOW, producer="web-1"), 1000
    )
    per_message("  LZ4", lambda: encode(payloads, publish_time=NOW, codec=Compression.LZ4), 1000)
    per_message("  ZSTD", lambda: encode(payloads, publish_time=NOW, codec=Compression.ZSTD), 1000)
    per_message("encode a batch of one", lambda: encode([PAYLOAD], publish_time=NOW), 1)


def decoding_to_arrow(count: int) -> None:
    payloads, times = [PAYLOAD] * count, list(range(count))
    batch = RecordBatch.encode(payloads, publish_time=times).assigned(topic_id=1, epoch=1, base_offset=0)
    checked = fresh(batch).verify()
    constant = fresh(RecordBatch.encode(payloads, publish_time=NOW)).verify()
    with_offsets = ("offset", *STORED_COLUMNS)
    line(f"to Arrow, {count:,} messages", f"{seconds(checked.to_arrow) * 1e6:.1f} µs")
    line("  one publish time for all", f"{seconds(constant.to_arrow) * 1e6:.1f} µs")
    line("  with offsets", f"{seconds(lambda: checked.to_arrow(with_offsets)) * 1e6:.1f} µs")
    line("  from bytes, structure checked", f"{seconds(lambda: fresh(batch).to_arrow()) * 1e6:.1f} µs")


def decoding_to_messages() -> None:
    payloads = [bytes(PAYLOAD) for _ in range(1000)]
    keys = [f"customer-{i % 97}" for i in range(1000)]
    attributes = [{"region": "eu", "trace": f"{i:08x}"} for i in range(1000)]
    plain = RecordBatch.encode(payloads, publish_time=NOW).assigned(topic_id=1, epoch=1, base_offset=0)
    full = RecordBatch.encode(payloads, publish_time=NOW, keys=keys, attributes=attributes)
    one = RecordBatch.encode([PAYLOAD], publish_time=NOW)
    per_message("to payloads, from bytes", lambda: fresh(plain).payloads(), 1000)
    per_message("to messages, from bytes", lambda: list(fresh(plain)), 1000)
    per_message("  with keys and two attributes", lambda: list(fresh(full)), 1000)
    per_message("  a batch of one", lambda: list(fresh(one)), 1)


def verifying(count: int) -> None:
    batch = RecordBatch.encode([PAYLOAD] * count, publish_time=NOW)
    length = batch.header.length
    whole, checksum = seconds(lambda: fresh(batch).verify()), seconds(lambda: fresh(batch).verify_crc())
    line(f"verify {count:,} × 100 B", f"{length / whole / 1e9:.2f} GB/s, {whole * 1e6:.1f} µs")
    line("  checksum alone", f"{length / checksum / 1e9:.2f} GB/s, {checksum * 1e6:.1f} µs")


def placing() -> None:
    batch = RecordBatch.encode([PAYLOAD] * 1000, publish_time=NOW)
    assign = seconds(lambda: batch.assigned(topic_id=1, epoch=1, base_offset=0).buffers)
    line("assign", f"{assign * 1e6:.1f} µs")
    placed = batch.assigned(topic_id=1, epoch=1, base_offset=0)
    cut = seconds(lambda: fresh(placed).slice(100, 900).data)
    line("slice 800 of 1,000 and encode again", f"{cut * 1e6:.1f} µs")
    third = seconds(lambda: fresh(placed).select(range(0, 1000, 3)))
    line("select every third of 1,000", f"{third * 1e6:.1f} µs")


def sizes() -> None:
    def over(batch: RecordBatch, payload: int) -> str:
        return f"{(batch.header.length - payload) / len(batch):.2f} B/message"

    one = RecordBatch.encode([PAYLOAD], publish_time=NOW)
    keyed = RecordBatch.encode([PAYLOAD], publish_time=NOW, keys=["customer-42"])
    many = RecordBatch.encode([PAYLOAD] * 1000, publish_time=NOW, schema_id=7, schema_version=1)
    timed = RecordBatch.encode([PAYLOAD] * 1000, publish_time=list(range(1000)))
    line("over the payload: a batch of one", over(one, 100))
    line("  with a key of 11 characters", over(keyed, 100))
    line("  1,000 messages, one publish time, one schema", over(many, 100_000))
    line("  1,000 messages, own publish times", over(timed, 100_000))


def main() -> None:
    encoding()
    for count in (1_000, 10_000, 100_000):
        decoding_to_arrow(count)
    decoding_to_messages()
    for count in (1, 1_000, 100_000):
        verifying(count)
    placing()
    sizes()


if __name__ == "__main__":
    main()
