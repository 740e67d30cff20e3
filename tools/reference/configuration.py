"""docs/reference/configuration.md, from the model of the settings."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sava.config import ENVIRONMENT_PREFIX, Config
from tools.reference.pages import first_sentences, page, prose, table


class Key(NamedTuple):
    path: str
    default: str
    kind: str
    meaning: str


INTRODUCTION: Final = f"""
[Configuration](../configuration.md) says how keys belong together. An environment variable overrides each
key: `broker.ports.raft` is `{ENVIRONMENT_PREFIX}BROKER__PORTS__RAFT`, with the value in YAML.
"""


def render() -> str:
    sections = []
    for path, model, keys in sections_of(Config):
        head = f"## {path or 'At the top'}"
        about = "" if model is Config else first_sentences(model.__dict__.get("__doc__"))
        rows = [(f"`{key.path}`", key.default, key.kind, key.meaning) for key in keys]
        body = table(("key", "default", "values", "meaning"), rows)
        sections.append("\n\n".join(part for part in (head, about, body) if part))
    return page("Configuration: every key", INTRODUCTION, *sections)


def sections_of(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel], list[Key]]]:
    """Each section with its own keys, in the order of the model; sections without keys are left out."""
    meanings = docstrings(model)
    keys: list[Key] = []
    below: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        inner = _section(field.annotation)
        if inner is not None:
            below.append((f"{path}{name}", inner))
        else:
            keys.append(Key(f"{path}{name}", _default(field), _kind(field), meanings.get(name, "")))
    if keys:
        yield path.rstrip("."), model, keys
    for name, inner in below:
        yield from sections_of(inner, f"{name}.")


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The strings that stand below the fields of a class, also of those that it inherits."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if not issubclass(each, BaseModel) or each is BaseModel:
            continue
        [body] = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[field.target.id] = prose(str(below.value.value)).replace("\n\n", " ")
    return found


def _section(annotation: Any) -> type[BaseModel] | None:
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return "*none*"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{value}`" if str(value) else "*empty*"


def _kind(field: FieldInfo) -> str:
    """What a key may be, as far as its default does not show it: bounds, choices, lists."""
    return ", ".join(part for part in (_choices(field.annotation), *_bounds(field.metadata)) if part)


def _choices(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        bounds = _bounds([each for field in metadata for each in field.metadata])
        return ", ".join(part for part in (_choices(kind), *bounds) if part)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(filter(None, map(_choices, get_args(annotation))))
    return "list" if get_origin(annotation) is tuple else ""


def _bounds(metadata: list[Any]) -> Iterator[str]:
    bounds = {
        name: getattr(each, name)
        for each in metadata
        for name in ("ge", "gt", "le", "lt")
        if getattr(each, name, None) is not None
    }
    if "ge" in bounds and "le" in bounds:
        yield f"{bounds['ge']} … {bounds['le']}"
        return
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    yield from (f"{sign} {bounds[name]}" for name, sign in signs.items() if name in bounds)
