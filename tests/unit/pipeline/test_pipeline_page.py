"""docs/pipeline.md names every option with its default, every column with its type, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from sava.pipeline.options import DEFAULT_SERVICE, NAMES, SinkOptions, SourceOptions
from sava.pipeline.source.columns import COLUMNS

PAGE = Path(__file__).parents[3] / "docs" / "pipeline.md"


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    return [re.split(r" ?\| ?", row) for row in table[1:]]


def test_the_page_lists_every_option_with_its_default() -> None:
    topic = {"topic": "/default/orders"}
    stream, batch = (SourceOptions.parse(topic, stream=stream) for stream in (True, False))
    sink = SinkOptions.parse(topic, stream=True)
    defaults: dict[str, object] = {
        "service": DEFAULT_SERVICE,
        "timeout": f"{batch.access.timeout_s:g}",
        "startingOffsets": f"{stream.start}` (stream), `{batch.start}` (batch)",
        "endingOffsets": batch.end,
        "failOnDataLoss": str(batch.fail_on_data_loss).lower(),
        "decode": str(batch.decode).lower(),
        "filterPushdown": str(batch.filter_pushdown).lower(),
        "delivery": "exactlyOnce" if sink.exactly_once else "atLeastOnce",
        "compression": sink.compression,
    }
    described = {name.strip("`"): default for name, default, *_ in rows("Options")}
    assert described.keys() == set(NAMES)
    told = {name: default for name, default in described.items() if default.startswith("`")}
    assert {name: default.removesuffix(" (batch)").strip("`") for name, default in told.items()} == {
        name: str(default).removesuffix("` (batch)") for name, default in defaults.items()
    }


def test_the_page_lists_every_column_with_its_type() -> None:
    described: dict[str, str] = {}
    for row in rows("Read"):
        names, kinds = (cell.replace("`", "").replace("&lt;", "<").replace("&gt;", ">") for cell in row[:2])
        described |= zip(names.split(", "), kinds.split(", "), strict=False)
    assert described.pop("value") == "by the schema"
    assert described == {field.name: field.dataType.simpleString() for field in COLUMNS}
