"""One line of what Spark raises, and it is the one that tells why."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from sava.pipeline.launch import MAX_ERROR, brief

# As Spark 4.3 has raised them, but for where files are and how long traces and plans.
BEGIN = (
    "[STREAM_FAILED] Query [id = 60f07561-e201-47c6-b404-2adfe7e0d7ee, "
    "runId = fcdb38f2-c8b0-4049-bf03-c017c7286119] terminated with exception: "
)
END = """
=== Streaming Query ===
Identifier: copy [id = 60f07561-e201-47c6-b404-2adfe7e0d7ee, runId = fcdb38f2-c8b0-4049-bf03-c017c7286119]
Current Committed Offsets: {}
Current Available Offsets: {org.apache.spark.sql.execution.datasources.v2.python.\
PythonMicroBatchStreamWithTriggerAvailableNow@389ae3e5: {"/default/orders": {"0": 2}}}

Current State: ACTIVE
Thread State: RUNNABLE

Logical Plan:
WriteToMicroBatchDataSource sava
+- ~Project [boom(payload#5)#12 AS payload#13]
   +- ~StreamingDataSourceV2ScanRelation[topic#0, partition#1, offset#2L, payload#5] sava
"""
ROW = """\
[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most recent call last):
  File "functions/shop.py", line 38, in boom
    def boom(x): raise RuntimeError("boom in the row")
                 ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
RuntimeError: boom in the row
 SQLSTATE: 38000 SQLSTATE: XXKST"""
BARE = """\
[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most recent call last):
  File "functions/shop.py", line 46, in bare
    def bare(x): raise AssertionError
                 ^^^^^^^^^^^^^^^^^^^^
AssertionError
 SQLSTATE: 38000 SQLSTATE: XXKST"""
LINES = """\
[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most recent call last):
  File "functions/shop.py", line 40, in multi
    def multi(x): raise ValueError("first line:\\nfield: second line\\n  third")
                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
ValueError: first line:
field: second line
  third
 SQLSTATE: 38000 SQLSTATE: XXKST"""
MISSING_TOPIC = """\
[PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR] Failed when Python streaming data source perform initialOffset: \
Traceback (most recent call last):
  File "pyspark/sql/streaming/python_streaming_source_runner.py", line 267, in main
  File "sava/pipeline/source/stream.py", line 54, in initialOffset
    return to_positions(self._query.beginning())
                        ^^^^^^^^^^^
  File "sava/pipeline/source/topics.py", line 111, in _named
    raise SourceRefused(f"there is no topic {topic}: create it, or name another one") from None
sava.pipeline.errors.SourceRefused: there is no topic /default/none: create it, or name another one
 SQLSTATE: 38000 SQLSTATE: XXKST"""
REFUSED = """\
[PYTHON_STREAMING_DATA_SOURCE_RUNTIME_ERROR] Failed when Python streaming data source perform commit: \
Traceback (most recent call last):
  File "sava/pipeline/sink/writers.py", line 210, in commit
    self._commit(self._writer(query), run, query, batchId, parts)
  File "sava/pipeline/sink/writers.py", line 142, in _commit
    raise WriteRefused(f"batch {batch} of writer {writer} is not published: {error}") from None
sava.pipeline.errors.WriteRefused: batch 0 of writer w1 is not published: taken for a repeated one, it \
would be lost. If the query was begun anew, choose another writer id, or forget this one with \
`sava writers forget w1`
 SQLSTATE: 38000 SQLSTATE: XXKST"""
CAST = """\
[CAST_INVALID_INPUT] The value 'x1' of the type "STRING" cannot be cast to "INT". SQLSTATE: 22018
== DataFrame ==
"cast" was called from
functions/shop.py:49
 SQLSTATE: XXKST"""
CHAINED = """\
Traceback (most recent call last):
  File "functions/shop.py", line 2, in f
KeyError: 'total'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "functions/shop.py", line 4, in f
shop.Missing: no total in the order
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (ROW, "RuntimeError: boom in the row"),
        (BARE, "AssertionError"),
        (LINES, "ValueError: first line:"),
        (
            MISSING_TOPIC,
            "sava.pipeline.errors.SourceRefused: "
            "there is no topic /default/none: create it, or name another one",
        ),
        (
            REFUSED,
            "sava.pipeline.errors.WriteRefused: batch 0 of writer w1 is not published: taken for a "
            "repeated one, it would be lost. If the query was begun anew, choose another writer id, or "
            "forget this one with `sava writers forget w1`",
        ),
        (
            CAST,
            '[CAST_INVALID_INPUT] The value \'x1\' of the type "STRING" cannot be cast to "INT". '
            "SQLSTATE: 22018",
        ),
        (CHAINED, "shop.Missing: no total in the order"),
    ],
    ids=["row", "bare", "lines", "missing topic", "refused", "cast", "chained"],
)
def test_the_cause_of_a_failed_query(text: str, line: str) -> None:
    assert brief(PySparkException(BEGIN + text + END)) == line


def test_what_java_says() -> None:
    java = (
        "An error occurred while calling o193.start.\n"
        ": org.apache.spark.SparkClassNotFoundException: [DATA_SOURCE_NOT_FOUND] nonsense. SQLSTATE: 42K02\n"
        "\tat org.apache.spark.sql.errors.QueryExecutionErrors$.dataSourceNotFoundError"
    )
    assert brief(Py4JError(java)) == (
        "org.apache.spark.SparkClassNotFoundException: [DATA_SOURCE_NOT_FOUND] nonsense. SQLSTATE: 42K02"
    )
    both = (
        f"{CHAINED}\n\nJVM stacktrace:\norg.x.PythonException: Traceback (most recent call last):\nLate: no"
    )
    assert brief(PySparkException(both)) == "shop.Missing: no total in the order"


def test_what_a_function_raises_is_told_with_its_type() -> None:
    assert brief(ValueError("cannot open [/tmp/x]\nand more")) == "ValueError: cannot open [/tmp/x]"
    assert brief(KeyError("total")) == "KeyError: 'total'"
    assert brief(RuntimeError()) == "RuntimeError"


def test_a_line_has_an_end() -> None:
    assert len(brief(RuntimeError("x" * 10_000))) == MAX_ERROR
    assert len(brief(PySparkException("x" * 10_000))) == MAX_ERROR
