"""``sava auth``: keys and tokens, which need no broker, and who may do what, which brokers keep.

No secret is printed unless that is what a command is for, and none is taken from the arguments without a
warning: ``ps`` shows them to every user of the machine."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from sava import config as settings
from sava.cli.connection import AdminSession, command
from sava.cli.messages import moment
from sava.cli.output import Format, Output, print_error, print_fields, print_json, print_line
from sava.errors import CallerError
from sava.proto import security_pb2 as pb
from sava.security.credentials import token_in
from sava.security.principal import Principal
from sava.security.provision import Provision, SigningAuthority
from sava.security.tokens import (
    SIGNATURES,
    KeysInvalid,
    TokenIssuer,
    TokenVerifier,
    create_token,
    new_key_pair,
    new_secret,
    read_key_file,
    signing_key,
    write_private,
)

app = typer.Typer(no_args_is_help=True)
token_app = typer.Typer(no_args_is_help=True)
roles_app = typer.Typer(no_args_is_help=True)
bindings_app = typer.Typer(no_args_is_help=True)
quotas_app = typer.Typer(no_args_is_help=True)
app.add_typer(token_app, name="token", help="Create and check tokens, without a broker.")
app.add_typer(roles_app, name="roles", help="Roles: names for sets of permissions.")
app.add_typer(bindings_app, name="bindings", help="Bindings: which principal has which role, and where.")
app.add_typer(quotas_app, name="quotas", help="Quotas: how much one principal may use.")

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION: Final = re.compile(r"(\d{1,9})([smhd])")
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")

Who = Annotated[str, typer.Argument(metavar="PRINCIPAL", help="user:NAME, or NAME, which means the same.")]
KeyFile = Annotated[
    Path,
    typer.Option(
        "--key", envvar="SAVA_TOKEN_KEY", metavar="FILE", help="The private key in PEM, or the secret."
    ),
]
Issuer = Annotated[str, typer.Option("--issuer", metavar="NAME", help="Its name, the claim iss.")]
Audience = Annotated[str, typer.Option("--audience", metavar="NAME", help="The claim aud.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", metavar="NAME", help="In this namespace alone.")
]
Topic = Annotated[
    str | None,
    typer.Option(
        "--topic", metavar="NAME", help="On this topic alone, or those that begin so: '/sales/orders-*'."
    ),
]


class MayNot(CallerError):
    """What `sava auth can-i` was asked about is not allowed."""


def duration(text: str) -> int:
    found = _DURATION.fullmatch(text)
    if found is None or not int(found[1]):
        raise typer.BadParameter(f"{text!r} is no time; write a number and s, m, h or d, such as 30d")
    return int(found[1]) * _UNITS[found[2]]


def _file_name(text: str) -> str:
    if not _FILE_NAME.fullmatch(text):
        raise typer.BadParameter(f"{text!r} becomes the name of a file: letters, digits, dots, - and _")
    return text


# -- keys and tokens -------------------------------------------------------------------------------


@app.command()
def bootstrap(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where the files go; it may not exist yet.")
    ],
    admin: Annotated[
        str, typer.Option("--admin-name", metavar="NAME", help="The first administrator.")
    ] = "admin",
    users: Annotated[
        list[str] | None,
        typer.Option("--user", metavar="NAME", help="A user who gets a token as well. Repeatable."),
    ] = None,
    ca: Annotated[
        bool, typer.Option("--ca", help="Also an authority, and certificates for brokers and users.")
    ] = False,
    brokers: Annotated[
        list[str] | None,
        typer.Option(
            "--broker",
            metavar="HOST",
            help="With --ca: by which others reach a broker. Repeatable. [default: 127.0.0.1]",
        ),
    ] = None,
    cluster_name: Annotated[
        str, typer.Option("--cluster-name", metavar="NAME", help="As in the brokers' settings.")
    ] = "sava",
    issuer: Issuer = "sava",
    ttl: Annotated[str, typer.Option("--ttl", metavar="TIME", help="How long the tokens are good.")] = "365d",
    output: Output = Format.TABLE,
) -> None:
    """Make what a secured cluster begins with: a key that signs tokens, the brokers' secret, the first
    administrator's token, and the section `auth` for the settings of all brokers. With --ca also an authority
    and certificates. Every file is for its owner alone."""
    files = Provision(
        directory=directory,
        cluster_name=cluster_name,
        admin=_file_name(admin),
        issuer=issuer,
        ttl_s=duration(ttl),
        has_authority=ca,
        brokers=[_file_name(each) for each in brokers or ["127.0.0.1"]],
        users=[_file_name(each) for each in users or ()],
    )
    files.write()
    made = sorted(path for path in directory.iterdir() if path.is_file())
    if output is Format.JSON:
        print_json(
            {
                "directory": str(directory.absolute()),
                "files": [path.name for path in made],
                "settings": str((directory / "auth.yml").absolute()),
                "admin": f"user:{admin}",
                "token_file": str(files.token_file(admin).absolute()),
                "ca": str(files.ca_file.absolute()) if ca else None,
            }
        )
        return
    print_line(f"made {len(made)} files in {directory}, each for its owner alone:")
    for path in made:
        print_line(f"  {path.name}")
    print_line(f"\nPut this into the settings of every broker (it is in {directory / 'auth.yml'}):\n")
    print_line(files.section())
    if len(files.brokers) > 1 and ca:
        print_line("The certificate differs: on the broker that others reach as HOST set")
        print_line(f"  SAVA__AUTH__TLS__CERT_FILE={directory.absolute()}/HOST.pem")
        print_line(f"  SAVA__AUTH__TLS__KEY_FILE={directory.absolute()}/HOST.key\n")
    if cluster_name != "sava" and ca:
        print_line(f"The settings need cluster_name: {cluster_name} as well; the certificates name it.\n")
    print_line("The administrator then needs")
    print_line(f"  export SAVA_TOKEN_FILE={files.token_file(admin).absolute()}")
    if ca:
        print_line(f"  export SAVA_TLS_CA={files.ca_file.absolute()}")
    print_line(
        "\nBrokers need neither token.key nor ca.key: keep those where tokens and certificates are made."
    )


@app.command()
def certificate(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where `sava auth bootstrap --ca` put the authority.")
    ],
    brokers: Annotated[
        list[str] | None,
        typer.Option("--broker", metavar="HOST", help="By which others reach a broker. Repeatable."),
    ] = None,
    users: Annotated[
        list[str] | None,
        typer.Option(
            "--user", metavar="NAME", help="A user, for brokers that want a certificate. Repeatable."
        ),
    ] = None,
    cluster_name: Annotated[
        str, typer.Option("--cluster-name", metavar="NAME", help="As in the brokers' settings.")
    ] = "sava",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where the files go. [default: DIR]")
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Sign certificates for brokers and users, each with a new key: for a broker that joins, or before an
    old one ends. Nothing is written over; rename the new files over the old ones."""
    if not brokers and not users:
        raise typer.BadParameter("give --broker HOST or --user NAME")
    authority = SigningAuthority(directory)
    made = [
        authority.issue_broker(cluster_name, _file_name(host), out or directory) for host in brokers or ()
    ]
    made += [authority.issue_user(cluster_name, _file_name(name), out or directory) for name in users or ()]
    if output is Format.JSON:
        print_json({"files": [str(path.absolute()) for path in made]})
    for path in made if output is Format.TABLE else ():
        print_line(f"made {path} and {path.with_suffix('.key').name}")


@token_app.command("new-key")
def new_key(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A new file for the private key, or the secret.")
    ],
    algorithm: Annotated[
        str, typer.Option("--algorithm", metavar="NAME", help=f"What it is for. {', '.join(SIGNATURES)}.")
    ] = "ES256",
    output: Output = Format.TABLE,
) -> None:
    """Make a key that signs tokens, and its public key, which brokers need, in FILE with the suffix .pub. For
    HS256 to HS512 it is a secret, which brokers need as well."""
    if algorithm not in SIGNATURES:
        raise typer.BadParameter(f"{algorithm!r} is none of {', '.join(SIGNATURES)}")
    if algorithm.startswith("HS"):
        write_private(file, new_secret() + b"\n")
        made = [file]
    else:
        private, public = new_key_pair(algorithm)
        write_private(file, private)
        write_private(file.with_suffix(".pub"), public)
        made = [file, file.with_suffix(".pub")]
    if output is Format.JSON:
        print_json({"files": [str(path.absolute()) for path in made]})
    else:
        print_line(f"made {' and '.join(map(str, made))}")


@token_app.command("create")
def create(
    principal: Who,
    key: KeyFile,
    issuer: Issuer = "sava",
    audience: Audience = "",
    algorithm: Annotated[
        str | None,
        typer.Option(
            "--algorithm", metavar="NAME", help=f"By default what fits the key. {', '.join(SIGNATURES)}."
        ),
    ] = None,
    ttl: Annotated[str, typer.Option("--ttl", metavar="TIME", help="How long it is good.")] = "30d",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it to a new file of its owner alone.")
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Create a token of PRINCIPAL, and print it. Nothing is asked of a broker: the key is enough."""
    content = read_key_file(key)
    chosen = algorithm or fitting_algorithm(content)
    seconds = duration(ttl)
    token = create_token(
        issuer,
        Principal.parse(principal),
        seconds,
        signing_key(content, chosen),
        algorithm=chosen,
        audience=audience,
    )
    if out is not None:
        write_private(out, token.encode() + b"\n")
    if output is Format.JSON:
        print_json(
            {
                "principal": str(Principal.parse(principal)),
                "issuer": issuer,
                "expires": moment(round((time.time() + seconds) * 1000)),
                **({"file": str(out)} if out is not None else {"token": token}),
            }
        )
    elif out is None:
        print_line(token)
    else:
        print_line(f"token of {Principal.parse(principal)} written to {out}")


@token_app.command("verify")
def verify(
    token: Annotated[
        str,
        typer.Argument(
            metavar="[@FILE]",
            help="@ and the file that has it, or - for standard input. [default: SAVA_TOKEN]",
        ),
    ] = "",
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", help="The issuer's public key in PEM, key set, or secret."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Instead: the settings of a broker, with its issuers."),
    ] = None,
    issuer: Issuer = "sava",
    audience: Audience = "",
    algorithm: Annotated[
        str | None, typer.Option("--algorithm", metavar="NAME", help="By default what fits the key.")
    ] = None,
    output: Output = Format.TABLE,
) -> None:
    """Check a token as a broker does, and show whom it names. Whether it was revoked only brokers know."""
    text = _given_token(token)
    if (key is None) == (config is None):
        raise typer.BadParameter("give one of --key and --config")
    issuers: Sequence[TokenIssuer]
    skew = 0.0
    if config is not None:
        loaded = settings.load(config).auth
        issuers, skew = loaded.issuers, float(loaded.clock_skew_seconds)
    else:
        assert key is not None
        issuers = [_issuer_of(key, issuer, audience, algorithm)]
    # An issuer with a URL is asked, as brokers do.
    from sava.cli.connection import run_to_end

    async def check() -> Any:
        return await TokenVerifier(issuers, skew).authenticate(text)

    verified = run_to_end(check())
    shown = {
        "principal": str(verified.principal),
        "issuer": verified.issuer,
        "token_id": verified.token_id,
        "expires": moment(round((verified.expires_at - skew) * 1000)),
    }
    if output is Format.JSON:
        print_json({"valid": True, **shown})
    else:
        print_fields(shown)


def _given_token(given: str) -> str:
    """Of the argument, else of the environment."""
    if given == "-":
        return sys.stdin.readline().strip()
    if given.startswith("@"):
        return token_in(Path(given[1:]))
    if given:
        print_error(
            "a token in the arguments can be read by every user of this machine; use @FILE or SAVA_TOKEN"
        )
        return given
    if file := os.environ.get("SAVA_TOKEN_FILE"):
        return token_in(Path(file))
    if text := os.environ.get("SAVA_TOKEN"):
        return text
    raise typer.BadParameter("there is no token; give @FILE, or set SAVA_TOKEN or SAVA_TOKEN_FILE")


def _issuer_of(key: Path, issuer: str, audience: str, algorithm: str | None) -> TokenIssuer:
    content = read_key_file(key)
    if content.lstrip().startswith(b"{"):
        if algorithm is None:
            raise typer.BadParameter("a key set needs --algorithm: it may have keys for several")
        return TokenIssuer(issuer, algorithm, audience, jwks_file=key)
    chosen = algorithm or fitting_algorithm(content)
    if chosen.startswith("HS"):
        return TokenIssuer(issuer, chosen, audience, secret_file=key)
    return TokenIssuer(issuer, chosen, audience, public_key_file=key)


def fitting_algorithm(content: bytes) -> str:
    """By the kind of key that a file has: the first algorithm for it. Raises KeysInvalid."""
    if b"-----BEGIN" not in content:
        return "HS256"
    try:
        if b"PRIVATE" in content:
            key: Any = serialization.load_pem_private_key(content, None).public_key()
        else:
            key = serialization.load_pem_public_key(content)
    except (ValueError, TypeError) as error:
        raise KeysInvalid(f"the key cannot be used: {str(error)[:200]}") from None
    if isinstance(key, ed25519.Ed25519PublicKey):
        return "EdDSA"
    if isinstance(key, ec.EllipticCurvePublicKey):
        return "ES384" if isinstance(key.curve, ec.SECP384R1) else "ES256"
    return "RS256"


# -- the caller ------------------------------------------------------------------------------------


@command(app)
def whoami(session: AdminSession) -> None:
    """Show who you are to the cluster, and what you were granted."""
    answer = session.ask(pb.WhoAmIRequest(), "WhoAmI")
    if session.is_json:
        session.answer(answer, "")
        return
    print_fields(
        {
            "principal": answer.principal,
            "by": answer.credential,
            "expires": moment(answer.expires_ms),
            "super admin": "yes" if answer.is_super_admin else "no",
            "roles": "enforced" if answer.is_enforced else "not enforced: every caller may do everything",
        }
    )
    if answer.bindings:
        print_line("")
        session.show_list(answer.bindings, "role", "scope", "resource")


@command(app, "can-i")
def can_i(
    session: AdminSession,
    permission: Annotated[str, typer.Argument(metavar="PERMISSION", help="Such as produce.")],
    resource: Annotated[
        str,
        typer.Argument(metavar="[RESOURCE]", help="A topic (/sales/orders), a namespace; none: the cluster."),
    ] = "",
    principal: Annotated[
        str, typer.Option("--as", metavar="PRINCIPAL", help="Another than you, which needs cluster-read.")
    ] = "",
) -> None:
    """Say whether you may do something, and by which binding. Exit code 1 if not."""
    scope = "topic" if resource.startswith("/") else "namespace" if resource else "cluster"
    request = pb.CanIRequest(permission=permission, scope=scope, resource=resource, principal=principal)
    answer = session.ask(request, "CanI")
    session.answer(answer, f"{'yes' if answer.allowed else 'no'}: {answer.reason}")
    if not answer.allowed:
        raise typer.Exit(1)


# -- roles -----------------------------------------------------------------------------------------


@command(roles_app, "list")
def list_roles(session: AdminSession) -> None:
    """List the roles, built-in ones first, with their permissions."""
    answer = session.ask(pb.ListRolesRequest())
    session.show_list(
        answer.roles,
        "name",
        built_in=lambda each: "yes" if each.built_in else "",
        permissions=lambda each: ", ".join(each.permissions),
    )


@command(roles_app, "set")
def set_role(
    session: AdminSession,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the role.")],
    permissions: Annotated[
        list[str], typer.Argument(metavar="PERMISSION...", help="Such as lookup and produce.")
    ],
) -> None:
    """Create the role NAME, or give it other permissions. Who has it has those from then on."""
    role = session.ask(pb.Role(name=name, permissions=permissions), "SetRole")
    session.answer(role, f"role {role.name}: {', '.join(role.permissions)}")


@command(roles_app, "delete")
def delete_role(
    session: AdminSession, name: Annotated[str, typer.Argument(metavar="NAME", help="Of the role.")]
) -> None:
    """Delete the role NAME. Refused while a binding names it."""
    session.answer(session.ask(pb.DeleteRoleRequest(name=name)), f"role {name} deleted")


# -- bindings --------------------------------------------------------------------------------------


@command(bindings_app, "list")
def list_bindings(
    session: AdminSession,
    principal: Annotated[
        str, typer.Option("--principal", metavar="PRINCIPAL", help="Of this one alone.")
    ] = "",
) -> None:
    """List who has which role, and where."""
    answer = session.ask(pb.ListBindingsRequest(principal=principal))
    session.show_list(
        answer.bindings,
        "id",
        "principal",
        "role",
        "scope",
        "resource",
        "created_by",
        created=lambda each: moment(each.created_ms),
    )


@command(bindings_app, "create")
def create_binding(
    session: AdminSession,
    principal: Who,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="`sava auth roles list` shows all.")],
    namespace: Namespace = None,
    topic: Topic = None,
) -> None:
    """Give PRINCIPAL a role: in the whole cluster, in a namespace, or on a topic."""
    if namespace is not None and topic is not None:
        raise typer.BadParameter("give --namespace or --topic")
    scope = "topic" if topic is not None else "namespace" if namespace is not None else "cluster"
    binding = session.ask(
        pb.Binding(
            principal=str(Principal.parse(principal)),
            role=role,
            scope=scope,
            resource=topic or namespace or "",
        ),
        "CreateBinding",
    )
    where = f"on {binding.scope} {binding.resource}" if binding.resource else "in the cluster"
    session.answer(binding, f"{binding.principal} has the role {binding.role} {where}: binding {binding.id}")


@command(bindings_app, "delete")
def delete_binding(
    session: AdminSession, binding: Annotated[str, typer.Argument(metavar="ID", help="As listed.")]
) -> None:
    """Take a role away again. Open streams that needed it end within a second."""
    session.answer(session.ask(pb.DeleteBindingRequest(id=binding)), f"binding {binding} deleted")


# -- revocations -----------------------------------------------------------------------------------


@command(app)
def revoke(
    session: AdminSession,
    token: Annotated[
        str,
        typer.Option("--token", metavar="@FILE", help="@ and the file that has the token, or its jti."),
    ] = "",
    certificate: Annotated[
        str,
        typer.Option(
            "--certificate", metavar="@FILE", help="@ and the certificate in PEM, or its serial number."
        ),
    ] = "",
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="For those who read the list.")
    ] = "",
) -> None:
    """Refuse a token or a certificate from now on, on all brokers. Streams that it has opened end within a
    second."""
    if bool(token) == bool(certificate):
        raise typer.BadParameter("give one of --token and --certificate")
    kind = "token" if token else "certificate"
    named, until_ms = _revoked_token(token) if token else _revoked_certificate(certificate)
    answer = session.ask(pb.Revocation(kind=kind, id=named, reason=reason, until_ms=until_ms), "Revoke")
    session.answer(answer, f"{kind} {answer.id} is revoked")


def _revoked_token(given: str) -> tuple[str, int]:
    """Its id, and when it may be forgotten that it was revoked."""
    if not given.startswith("@"):
        if given.count(".") == 2:
            print_error("a token in the arguments can be read by every user of this machine; use @FILE")
            raise typer.BadParameter("give @FILE, or the token's jti")
        return given, 0
    from sava.security.tokens import identify_unverified

    named, expires_at = identify_unverified(token_in(Path(given[1:])))
    # A broker's clock may be behind, and accepts it for the skew of clocks longer.
    return named, round((expires_at + 86_400) * 1000)


def _revoked_certificate(given: str) -> tuple[str, int]:
    if not given.startswith("@"):
        return given, 0
    from sava.security.certificates import read_certificate

    found = read_certificate(read_key_file(Path(given[1:])))
    return str(found.serial), round((found.not_after.timestamp() + 86_400) * 1000)


@command(app)
def revocations(
    session: AdminSession,
    delete: Annotated[
        str, typer.Option("--delete", metavar="ID", help="Accept this token or certificate again.")
    ] = "",
) -> None:
    """List the tokens and certificates that are refused before their end."""

    found = session.ask(pb.ListRevocationsRequest()).revocations
    if delete:
        for each in found:
            if each.id == delete:
                answer = session.ask(pb.DeleteRevocationRequest(kind=each.kind, id=each.id))
                session.answer(answer, f"{each.kind} {each.id} is no longer revoked")
                return
        raise typer.BadParameter(f"{delete[:200]} is not revoked")
    session.show_list(
        found,
        "kind",
        "id",
        "reason",
        "created_by",
        created=lambda each: moment(each.created_ms),
        until=lambda each: moment(each.until_ms) or "-",
    )


# -- quotas ----------------------------------------------------------------------------------------


@command(quotas_app, "list")
def list_quotas(session: AdminSession) -> None:
    """List how much principals may use. 0: no limit."""
    names = [field.name for field in pb.Quota.DESCRIPTOR.fields]
    session.show_list(session.ask(pb.ListQuotasRequest()).quotas, *names)


@command(quotas_app, "set")
def set_quota(
    session: AdminSession,
    principal: Annotated[
        str, typer.Argument(metavar="PRINCIPAL", help="user:NAME; or *: all that have none of their own.")
    ],
    max_connections: Annotated[
        int, typer.Option(min=0, metavar="N", help="At one time, with one broker.")
    ] = 0,
    max_streams: Annotated[
        int, typer.Option(min=0, metavar="N", help="Open at one time, with one broker.")
    ] = 0,
    publish_bytes_per_second: Annotated[int, typer.Option(min=0, metavar="N", help="Into one broker.")] = 0,
    consume_bytes_per_second: Annotated[int, typer.Option(min=0, metavar="N", help="Out of one broker.")] = 0,
    max_topics: Annotated[int, typer.Option(min=0, metavar="N", help="That it has created.")] = 0,
    max_subscriptions: Annotated[int, typer.Option(min=0, metavar="N", help="That it has created.")] = 0,
) -> None:
    """Limit what PRINCIPAL may use. What is not given has no limit."""
    quota = pb.Quota(
        principal=principal if principal == "*" else str(Principal.parse(principal)),
        max_connections=max_connections,
        max_streams=max_streams,
        publish_bytes_per_second=publish_bytes_per_second,
        consume_bytes_per_second=consume_bytes_per_second,
        max_topics=max_topics,
        max_subscriptions=max_subscriptions,
    )
    session.answer(session.ask(quota, "SetQuota"), f"quota of {quota.principal} set")


@command(quotas_app, "delete")
def delete_quota(session: AdminSession, principal: Who) -> None:
    """Remove the quota of PRINCIPAL; that of * holds then."""
    named = principal if principal == "*" else str(Principal.parse(principal))
    session.answer(session.ask(pb.DeleteQuotaRequest(principal=named)), f"quota of {named} deleted")
