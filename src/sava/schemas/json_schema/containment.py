"""Is every value that one schema allows also allowed by another?

Data written under ``writer`` can be read under ``reader`` exactly if so. The question has no complete answer
that is quick, so it is answered on the safe side: 'contained' is only said when it follows from the
structure; what is not understood must be unchanged.

The writer is expanded into alternatives (from ``anyOf``, ``oneOf``), each a list of simple schemas that hold
together (from ``$ref``, ``allOf``); see ``shape``. The reader must hold each alternative: all parts of its
``allOf``, one branch of its ``anyOf``, one branch of its ``oneOf`` that excludes the others. A simple schema
of the reader is compared keyword by keyword with what the alternative as a whole promises.

Two rules are about evolution rather than sets:

* Where ``additionalProperties`` is not given, a writer is taken not to write properties that it does not
  declare. By the letter it may write anything, and then no property could ever be added.
* A property that the writer requires must be declared by a reader that declares any: to drop a required
  property, or to add one that old readers do not know, breaks a promise even if the value is valid.
"""

from __future__ import annotations

from typing import Any

from sava.schemas.errors import shortened
from sava.schemas.fixpoint import Fixpoint
from sava.schemas.json_schema import shape
from sava.schemas.json_schema.document import Document, Subschema
from sava.schemas.json_schema.evaluation import Evaluator
from sava.schemas.json_schema.keywords import find_keyword_problems
from sava.schemas.json_schema.shape import Alternative


def find_problems(reader: Document, writer: Document) -> list[str]:
    """Why a value of ``writer`` may not be a value of ``reader``, in words; empty when all are."""
    comparison = Containment(reader, writer)
    return comparison.fixpoint.solve(lambda: comparison.contains(reader.root, (writer.root,), "$"))


class Containment:
    def __init__(self, reader: Document, writer: Document) -> None:
        self.fixpoint = Fixpoint()
        self.reader, self.writer = reader, writer
        self._reader_values, self._writer_values = Evaluator(reader), Evaluator(writer)
        self._expanded: dict[tuple[int, ...], list[Alternative]] = {}
        """Pairs are known by identity, so an alternative must be the same object whenever it is met."""

    def contains(self, reader: Subschema, written: tuple[Subschema, ...], path: str) -> list[str]:
        """``written``: schemas of the writer that hold together."""
        key = (id(reader), *map(id, written))
        return self.fixpoint.pair(key, lambda: self._contains(reader, written, path))

    def _contains(self, reader: Subschema, written: tuple[Subschema, ...], path: str) -> list[str]:
        if reader is True or reader == {}:
            return []
        if len(written) == 1 and shape.is_same(self.reader, reader, self.writer, written[0]):
            return []
        problems = []
        for alternative in self._alternatives(written):
            self.fixpoint.step()
            problems += self._holds_whole(reader, alternative, path)
        return problems

    def _alternatives(self, written: tuple[Subschema, ...]) -> list[Alternative]:
        key = tuple(map(id, written))
        if key not in self._expanded:
            self._expanded[key] = shape.expand(self.writer, written)
        return self._expanded[key]

    def _holds_whole(self, reader: Subschema, alternative: Alternative, path: str) -> list[str]:
        """With the rules that need to see the whole of the reader, not one part of its ``allOf``."""
        parts = shape.parts(self.reader, reader)
        problems = [
            f"{path}.{name}: required by the writer, and not declared by the reader"
            for name in shape.undeclared(parts, alternative)
        ]
        if shape.unknown_keywords(parts) != shape.unknown_keywords(alternative):
            problems.append(f"{path}: keywords of unknown meaning have changed")
        return problems + self._holds(reader, alternative, path)

    def _holds(self, reader: Subschema, alternative: Alternative, path: str) -> list[str]:
        if reader is True:
            return []
        if reader is False:
            return [f"{path}: the reader allows no value here"]
        values = shape.finite_values(alternative)
        if values is not None:
            return self._holds_values(reader, alternative, values, path)
        problems: list[str] = []
        if "$ref" in reader:
            target = self.reader.resolve(reader["$ref"])
            problems += self._holds_again(target, alternative, path)
            if self.reader.ref_stands_alone:
                return problems
        for part in reader.get("allOf", ()):
            problems += self._holds_again(part, alternative, path)
        if "anyOf" in reader and all(
            self._holds_again(branch, alternative, path) for branch in reader["anyOf"]
        ):
            problems.append(f"{path}: no branch of the reader's anyOf holds all of the writer's values")
        if "oneOf" in reader and not self._holds_one(reader["oneOf"], alternative, path):
            problems.append(f"{path}: no branch of the reader's oneOf holds all of the writer's values alone")
        return problems + find_keyword_problems(self, reader, alternative, path)

    def _holds_again(self, reader: Subschema, alternative: Alternative, path: str) -> list[str]:
        """Through the memory of pairs: a reference may lead back to where it came from."""
        key = (id(reader), "holds", id(alternative))
        return self.fixpoint.pair(key, lambda: self._holds(reader, alternative, path))

    def _holds_one(self, branches: list[Subschema], alternative: Alternative, path: str) -> bool:
        for index, branch in enumerate(branches):
            others = branches[:index] + branches[index + 1 :]
            if not self._holds_again(branch, alternative, path) and all(
                shape.is_disjoint(self.reader, branch, other) for other in others
            ):
                return True
        return False

    def _holds_values(
        self, reader: dict[str, Any], alternative: Alternative, values: list[Any], path: str
    ) -> list[str]:
        """A list of values needs no theory: each one is tried."""
        problems = []
        for value in values:
            self.fixpoint.step()
            if all(self._writer_values.is_valid(part, value) for part in alternative) and not (
                self._reader_values.is_valid(reader, value)
            ):
                problems.append(f"{path}: the reader does not allow {shortened(repr(value), 60)}")
        return problems
