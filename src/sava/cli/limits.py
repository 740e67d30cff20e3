"""The limits of a namespace or a topic: their options, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from sava.cli.output import as_dict, print_table
from sava.proto import topics_admin_pb2 as pb

FIELDS: Final = tuple(field.name for field in pb.Policy.DESCRIPTOR.fields)

MaxProducers = Annotated[
    int | None, typer.Option("--max-producers-per-topic", min=0, metavar="N", help="Producers of one topic.")
]
MaxSubscriptions = Annotated[
    int | None,
    typer.Option("--max-subscriptions-per-topic", min=0, metavar="N", help="Subscriptions of one topic."),
]
MaxConsumers = Annotated[
    int | None,
    typer.Option(
        "--max-consumers-per-topic",
        min=0,
        metavar="N",
        help="Consumers of one topic, over its subscriptions.",
    ),
]
MaxSubscriptionConsumers = Annotated[
    int | None,
    typer.Option(
        "--max-consumers-per-subscription", min=0, metavar="N", help="Consumers of one subscription."
    ),
]
MaxPublishRate = Annotated[
    int | None,
    typer.Option("--max-publish-rate", min=0, metavar="N", help="Messages a second into one topic."),
]
MaxDispatchRate = Annotated[
    int | None,
    typer.Option(
        "--max-subscription-dispatch-rate",
        min=0,
        metavar="N",
        help="Messages a second out of one subscription.",
    ),
]
MaxMessageSize = Annotated[
    int | None, typer.Option("--max-message-size", min=0, metavar="BYTES", help="The largest payload.")
]
RetentionTime = Annotated[
    int | None,
    typer.Option("--retention-time-minutes", min=0, metavar="N", help="Messages older than this may go."),
]
RetentionSize = Annotated[
    int | None,
    typer.Option(
        "--retention-size-mb", min=0, metavar="N", help="The oldest messages beyond this size may go."
    ),
]
Clear = Annotated[
    list[str] | None,
    typer.Option(
        "--clear",
        metavar="FIELD",
        help="Unset a limit so that it is inherited; may be repeated.",
    ),
]


def change(options: Mapping[str, Any]) -> tuple[pb.Policy, list[str]]:
    """What a set-policy request carries, from the options of the command: the limits that were given, and the
    names of those to clear."""
    given = {name: options[name] for name in FIELDS if options[name] is not None}
    cleared = [name.removeprefix("--").replace("-", "_") for name in options["clear"] or ()]
    for name in cleared:
        if name not in FIELDS:
            raise typer.BadParameter(f"{name!r} is no limit; those are {', '.join(FIELDS)}")
        if name in given:
            raise typer.BadParameter(f"{name} is both set and cleared")
    if not given and not cleared:
        raise typer.BadParameter("give a limit to set, or --clear FIELD")
    return pb.Policy(**given), cleared


def show(own: pb.Policy, effective: pb.Policy) -> None:
    """A table of all limits: what is said here, and what holds."""
    said, holds = as_dict(own), as_dict(effective)
    print_table(
        ("LIMIT", "SET", "EFFECTIVE"), [(name, _shown(said[name]), _shown(holds[name])) for name in FIELDS]
    )


def _shown(limit: int | None) -> object:
    return "-" if limit is None else limit or "none"
