"""Names of namespaces, topics, subscriptions and producers."""

from __future__ import annotations

import pytest

from sava.topics.names import MAX_NAME_BYTES, InvalidName, TopicName, check_name

LOOK_ALIKES = ["\u0430dmin", "\u2167", "\u0661\u0662", "caf\u00e9", "e\u0301", "a\u200bb", "a\u202eb"]


@pytest.mark.parametrize(
    "name", ["a", "_a", "0", "A-b.c_d", "a" * MAX_NAME_BYTES, "orders-part-0", "a--", "a.."]
)
def test_names_are_of_ascii_letters_digits_and_three_signs(name: str) -> None:
    assert check_name(name, "topic") == name
    assert str(TopicName.parse(f"/{name}/{name}")) == f"/{name}/{name}"


@pytest.mark.parametrize(
    "name", [*LOOK_ALIKES, "", "-rf", ".", "..", ".a", "a b", "a/b", "a\n", "a\0", "a%2F", "*"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        check_name(name, "namespace")
    with pytest.raises(InvalidName):
        TopicName.parse(f"/default/{name}")


@pytest.mark.parametrize(
    "text", ["x" * 1_000_000, "/default/" + "x" * 1_000_000, "/" * 1_000_000, "\u0436" * 10_000]
)
def test_an_error_quotes_little_of_a_name(text: str) -> None:
    with pytest.raises(InvalidName) as caught:
        TopicName.parse(text)
    assert len(str(caught.value)) < 2000
