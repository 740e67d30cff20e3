"""``sava doctor``: what is wrong with a cluster, and what to do."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer

from sava.cli.connection import DEFAULT_ADMIN, AdminOption, run_to_end, way_to
from sava.cli.output import Format, ProgressLine, print_json, print_line
from sava.doctor.brokers import visit
from sava.doctor.observation import Access


def doctor(
    watch: Annotated[
        float,
        typer.Option(
            "--watch",
            min=0.1,
            max=600,
            metavar="SECONDS",
            help="How long to look for progress of subscriptions and moves.",
        ),
    ] = 3.0,
    min_free: Annotated[
        float,
        typer.Option("--min-free", min=0, max=100, metavar="PERCENT", help="Of a disk: what should be free."),
    ] = 15.0,
    service: Annotated[
        str | None,
        typer.Option(
            "--service",
            envvar="SAVA_SERVICE",
            metavar="URL",
            help="The client address that applications use, to check it too. Default: each broker's own.",
        ),
    ] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="json or table.")] = Format.TABLE,
    admin: AdminOption = DEFAULT_ADMIN,
) -> None:
    """Check a cluster, and how a client on this machine sees it. It looks at addresses, leader, terms,
    clocks, disks, versions, certificates, topics without an owner, journals that cannot be recovered,
    subscriptions without progress, pipelines and replication, the object store.

    Says what is wrong and what to do. Exit code 1 if something is."""
    [admin, *_], credentials = way_to(admin)
    access = Access(admin=admin, credentials=credentials, service=service or "")
    with ProgressLine() as progress:
        findings = run_to_end(visit(access, watch_s=watch, min_free=min_free / 100, tell=progress.show))
    troubles = sum(finding.level.is_trouble for finding in findings)
    if output is Format.JSON:
        print_json({"healthy": not troubles, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            print_line(f"{finding.level.upper():<8} {finding.check}: {finding.subject}: {finding.text}")
            if finding.remedy:
                print_line(f"{'':<8} → {finding.remedy}")
        counts = Counter(finding.level.value for finding in findings)
        print_line(", ".join(f"{count} {level}" for level, count in counts.items()))
    if troubles:
        raise typer.Exit(1)
