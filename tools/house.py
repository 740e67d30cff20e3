"""``python -m tools.house``: how large the house is, how many names it has, and how long its ways are.

Static figures come from the syntax trees of ``src/sava`` without generated code, and from the texts of the
documentation. ``--calls`` adds how many Python functions of Sava one append and one metadata put call; it
starts brokers for that (``tools.house_calls``).
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCE: Final = ROOT / "src" / "sava"
LARGEST_FOLDER: Final = 25

BANNED: Final = {
    "whoever": "name the actor: the producer, the leader",
    "somebody": "name the actor",
    "nobody": "no consumer, no broker",
    "anybody": "any client, a caller, another broker",
    "everybody": "all clients, every broker",
    "anew": "again",
    "is told": "learns, receives",
    "are told": "learn, receive",
    "was told": "learned, received",
    "were told": "learned, received",
    "been told": "learned, received",
    "be told": "learn, receive, differ",
    "told of": "reported, called with",
    "told about": "called with",
    "as it were": "say what it is",
    "so many": "more than N",
    "so long": "as long, for N seconds",
    "for ever": "without limit, never ends",
    "goes on": "continues",
    "go on": "continue",
    "comes about": "is made",
    "came about": "was made",
    "come about": "be made",
    "bear the": "tolerate",
    "bears": "has, tolerates, allows",
    "unborn": "not started",
    "births": "generations",
    "in vain": "without success",
    "betimes": "early",
}
"""Words of a private language, each with what to write instead."""

FACADE: Final = "the same client without async: users change an import, not their names"
REPORTED: Final = "a broker's error as its client raises it: one name for one fault"
SHARED_NAMES: Final[dict[str, tuple[frozenset[str], str]]] = {
    name: (frozenset(places), reason)
    for name, places, reason in (
        ("Client", ("client/client.py", "client/blocking.py"), FACADE),
        ("Consumer", ("client/consumer.py", "client/blocking.py"), FACADE),
        ("Producer", ("client/producer.py", "client/blocking.py"), FACADE),
        ("Reader", ("client/reader.py", "client/blocking.py"), FACADE),
        ("ConsumerReplaced", ("client/errors.py", "topics/errors.py"), REPORTED),
        ("DuplicateForgotten", ("client/errors.py", "storage/producers.py"), REPORTED),
        ("OutcomeUnknown", ("client/errors.py", "metadata/errors.py"), REPORTED),
        ("PermissionDenied", ("client/errors.py", "security/permissions.py"), REPORTED),
        ("ProducerFenced", ("client/errors.py", "topics/errors.py"), REPORTED),
        ("TopicUnknown", ("client/errors.py", "topics/errors.py"), REPORTED),
        ("Unauthenticated", ("client/errors.py", "security/permissions.py"), REPORTED),
        ("Unavailable", ("client/errors.py", "metadata/errors.py"), REPORTED),
    )
}
"""Class names that mean the same in several modules: these modules, and the reason. The name may stand
nowhere else."""

_BANNED: Final = re.compile(r"\b(" + "|".join(re.escape(word) for word in BANNED) + r")\b", re.IGNORECASE)
_WORD: Final = re.compile(r"[A-Za-z][A-Za-z'’-]*")


def _shared(name: str) -> frozenset[str]:
    return SHARED_NAMES.get(name, (frozenset(), ""))[0]


@dataclass
class House:
    """What was counted, and where."""

    modules: int = 0
    lines: int = 0
    folders: Counter[str] = field(default_factory=Counter)
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    protocols: dict[str, str] = field(default_factory=dict)
    bases: Counter[str] = field(default_factory=Counter)
    passing: list[str] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    """Constructors with more than 8 parameters."""
    methods: dict[str, set[str]] = field(default_factory=dict)
    """Names of the methods of each class, to find what implements a Protocol without naming it."""

    def several(self) -> dict[str, list[str]]:
        return {
            name: places
            for name, places in sorted(self.classes.items())
            if len({*places} - _shared(name)) + bool({*places} & _shared(name)) > 1
            and not name.startswith("_")
        }

    def lonely_protocols(self) -> dict[str, str]:
        """Protocols with at most one implementation: a class that names it as a base, or that has all of its
        methods."""
        lonely = {}
        for name, place in self.protocols.items():
            wanted = self.methods.get(name, set())
            fitting = sum(
                1
                for other, found in self.methods.items()
                if other not in self.protocols and wanted and wanted <= found
            )
            if max(fitting, self.bases[name]) <= 1:
                lonely[name] = place
        return lonely


def sources() -> Iterator[Path]:
    for path in sorted(SOURCE.rglob("*.py")):
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            yield path


def measure() -> House:
    house = House()
    for path in sources():
        text = path.read_text(encoding="utf-8")
        place = str(path.relative_to(SOURCE))
        house.modules += 1
        house.lines += text.count("\n")
        house.folders[str(path.parent.relative_to(SOURCE))] += 1
        _walk(ast.parse(text), place, house)
    return house


def _walk(tree: ast.Module, place: str, house: House) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            house.functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
        if not isinstance(node, ast.ClassDef):
            continue
        house.classes[node.name].append(place)
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
        house.methods[node.name] = {item.name for item in methods}
        bases = {_name(base) for base in node.bases}
        house.bases.update(bases)
        if any(_is_interface(base) for base in node.bases):
            house.protocols[node.name] = place
        for method in methods:
            if _passes_on(method):
                house.passing.append(f"{place}:{method.lineno} {node.name}.{method.name}")
            count = len(method.args.args) + len(method.args.kwonlyargs) - 1
            if method.name == "__init__" and count > 8:
                house.parameters[f"{place} {node.name}"] = count


def _name(base: ast.expr) -> str:
    match base:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value):
            return _name(value)
    return ""


def _is_interface(base: ast.expr) -> bool:
    """``typing.Protocol``; ``asyncio.Protocol`` is a base class with code."""
    return isinstance(base, ast.Name) and base.id == "Protocol"


def _passes_on(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """One call of another object's method with nothing but this method's own parameters."""
    if method.decorator_list or method.name.startswith("__"):
        return False
    body = [item for item in method.body if not _is_text(item)]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    value = body[0].value
    if isinstance(value, ast.Await):
        value = value.value
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    owner = value.func.value
    if not (
        isinstance(owner, ast.Attribute) and isinstance(owner.value, ast.Name) and owner.value.id == "self"
    ):
        return False
    given = [*value.args, *(keyword.value for keyword in value.keywords)]
    own = {argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)}
    return all(isinstance(item, ast.Name) and item.id in own for item in given)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


# -- words ---------------------------------------------------------------------------------------------------


def pages() -> Iterator[Path]:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        if (ROOT / name).exists():
            yield ROOT / name
    yield from sorted((ROOT / "docs").rglob("*.md"))


def banned() -> Iterator[tuple[str, int, str]]:
    """Page or module, line and word, of every banned word in documentation, docstrings, help, messages and
    comments."""
    for page in pages():
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            for found in _BANNED.finditer(line):
                yield str(page.relative_to(ROOT)), number, found[0]
    for path in sources():
        place, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for found in _BANNED.finditer(node.value):
                    above = node.value[: found.start()].count("\n")
                    yield place, node.lineno + above, found[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                for found in _BANNED.finditer(token.string):
                    yield place, token.start[0], found[0]


def words() -> int:
    return sum(len(_WORD.findall(page.read_text(encoding="utf-8"))) for page in pages())


# -- the table -----------------------------------------------------------------------------------------------


def figures(house: House) -> dict[str, tuple[float, float | None]]:
    """Each figure and its goal."""
    mean = sum(house.functions) / max(1, len(house.functions))
    return {
        "modules": (house.modules, 320),
        "lines": (house.lines, 74_000),
        "classes": (sum(map(len, house.classes.values())), 900),
        "Protocols with at most one implementation": (len(house.lonely_protocols()), 8),
        "methods that only pass on": (len(house.passing), 40),
        "class names with several meanings": (len(house.several()), 0),
        "files in the largest flat folder": (max(house.folders.values()), LARGEST_FOLDER),
        "constructors with more than 8 parameters": (len(house.parameters), 0),
        "mean function, lines": (round(mean, 1), None),
        "banned words": (sum(1 for _ in banned()), 0),
        "words in docs and README": (words(), 50_000),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--calls", action="store_true", help="count the Python calls of an append and of a put"
    )
    parser.add_argument("--list", action="store_true", help="name every place behind the figures")
    parser.add_argument(
        "--words", action="store_true", help="only banned words; exits with 1 if there are any"
    )
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    arguments = parser.parse_args()
    if arguments.words:
        found = list(banned())
        for place, line, word in found:
            print(f"{place}:{line}: {word!r}: write {BANNED[word.lower()]!r}")
        raise SystemExit(1 if found else 0)
    house = measure()
    table = figures(house)
    if arguments.calls:
        from tools.house_calls import count

        table |= asyncio.run(count())
    if arguments.output == "json":
        print(json.dumps({name: value for name, (value, _) in table.items()}))
        return
    for name, (value, goal) in table.items():
        verdict = "" if goal is None else f"  goal {goal:,g}{'' if value <= goal else '  MISSED'}"
        print(f"{name:<48}{value:>10,g}{verdict}")
    if arguments.list:
        _list(house)


def _list(house: House) -> None:
    for name, places in house.several().items():
        print(f"several meanings: {name}: {', '.join(places)}")
    for name, place in house.lonely_protocols().items():
        print(f"Protocol: {name} in {place}")
    for place in house.passing:
        print(f"passes on: {place}")
    for place, count in house.parameters.items():
        print(f"{count} parameters: {place}")
    for folder, count in house.folders.most_common(8):
        print(f"{count} files: {folder}")


if __name__ == "__main__":
    main()
