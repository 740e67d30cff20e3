"""What Sava consists of, as CycloneDX 1.6 in JSON, on standard output: ``make sbom``.

It is read from the locks, so it says what ``make setup`` and an installation by the locks bring, with the
hashes that pip checks. Scopes: ``required`` is what a broker, a client or a command runs with; ``optional``
is Spark; ``excluded`` is what only tests use. The same locks give the same text.

This is no use of the package ``cyclonedx-bom``: it would bring twenty packages into what it is to list.
"""

from __future__ import annotations

import json
import sys
import tomllib
from contextlib import suppress
from importlib import metadata
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock import LOCKS, ROOT, Pin, locked

SCOPES: Final = {"run": "required", "spark": "optional", "dev": "excluded", "build": "required"}
"""The build's setuptools stays: grpcio-tools runs with it."""


def bill() -> dict[str, Any]:
    """The document."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    components, known = [], {}
    for lock, scope in SCOPES.items():
        for pin, digests in locked((LOCKS / f"{lock}.lock").read_text()).items():
            components.append(_component(pin, digests, scope))
            known[pin.name] = _purl(pin)
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    direct = _references(project["dependencies"], known)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "purl": own,
                "licenses": [{"expression": project["license"]}],
            }
        },
        "components": sorted(components, key=lambda each: str(each["name"])),
        "dependencies": [
            {"ref": own, "dependsOn": direct},
            *(
                {"ref": purl, "dependsOn": _references(_needs(name), known)}
                for name, purl in sorted(known.items())
            ),
        ],
    }


def _purl(pin: Pin) -> str:
    return f"pkg:pypi/{pin.name}@{pin.version}"


def _component(pin: Pin, digests: list[str], scope: str) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": _purl(pin),
        "name": pin.name,
        "version": pin.version,
        "purl": _purl(pin),
        "scope": scope,
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in digests],
    }
    with suppress(metadata.PackageNotFoundError):  # what another Python needs is locked, too
        if licence := metadata.metadata(pin.name).json.get("license_expression"):
            component["licenses"] = [{"expression": licence}]
    return component


def _needs(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def _references(requirements: list[str], known: dict[str, str]) -> list[str]:
    """Those that are needed here, without extras."""
    needed = [Requirement(each) for each in requirements]
    names = {
        canonicalize_name(each.name)
        for each in needed
        if each.marker is None or each.marker.evaluate({"extra": ""})
    }
    return sorted(known[name] for name in names if name in known)


if __name__ == "__main__":
    json.dump(bill(), sys.stdout, indent=2)
    sys.stdout.write("\n")
