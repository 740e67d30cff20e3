"""Files with pipelines: YAML, one document for each.

    name: upper
    from: {topic: /default/orders, startingOffsets: earliest}
    function: shop:upper
    to: {topic: /default/shouted}

What is neither name nor kind is a setting of the kind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from sava.errors import CallerError
from sava.pipeline.runner import kinds
from sava.proto import pipelines_pb2 as pb

DEFAULT_KIND = "custom"


class FileInvalid(CallerError):
    """A file that does not hold pipelines; says where and why."""


def read(file: Path) -> list[pb.PipelineSpec]:
    """All of them, checked. '-' is standard input. Raises FileInvalid, SettingsInvalid."""
    shown = "standard input" if str(file) == "-" else str(file)
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except OSError as error:
        raise FileInvalid(f"{shown} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FileInvalid(f"{shown} is not YAML: {' '.join(str(error).split())}") from None
    if not documents:
        raise FileInvalid(f"{shown} holds no pipeline")
    found = [_spec(document, f"{shown}, document {number}") for number, document in enumerate(documents, 1)]
    names = [spec.name for spec in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise FileInvalid(f"{shown} has two pipelines of the name {twice[0]}")
    return found


def _spec(document: Any, where: str) -> pb.PipelineSpec:
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise FileInvalid(f"{where}: a pipeline is written as settings by name")
    settings = dict(document)
    name, kind = settings.pop("name", None), settings.pop("kind", DEFAULT_KIND)
    if not isinstance(name, str) or not name:
        raise FileInvalid(f"{where}: the pipeline has no name")
    return spec(name, str(kind), settings)


def spec(name: str, kind: str, settings: dict[str, Any]) -> pb.PipelineSpec:
    """Raises SettingsInvalid."""
    kinds.check(name, kind, settings)
    try:
        text = json.dumps(settings)
    except TypeError as error:
        raise FileInvalid(f"pipeline {name}: {error}; write it as text") from None
    return pb.PipelineSpec(name=name, kind=kind, settings=text)
