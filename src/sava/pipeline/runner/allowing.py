"""AllowList: what the operator of a runner lets pipelines do.

A pipeline that is stored is a request of its creator. The runner acts with the rights of its own user on this
machine, and with the object store's credentials that it has, so its operator says on the command line what
pipelines may name. The defaults are what copies between topics of the runner's own cluster need:

    functions      none                                --allow-function
    formats        sava alone                          --allow-format
    paths          none                                --allow-path
    sink options   those of FORMAT_OPTIONS             --allow-option
    services       the runner's own cluster            --allow-service
    checkpoints    below --checkpoints, in a directory of the pipeline's own

Certificates, tokens and the writer's id are the runner's own and no flag opens them. A pipeline that is
refused is ``failed``: the runner holds its claim and tries nothing until the pipeline changes.

**Paths** are compared after they are brought to one form, and Spark gets that form, so that both mean the
same file. A path without a scheme is one on this machine (``file:``), whatever Spark's default file system
is; its ``..`` and symbolic links are resolved here. In other schemes nothing resolves ``..``, patterns and
escapes in one agreed way, so they are refused. A path is below another if it begins with that *and a
separator*: ``s3a://lake-of-others/`` is not below ``s3a://lake``.

**Functions** are compared twice. The module is imported only if its name is allowed, because an import runs
code; and what is found there must be *defined* in an allowed module, or ``shop:system`` would call what
``shop`` has merely imported from ``os``. A function that is allowed by its full name may come from anywhere:
its operator has looked at it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sava.errors import CallerError

MAX_SHOWN: Final = 120
"""Characters of a setting in an error."""
FORMAT_OPTIONS: Final = frozenset(
    name.lower()
    for name in (
        *("path", "compression", "encoding", "lineSep", "maxRecordsPerFile"),
        *("header", "sep", "delimiter", "quote", "escape", "quoteAll", "nullValue", "emptyValue"),
        *("dateFormat", "timestampFormat", "timestampNTZFormat", "ignoreNullFields"),
        *("mergeSchema", "partitionOverwriteMode", "truncate", "numRows"),
    )
)
"""Options of Spark's file formats, console and memory that change how rows are written, and not where."""
OWN_OPTIONS: Final = frozenset(
    name.lower()
    for name in (
        *("token", "tokenFile", "tlsCa", "tlsCert", "tlsKey", "checkpointLocation"),
        *("queryName", "writerId", "batchId"),
    )
)
"""Options that the runner sets itself: credentials, and the names under which writes are remembered."""
TOPICS: Final = "sava"

_FUNCTION: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*(?:\.\*|:(?:\*|[^\W\d]\w*))?")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_UNCLEAR: Final = re.compile(r"[\x00-\x1f\x7f%*?\[\]{}\\#]")
_SERVICE: Final = re.compile(r"(?:https?://)?([^\s/@,]+:\d{1,5})/?")


class AllowInvalid(CallerError):
    """An option of the runner that allows something is not written as it should be."""


class NotAllowed(CallerError):
    """A pipeline names what the operator of this runner has not allowed."""

    def __init__(self, what: str, way_out: str) -> None:
        super().__init__(f"this runner does not allow {what}; {way_out}")


def _flag(name: str, value: str) -> str:
    return f"its operator can allow it with {name} '{shown(value)}'"


def shown(text: str) -> str:
    """What a pipeline says, short enough for an error and without control characters."""
    cut = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    return "".join(each if each.isprintable() else "?" for each in cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowList:
    """``of`` makes it from what an operator writes."""

    checkpoints: Path
    functions: tuple[str, ...] = ()
    """``shop:shout``, ``shop`` or ``shop:*`` (all of this module), ``shop.*`` (of modules below it, too)."""
    formats: frozenset[str] = frozenset()
    paths: tuple[str, ...] = ()
    """In the form of ``one_form``."""
    options: frozenset[str] = frozenset()
    """In lower case, as Spark compares them."""
    services: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        checkpoints: Path,
        *,
        functions: Iterable[str] = (),
        formats: Iterable[str] = (),
        paths: Iterable[str] = (),
        options: Iterable[str] = (),
        services: Iterable[str] = (),
    ) -> AllowList:
        """Raises AllowInvalid."""
        functions, formats, options = tuple(functions), frozenset(formats), frozenset(options)
        for each in functions:
            if not _FUNCTION.fullmatch(each):
                raise AllowInvalid(
                    f"--allow-function {shown(each)}: written MODULE:FUNCTION, MODULE:* or PACKAGE.*"
                )
        for each in formats:
            if not each or each.lower() == TOPICS:
                raise AllowInvalid(
                    f"--allow-format {shown(each)}: the name of a format, such as parquet; topics need none"
                )
        if own := sorted(each for each in options if each.lower() in OWN_OPTIONS):
            raise AllowInvalid(f"--allow-option {shown(own[0])}: the runner sets this one itself")
        try:
            allowed = tuple(one_form(each) for each in paths)
        except NotAllowed as error:
            raise AllowInvalid(f"--allow-path: {error}") from None
        return cls(
            checkpoints=checkpoints,
            functions=functions,
            formats=formats,
            paths=allowed,
            options=frozenset(each.lower() for each in options),
            services=frozenset(target for each in services for target in targets(each)),
        )

    # -- functions -----------------------------------------------------------------------------

    def check_function(self, function: str) -> None:
        """``module:function``, before its module is imported. Raises NotAllowed."""
        module, _, name = function.partition(":")
        if function not in self.functions and not self._allows_module(module):
            raise NotAllowed(f"function {shown(function)}", _flag("--allow-function", f"{module}:{name}"))

    def check_origin(self, function: str, module: object) -> None:
        """``module``: where what was found under the name is defined. Raises NotAllowed."""
        if function in self.functions or (isinstance(module, str) and self._allows_module(module)):
            return
        where = shown(module) if isinstance(module, str) else "no module"
        raise NotAllowed(
            f"function {shown(function)}, which comes from {where}", _flag("--allow-function", function)
        )

    def _allows_module(self, module: str) -> bool:
        for allowed in self.functions:
            if allowed in (module, f"{module}:*"):
                return True
            if allowed.endswith(".*") and f"{module}.".startswith(allowed.removesuffix("*")):
                return True
        return False

    # -- where rows come from and go -----------------------------------------------------------

    def check_topics(self, side: str, options: Mapping[str, str]) -> bool:
        """Options of ``format("sava")``. Whether they name another cluster than the runner's own, where the
        runner's credentials have no business. Raises NotAllowed."""
        self._refuse_own(side, options)
        service = next((value for name, value in options.items() if name.lower() == "service"), None)
        if service is None:
            return False
        for target in targets(service):
            if target not in self.services:
                raise NotAllowed(f"service {shown(target)} in {side}", _flag("--allow-service", target))
        return True

    def checked_sink(self, form: str, options: Mapping[str, str]) -> dict[str, str]:
        """Options for a sink that is no topic; its path in one form. Raises NotAllowed."""
        if form not in self.formats:
            raise NotAllowed(f"format {shown(form)}", _flag("--allow-format", form))
        self._refuse_own("to", options)
        checked = {}
        for name, value in options.items():
            if name.lower() not in FORMAT_OPTIONS and name.lower() not in self.options:
                raise NotAllowed(f"option {shown(name)} of {form}", _flag("--allow-option", name))
            checked[name] = self._checked_path(value) if name.lower() == "path" else value
        return checked

    def _refuse_own(self, side: str, options: Mapping[str, str]) -> None:
        for name in options:
            if name.lower() in OWN_OPTIONS:
                raise NotAllowed(f"option {shown(name)} in {side}", "the runner sets it itself")

    def _checked_path(self, text: str) -> str:
        path = one_form(text)
        if not any(_is_below(path, allowed) for allowed in self.paths):
            raise NotAllowed(f"path {shown(text)}", _flag("--allow-path", path))
        return path

    # -- checkpoints ---------------------------------------------------------------------------

    def checked_checkpoint(self, name: str, text: str) -> str:
        """Of the pipeline of this name; the default if the text is empty. Another pipeline's checkpoint would
        tell it that its messages are done. Raises NotAllowed."""
        own = one_form(str(self.checkpoints / name))
        path = one_form(text) if text else own
        if not _is_below(path, own):
            raise NotAllowed(
                f"checkpoint {shown(text)}", f"write a directory below {own.removeprefix('file://')}"
            )
        return path


def targets(service: str) -> list[str]:
    """The addresses of a service as host:port, without what does not tell clusters apart. Raises
    NotAllowed."""
    found = [_SERVICE.fullmatch(each.strip()) for each in service.split(",")]
    if not all(found):
        raise NotAllowed(f"service {shown(service)}", "written host:port, with commas between")
    return [each[1].lower() for each in found if each is not None]


def one_form(text: str) -> str:
    """A path or URL as ``scheme://authority/path`` without a slash at its end. Raises NotAllowed."""
    if not text or _UNCLEAR.search(text):
        raise NotAllowed(
            f"path {shown(text)}", "it is empty, or has a control character or one of %*?[]{}\\#"
        )
    found = _SCHEME.fullmatch(text)
    if found is None or found[1].lower() == "file":
        return f"file://{_local(text, found[2] if found is not None else text)}"
    scheme, rest = found[1].lower(), found[2]
    if not rest.startswith("//"):
        raise NotAllowed(f"path {shown(text)}", f"written {scheme}://PLACE/PATH")
    authority, _, path = rest[2:].partition("/")
    parts = [part for part in path.split("/") if part]
    if not authority or any(part in (".", "..") for part in parts):
        raise NotAllowed(f"path {shown(text)}", "it names no place, or has . or .. in it")
    return "/".join([f"{scheme}://{authority.lower()}", *parts])


def _local(text: str, path: str) -> str:
    if path.startswith("//"):
        host, _, rest = path[2:].partition("/")
        if host:
            raise NotAllowed(f"path {shown(text)}", "a file is on no other machine; write file:///PATH")
        path = "/" + rest.lstrip("/")
    if not path.startswith("/"):
        raise NotAllowed(f"path {shown(text)}", "a path begins with / or a scheme, such as s3a://lake/")
    real = os.path.realpath(path)
    return real if real != "/" else ""


def _is_below(path: str, allowed: str) -> bool:
    return path == allowed or path.startswith(f"{allowed}/")
