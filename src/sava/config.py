"""Settings: one YAML file, identical on every broker, checked completely before anything starts.

A file that is wrong in one place is refused in whole, with the path of the key: a misspelt key that
silently keeps its default is found months later, by an incident. Every key can be overridden by an
environment variable whose name is the path in capitals behind ``SAVA__``
(``SAVA__BROKER__PORTS__RAFT=7651``); values there are read as YAML, so ``true``, ``12`` and ``[a, b]`` mean
what they mean in the file. Whatever must differ between brokers (the host name others reach it by) comes
from the environment or the command line, never from an edited copy of the file.

Files that were written for Danube are taken as well (``danube_config``), and Pulsar's name of one setting.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from sava import danube_config
from sava.danube_config import NotTranslatable
from sava.errors import HostError
from sava.security.principal import Principal, PrincipalInvalid
from sava.security.tokens import TokenIssuer, check_jwks_url, write_private

ENVIRONMENT_PREFIX = "SAVA__"
PULSAR_CREATE = "createTopicToRemoteClusterForReplication"

Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class ConfigInvalid(HostError):
    """The configuration cannot be used. The text names the file or variable, the path of each wrong key,
    and the fault."""


class SettingsSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PortSettings(SettingsSection):
    client: Port = 6650
    """For clients."""
    admin: Port = 50051
    """For administration."""
    raft: Port = 7650
    """Between brokers."""
    prometheus: Port = 9040
    """HTTP: ``/metrics``, ``/healthz``, ``/readyz``."""


class BrokerSettings(SettingsSection):
    host: str = "127.0.0.1"
    """The address to bind: this machine alone, unless it is set. ``0.0.0.0``: all of its addresses."""
    advertised_host: str = ""
    """The name by which other brokers and clients reach this one; by default ``host``, or the machine's
    name when ``host`` is a wildcard. The one setting that differs between brokers: give it as
    ``SAVA__BROKER__ADVERTISED_HOST``."""
    rack: str = ""
    """What brokers share that fails as one: a rack, a zone. Mirrors of a journal go to other racks if there
    are any."""
    ports: PortSettings = PortSettings()

    @property
    def reachable_host(self) -> str:
        if self.advertised_host:
            return self.advertised_host
        return socket.gethostname() if self.host in ("", "0.0.0.0", "::") else self.host


class MetaStoreSettings(SettingsSection):
    """The replicated metadata store.

    The defaults let a cluster lose its leader and accept writes again within three seconds. A follower
    campaigns after one to two election timeouts of silence (drawn at random, so that two rarely collide),
    and then needs a pre-vote, a vote and the commit of one entry. With 1000 ms that is at most two seconds
    and a little; with 3000 ms the silence alone may last six. Heartbeats of 100
    ms leave room for nine to be lost before a follower campaigns.
    """

    data_dir: Path = Path("/var/lib/sava/raft")
    """Identity, log and snapshots of the metadata store."""
    seed_nodes: tuple[str, ...] = ()
    """Raft addresses (``host:port``) of the brokers that form the cluster by themselves at the first start,
    the same list on all of them; more brokers are added with ``sava cluster add-node``. Empty: brokers wait
    for ``sava cluster init``."""
    heartbeat_interval_ms: Annotated[int, Field(ge=10, le=10_000)] = 100
    """A leader's sign of life."""
    election_timeout_ms: Annotated[int, Field(ge=50, le=100_000)] = 1000
    """Silence after which a follower asks for votes, drawn from one to two times this. At least three
    heartbeats."""
    snapshot_threshold: Positive = 10_000
    """Entries applied since the last snapshot before the next one is taken."""
    max_payload_entries: Annotated[int, Field(ge=1, le=10_000)] = 300
    """How much one append message carries; one entry counts as 4 KiB."""

    @model_validator(mode="after")
    def _seeds_are_addresses(self) -> MetaStoreSettings:
        for seed in self.seed_nodes:
            host, _, port = seed.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(f"seed_nodes: {seed!r} is not host:port of a Raft port")
        if len(set(self.seed_nodes)) != len(self.seed_nodes):
            raise ValueError("seed_nodes: an address is listed twice")
        return self

    @model_validator(mode="after")
    def _several_heartbeats_fit(self) -> MetaStoreSettings:
        if self.election_timeout_ms < 3 * self.heartbeat_interval_ms:
            raise ValueError("election_timeout_ms must be at least three times heartbeat_interval_ms")
        return self


class PolicySettings(SettingsSection):
    """What holds for topics and namespaces that say nothing else; 0 means no limit."""

    max_producers: Count = 10_000
    """Of one topic, that are connected."""
    max_subscriptions: Count = 10_000
    """Of one topic."""
    max_consumers: Count = 0
    """Of one topic, over all its subscriptions."""
    max_consumers_per_subscription: Count = 0
    """Of one subscription."""
    max_publish_rate: Count = 0
    """Messages a second into one topic; publishing waits beyond it."""
    max_subscription_dispatch_rate: Count = 0
    """Messages a second out of one subscription; dispatch waits beyond it."""
    max_message_size: Count = 8 << 20
    """Bytes of one payload. Key, attributes and headers come on top; Danube's clients take messages of 10
    MiB."""
    retention_time_minutes: Count = 0
    """Age after which segments are deleted, once all subscriptions have acked them."""
    retention_size_mb: Count = 0
    """Size of a topic beyond which its oldest segments are deleted, once all subscriptions have acked
    them."""


class LimitSettings(SettingsSection):
    """What callers together may use of a broker or a namespace. The limits of a topic are in ``policies``."""

    topics_per_namespace: Count = 50_000
    """Partitions count, too. Beyond it none is created. 0: no limit."""
    topic_creations_per_second: Count = 200
    """Of topics that producers and look-ups create by themselves, on each broker; ``topics create`` is not
    slowed down. Creation waits beyond it, and fails after ten seconds. 0: no limit."""
    connections: Annotated[int, Field(ge=16)] = 20_000
    """Of the client port, and of the admin port; further ones are closed at once. Keep it below the limit of
    open files."""
    decompressing_mb: Annotated[int, Field(ge=64)] = 128
    """Memory for compressed batches while they are checked. Publishers wait for it."""


class DispatchSettings(SettingsSection):
    max_unacked_messages: Annotated[int, Field(ge=1, le=1_000_000)] = 65_536
    """Of one subscription, over all its consumers: beyond this it waits for acks. For new subscriptions;
    one that exists keeps what it has until an operator changes it."""


class StorageSettings(SettingsSection):
    """Where messages live: the journal on a local disk, sealed segments under ``url``."""

    url: str = "file:///var/lib/sava/segments"
    """``file://``, ``s3://``, ``gs://``, ``az://`` or ``memory://``."""
    journal_dir: Path = Path("/var/lib/sava/journal")
    """The journal of messages, on a local disk."""
    upload_interval_seconds: Positive = 60
    """The longest time that a message stays in the journal alone, unless its topic has less than 64 KiB
    there."""
    quiet_upload_interval_seconds: Positive | None = None
    """The same for topics that have less there, while the journal holds less than 256 MiB; by default five
    times as long. A small segment costs as much as a large one."""
    segment_process: bool = True
    """Make segments in a process of their own while there is much to write, so that messages do not wait for
    it. It takes about 110 MB then, and ends after two minutes without work."""
    staging_expiry_seconds: Annotated[int, Field(ge=4)] = 3600
    """Unpublished parts of an exactly-once write are removed after this long. A commit must come within half
    of that."""


class JournalSettings(SettingsSection):
    """How many disks must have a message before it is acknowledged.

    By default that follows from the size of the cluster: one broker keeps its journal alone, of two both must
    have it, of three or more each journal is on three disks, and two must have it. It is never less than was
    asked for without the record of the journal saying so.
    """

    write_quorum: Annotated[int, Field(ge=0, le=16)] = 0
    """On how many disks a journal is, its owner's included; 0: by the number of brokers, 3 at most."""
    ack_quorum: Annotated[int, Field(ge=0, le=16)] = 0
    """How many of them must have a message durably before it is acknowledged; 0: 2, or 1 of 1."""
    degraded: Literal["refuse", "allow"] = "refuse"
    """When fewer disks than that can be reached: refuse messages, or acknowledge them with fewer copies."""
    mirror_timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 5
    """A mirror behind for this long without progress is replaced; one that acknowledgements wait for, after a
    second or five times its usual answer."""

    @model_validator(mode="after")
    def _acks_within_writes(self) -> JournalSettings:
        if self.write_quorum and self.ack_quorum > self.write_quorum:
            raise ValueError("ack_quorum must not exceed write_quorum")
        return self


class TlsSettings(SettingsSection):
    """Files in PEM. With them the client, admin and Raft ports speak TLS. They are read again within 10
    seconds of a change."""

    cert_file: Path
    """What this broker shows to others. Its SAN holds ``URI:sava://CLUSTER/broker/NODE`` with this broker's
    node id or host, unless ``broker_ca_file`` is set."""
    key_file: Path
    """Belongs to it."""
    ca_file: Path
    """Who signed what others show."""
    broker_ca_file: Path | None = None
    """Who signs the certificates of brokers, if that is an authority of its own."""
    client_certificates: Literal["none", "optional", "required"] | None = None
    """Whether a client shows a certificate on the client and admin ports: by default ``required``, with
    ``tokens`` ``optional``. gRPC for Python asks for one only where it requires it, so that ``optional``
    means ``none`` there for now."""


class TokenIssuerSettings(SettingsSection):
    """Who signs tokens (JWT), and how their signature is checked: exactly one of the four sources of keys.
    Files are read again within 10 seconds of a change."""

    issuer: str = "sava"
    """The claim ``iss``, which must match."""
    audience: str = ""
    """The claim ``aud``, which must match; empty: it is not looked at."""
    algorithm: Literal["HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "ES256", "ES384", "EdDSA"] = (
        "HS256"
    )
    """The only algorithm that is accepted from this issuer."""
    secret_file: Path | None = None
    """For HS256 to HS512: one secret a line, of which any is accepted."""
    public_key_file: Path | None = None
    """For the others: one or more public keys in PEM."""
    jwks_file: Path | None = None
    """A JSON Web Key Set, whose keys are chosen by ``kid``."""
    jwks_url: str = ""
    """The same, fetched and kept for five minutes."""

    @model_validator(mode="after")
    def _one_source(self) -> TokenIssuerSettings:
        given = [self.secret_file, self.public_key_file, self.jwks_file, self.jwks_url or None]
        if sum(each is not None for each in given) != 1:
            raise ValueError("exactly one of secret_file, public_key_file, jwks_file and jwks_url is needed")
        if self.algorithm.startswith("HS") != (self.secret_file is not None):
            raise ValueError(
                f"algorithm {self.algorithm} does not fit the key: HS256 to HS512 need secret_file"
            )
        if self.jwks_url:
            check_jwks_url(self.jwks_url)
        return self

    def as_issuer(self) -> TokenIssuer:
        return TokenIssuer(
            issuer=self.issuer,
            algorithm=self.algorithm,
            audience=self.audience,
            secret_file=self.secret_file,
            public_key_file=self.public_key_file,
            jwks_file=self.jwks_file,
            jwks_url=self.jwks_url,
        )


class Auth(SettingsSection):
    """Who may connect, and what they may do. With ``tls`` or ``tokens`` every call needs a permission
    (``sava auth roles``); with neither, every caller may do everything."""

    tls: TlsSettings | None = None
    """TLS on the client, admin and Raft ports. The HTTP port stays plain."""
    cluster_secret_file: Path | None = None
    """By which brokers know each other, one secret a line: the first is shown, any is accepted. By default
    ``cluster init`` makes one and keeps it in ``meta_store.data_dir``."""
    tokens: tuple[TokenIssuerSettings, ...] = ()
    """Whose tokens are accepted."""
    super_admins: tuple[str, ...] = ()
    """Principals that may do everything, as ``user:NAME`` or ``NAME``. They grant the others their roles."""
    anonymous: bool | None = None
    """Whether a caller without token and certificate is the principal ``anonymous:anonymous``, instead of
    being refused. By default only when neither ``tls`` nor ``tokens`` is set."""
    metrics: Literal["open", "token"] = "open"
    """Who may read ``/metrics``: every caller who reaches the HTTP port, or those with a token that has the
    permission ``cluster-read``. The HTTP port is plain: a token that crosses a network there can be read."""
    clock_skew_seconds: Annotated[int, Field(ge=0, le=300)] = 30
    """How far the clock of an issuer may be off."""
    audit: Literal["off", "denied", "changes", "all"] | None = None
    """Which calls are recorded, in the log and in the topic ``/system/audit``: those that are refused
    (``denied``), these and what changes something (``changes``, the default), or ``all``. Only where calls
    need permissions."""

    @property
    def issuers(self) -> tuple[TokenIssuer, ...]:
        return tuple(each.as_issuer() for each in self.tokens)

    @model_validator(mode="after")
    def _are_principals(self) -> Auth:
        for each in self.super_admins:
            try:
                Principal.parse(each)
            except PrincipalInvalid as error:
                raise ValueError(f"super_admins: {error}") from None
        return self

    @model_validator(mode="after")
    def _metrics_by_token(self) -> Auth:
        if self.metrics == "token" and not self.tokens:
            raise ValueError("metrics: token needs an issuer in tokens")
        return self

    @property
    def is_enforced(self) -> bool:
        """Whether calls need permissions."""
        return self.tls is not None or bool(self.tokens)

    @property
    def audit_level(self) -> Literal["off", "denied", "changes", "all"]:
        return (self.audit or "changes") if self.is_enforced else "off"

    @property
    def client_certificates(self) -> Literal["none", "optional", "required"]:
        if self.tls is None:
            return "none"
        return self.tls.client_certificates or ("optional" if self.tokens else "required")


class RebalancingSettings(SettingsSection):
    enabled: bool = True
    """Whether the leader moves topics from loaded brokers to others."""
    check_interval_seconds: Positive = 120
    """How often the leader looks."""
    aggressiveness: Literal["conservative", "moderate", "aggressive"] = "moderate"
    """How uneven brokers may be before something moves."""
    max_moves_per_hour: Count = 10
    """Of the whole cluster."""
    cooldown_seconds: Count = 60
    """Between two rounds that moved something."""
    min_brokers: Positive = 2
    """With fewer active brokers nothing is rebalanced."""
    min_topic_age_seconds: Count = 300
    """A topic assigned more recently stays where it is."""
    exclude_topics: tuple[str, ...] = ()
    """Names, or ``/namespace/*``."""


class LoadManagerSettings(SettingsSection):
    assignment_strategy: Literal["round_robin", "fair", "balanced", "weighted_load"] = "fair"
    """``fair``, also called ``round_robin``: by the number of topics. ``balanced`` and ``weighted_load``: by
    what brokers report of their load."""
    load_report_interval_seconds: Positive = 30
    """How often a broker reports its load to the leader."""
    rebalancing: RebalancingSettings = RebalancingSettings()


class ClusterSettings(SettingsSection):
    """How brokers know of one another."""

    registration_ttl_ms: Annotated[int, Field(ge=1000, le=600_000)] = 6000
    """A broker that is silent for this long is gone, and its topics go to others. It stops serving by then
    itself."""
    suspicion: Literal["auto", "off"] = "auto"
    """``auto``: a broker that the others agree is gone (they get no message from it, or their connections are
    refused) loses its registration before that time. ``off``: only the time decides."""
    move_timeout_seconds: Positive = 30
    """How long the owner of a topic may take to hand it over."""
    leave_timeout_seconds: Count = 10
    """How long a stopping broker hands its topics over. 0: it stops at once."""


HOST_PATTERN = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


class ReplicationSettings(SettingsSection):
    create_topic_to_remote_cluster: bool = True
    """Whether replication may create topics on the remote cluster (PIP-370). When false it waits until they
    exist. Pulsar's ``createTopicToRemoteClusterForReplication`` at the top of the file works too."""
    partition_mismatch_policy: Literal["pip370", "strict"] = "pip370"
    """What happens to a topic with other partitions on the remote cluster: ``pip370`` copies each partition
    into the one of the same number, if there is one; ``strict`` copies nothing."""
    allowed_remotes: tuple[str, ...] | None = None
    """Addresses that brokers connect to when an operator adds a remote: host names, ``*.DOMAIN``, addresses
    and networks (``10.2.0.0/16``). None: all but link-local addresses, those of clouds' metadata services,
    and loopback unless ``broker.host`` is loopback too."""
    secrets_dir: Path | None = None
    """Where the files are that remotes name (tokens, certificates, keys); no other file is read for them.
    None: ``secrets`` in ``meta_store.data_dir``."""
    max_backlog_gb: Annotated[float, Field(gt=0)] | None = None
    """Stored gigabytes of one topic or partition that retention keeps for remotes. Beyond it the oldest are
    deleted, and the link reports the loss. None: all are kept."""

    @field_validator("allowed_remotes")
    @classmethod
    def _are_addresses(cls, allowed: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for each in allowed or ():
            try:
                is_right = bool(HOST_PATTERN.fullmatch(each)) or bool(ip_network(each, strict=False))
            except ValueError:
                is_right = False
            if not is_right:
                raise ValueError(f"{each[:100]!r} is not a host name, *.DOMAIN, an address or a network")
        return allowed

    @property
    def max_backlog_bytes(self) -> int | None:
        return None if self.max_backlog_gb is None else round(self.max_backlog_gb * 1_000_000_000)


class MetricsSettings(SettingsSection):
    """What a broker tells Prometheus at ``/metrics``."""

    danube_names: bool = True
    """Offer metrics also under Danube's names (``danube_*``), for its web UI and MCP server."""


class LoggingSettings(SettingsSection):
    """What a broker writes to standard error. Every line says which broker, and lines about a topic say under
    which epoch."""

    format: Literal["text", "json"] = "text"
    """``text``: for people, ``key=value`` behind a short text. ``json``: an object per line, with the same
    keys."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is written."""


class Config(SettingsSection):
    cluster_name: str = "sava"
    """A name for people."""
    broker: BrokerSettings = BrokerSettings()
    meta_store: MetaStoreSettings = MetaStoreSettings()
    bootstrap_namespaces: tuple[str, ...] = ()
    """Namespaces that are created at the first start."""
    auto_create_topics: bool = True
    """Whether a producer may create its topic."""
    policies: PolicySettings = PolicySettings()
    limits: LimitSettings = LimitSettings()
    dispatch: DispatchSettings = DispatchSettings()
    storage: StorageSettings = StorageSettings()
    journal: JournalSettings = JournalSettings()
    auth: Auth = Auth()
    cluster: ClusterSettings = ClusterSettings()
    load_manager: LoadManagerSettings = LoadManagerSettings()
    replication: ReplicationSettings = ReplicationSettings()
    metrics: MetricsSettings = MetricsSettings()
    logging: LoggingSettings = LoggingSettings()
    _notes: tuple[str, ...] = PrivateAttr(())
    _jwt_secret: str = PrivateAttr("")

    def keep_secret(self) -> None:
        """Write a secret that stands in Danube's file where brokers read secrets: in a file of its own.
        Raises ConfigInvalid."""
        path = self.meta_store.data_dir / danube_config.JWT_SECRET
        if not self._jwt_secret or all(each.secret_file != path for each in self.auth.tokens):
            return
        content = self._jwt_secret.encode() + b"\n"
        try:
            if path.exists() and path.read_bytes() == content:
                return
            path.unlink(missing_ok=True)
            write_private(path, content)
        except OSError as error:
            raise ConfigInvalid(f"auth.jwt: the secret cannot be kept in {path}: {error.strerror}") from error

    @property
    def notes(self) -> tuple[str, ...]:
        """What became of keys that are Danube's, for the log."""
        return self._notes


def load(
    path: Path | None,
    environment: Mapping[str, str] = os.environ,
    overlay: dict[str, Any] | None = None,
    *,
    underlay: dict[str, Any] | None = None,
) -> Config:
    """Read ``path`` (None: defaults only), lay the environment over it, then ``overlay`` (what the command
    line says), and check everything. ``underlay`` is for what neither file nor environment says. Raises
    ConfigInvalid."""
    source = str(path or "defaults")
    try:
        # Before the command line is laid over it, which may well differ from what the file says.
        file = danube_config.translated(_read(path))
    except NotTranslatable as error:
        raise ConfigInvalid(f"configuration {source} refused: {error}") from error
    tree = underlay or {}
    for above in (file.tree, overrides(environment), overlay or {}):
        tree = _merge(tree, above)
    if file.jwt_secret:
        tree = _with_jwt_secret(tree)
    config = check(tree, source=source)
    config._jwt_secret = file.jwt_secret
    config._notes = tuple(file.notes)
    for name, value in file.environment.items():  # the object store's client looks for it there
        os.environ.setdefault(name, value)
    return config


def _with_jwt_secret(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree in which tokens as Danube's are checked by a file in the directory of the metadata store."""
    meta_store = tree.get("meta_store")
    given = meta_store.get("data_dir") if isinstance(meta_store, dict) else None
    path = Path(given or MetaStoreSettings().data_dir) / danube_config.JWT_SECRET
    tokens = [
        {**each, "secret_file": str(path)}
        if isinstance(each, dict) and each.get("secret_file") == danube_config.JWT_SECRET
        else each
        for each in tree["auth"].get("tokens", ())
    ]
    return _merge(tree, {"auth": {"tokens": tokens}})


def check(tree: dict[str, Any], *, source: str) -> Config:
    try:
        # Through JSON mode, because YAML has lists and text where the model has tuples and paths; it stays
        # strict otherwise: "7650" is not a port and 1 is not true.
        return Config.model_validate_json(_as_json(_with_pulsar_names(tree, source)))
    except ValidationError as error:
        faults = "; ".join(f"{_path_of(fault['loc'])}: {_reason(fault)}" for fault in error.errors())
        raise ConfigInvalid(f"configuration {source} refused: {faults}") from error


def _with_pulsar_names(tree: dict[str, Any], source: str) -> dict[str, Any]:
    """Keys that users know from Pulsar, under the names that they have here. Case does not matter: variables
    of the environment have none."""
    given = [key for key in tree if key.lower() == PULSAR_CREATE.lower()]
    section = tree.get("replication")
    if not given or not isinstance(section, dict | None):
        return tree
    here = dict(section or {})
    for key in given:
        if here.setdefault("create_topic_to_remote_cluster", tree[key]) != tree[key]:
            raise ConfigInvalid(
                f"configuration {source} refused: {key} and replication.create_topic_to_remote_cluster are "
                "the same setting, and differ"
            )
    return {**{key: value for key, value in tree.items() if key not in given}, "replication": here}


def overrides(environment: Mapping[str, str]) -> dict[str, Any]:
    """The tree that the ``SAVA__…`` variables spell out."""
    tree: dict[str, Any] = {}
    for name in sorted(environment):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        *sections, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        try:
            value = yaml.safe_load(environment[name])
        except yaml.YAMLError as error:
            raise ConfigInvalid(f"environment variable {name}: not a YAML value: {error}") from error
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
            if not isinstance(branch, dict):
                raise ConfigInvalid(
                    f"environment variable {name}: another variable gives {section} a plain value"
                )
        branch[key] = value
    return tree


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigInvalid(f"configuration {path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"configuration {path}: not YAML: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigInvalid(f"configuration {path}: expected keys at the top, found {type(tree).__name__}")
    return tree


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _as_json(tree: dict[str, Any]) -> str:
    try:
        return json.dumps(tree)
    except TypeError as error:
        raise ConfigInvalid(f"configuration holds a value of a kind that no key takes: {error}") from error


def _path_of(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location) or "(top)"


def _reason(fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        return "unknown key"
    return str(fault["msg"]).removeprefix("Value error, ")
