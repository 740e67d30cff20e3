"""Settings of custom pipelines are checked before anything is stored, and errors say what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pyspark.sql.types import StructType

from sava.cli.pipelines import FileInvalid, read_specs
from sava.client.errors import Unavailable
from sava.pipeline.runner.allowing import AllowList
from sava.pipeline.runner.kinds import Custom, CustomSettings, SettingsInvalid
from sava.pipeline.sink.writers import check_columns
from sava.pipeline.source.columns import COLUMNS

SOURCE = {"topic": "/default/orders"}
GOOD: dict[str, Any] = {"from": SOURCE, "to": {"topic": "/default/copy"}}


def test_what_is_given_is_taken_as_text() -> None:
    settings = CustomSettings.parse(
        {
            "from": {"topics": "/default/a,/default/b", "maxMessagesPerTrigger": 100, "decode": True},
            "function": "shop.orders:upper",
            "to": {"format": "parquet", "path": "/tmp/x"},
            "trigger": "500 ms",
            "outputMode": "append",
        }
    )
    assert settings.source["maxMessagesPerTrigger"] == "100"
    assert settings.source["decode"] == "true"
    assert (settings.format, settings.sink) == ("parquet", {"path": "/tmp/x"})
    assert CustomSettings.parse(GOOD).format == "sava"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"form": {}}, "setting form: there is no such one"),
        ({"from": None}, "setting from: options by name are needed"),
        ({"to": {}}, "setting to: options by name are needed"),
        ({"from": {"topic": "orders"}}, "/namespace/topic"),
        ({"from": {"topic": "/default/a", "maxMessages": 1}}, "did you mean maxMessagesPerTrigger"),
        ({"from": {"topic": ["/default/a"]}}, "options are text or numbers"),
        ({"to": {"topic": "/default/a", "startingOffsets": "earliest"}}, "it is for reading"),
        ({"function": "no_colon"}, "written module:function"),
        ({"function": 7}, "written module:function"),
        ({"trigger": "often"}, "a time such as"),
        ({"outputMode": "all"}, "append, update, complete"),
    ],
)
def test_what_cannot_be_used_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsInvalid, match=text):
        CustomSettings.parse({**GOOD, **changes})


def test_nothing_is_started_before_the_brokers_are_known() -> None:
    def no_spark() -> Any:
        raise AssertionError("not to be asked for")

    with pytest.raises(Unavailable):
        Custom(no_spark, lambda: "", AllowList(checkpoints=Path("/checkpoints"))).start("copy", GOOD, "")


@pytest.mark.parametrize(
    ("sink", "is_copied"), [({"topic": "/default/copy"}, True), ({"format": "parquet"}, False)]
)
def test_a_copy_has_only_columns_that_can_be_written_to_a_topic(
    sink: dict[str, str], is_copied: bool
) -> None:
    """Whoever wanted a copy got a pipeline that failed for ever: a message's offset is read, and cannot be
    written."""
    rows = mock.MagicMock()
    spark = mock.MagicMock()
    spark.readStream.format().options().load.return_value = rows
    settings = CustomSettings.parse({"from": SOURCE, "to": sink})
    allowed = AllowList(checkpoints=Path("/checkpoints"))
    Custom(lambda: spark, lambda: "", allowed)._prepare(spark, "copy", settings, SOURCE)
    assert rows.select.called == is_copied
    if is_copied:
        schema = StructType([field for field in COLUMNS if field.name in rows.select.call_args.args])
        check_columns(schema, "/default/copy")
        assert len(schema) == len(rows.select.call_args.args)


# -- files -----------------------------------------------------------------------------------------


def test_a_file_holds_pipelines(tmp_path: Path) -> None:
    file = tmp_path / "pipelines.yaml"
    file.write_text(
        "name: one\nfrom: {topic: /default/a}\nto: {topic: /default/b}\n---\n"
        "name: two\nkind: custom\nfrom: {topic: /default/b}\nto: {format: console}\n---\n"
    )
    one, two = read_specs(file)
    assert (one.name, one.kind, two.name) == ("one", "custom", "two")
    assert one.settings == '{"from": {"topic": "/default/a"}, "to": {"topic": "/default/b"}}'


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "holds no pipeline"),
        ("name: [", "is not YAML"),
        ("- a\n- b\n", "document 1: a pipeline is written as settings by name"),
        ("from: {topic: /default/a}\n", "has no name"),
        ("name: a\nkind: magic\n", "there is no kind 'magic'"),
        ("name: a\nkind: replicate\n", "sava replication set"),
        ("name: a\nfrom: {topic: /default/a}\n", "pipeline a: setting to"),
        ("name: a\nfrom: {topic: /d/a}\nto: {topic: /d/b}\n---\n" * 2, "two pipelines of the name a"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, content: str, text: str) -> None:
    file = tmp_path / "pipelines.yaml"
    file.write_text(content)
    with pytest.raises((FileInvalid, SettingsInvalid), match=text):
        read_specs(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileInvalid, match="cannot be read"):
        read_specs(tmp_path / "missing.yaml")
