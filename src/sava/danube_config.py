"""Danube's configuration keys, under the names that they have here.

A broker file that was written for Danube starts a Sava broker as it stands. Every key of such a file is in
one of two tables: ``MOVED`` has Sava's key for the same setting, ``WITHOUT_MEANING`` the reason why Sava has
no such setting. Each use of either becomes a note, which the broker logs at its start. A key that is in
neither table is left where it is, and refused like any other unknown key.

Settings that Danube has for an object store become ``storage.url``. Credentials and endpoints come from the
environment, where the object store's client looks for them (``AWS_ENDPOINT_URL`` …); those in the file are
handed to it the same way, unless the environment has its own.

When a file has both names of one setting with different values, it is refused: one of them is a mistake, and
no order of precedence tells which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

Tree = dict[str, Any]


class NotTranslatable(ValueError):
    """A value of Danube's that has no counterpart here. The text names the key and the way out."""


@dataclass(slots=True)
class Translation:
    tree: Tree
    notes: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """What the object store's client is to find in the environment, unless it is there already."""
    jwt_secret: str = field(default="", repr=False)
    """What signs tokens. It belongs into the file ``JWT_SECRET`` of the metadata store's directory."""


JWT_SECRET: Final = "danube_jwt_secret"
"""The name of the file that a broker makes of the secret in a file of Danube's."""
DANUBE_ISSUER: Final = "danube-auth"
FIRST_ADMIN: Final = "user:admin"


def _host(value: Any) -> str:
    text = str(value)
    host = urlsplit(text if "://" in text else f"//{text}").hostname
    if not host:
        raise NotTranslatable(f"{text!r} names no host")
    return host


def _aggressiveness(value: Any) -> Any:
    return "moderate" if value == "balanced" else value


MOVED: Final[dict[str, tuple[str, Callable[[Any], Any] | None]]] = {
    "broker_host": ("broker.host", None),
    "broker_port": ("broker.ports.client", None),
    "admin_port": ("broker.ports.admin", None),
    "prom_port": ("broker.ports.prometheus", None),
    "broker.advertised_listeners.broker_url": ("broker.advertised_host", _host),
    "policies.max_producers_per_topic": ("policies.max_producers", None),
    "policies.max_subscriptions_per_topic": ("policies.max_subscriptions", None),
    "policies.max_consumers_per_topic": ("policies.max_consumers", None),
    "load_manager.rebalancing.min_brokers_for_rebalance": ("load_manager.rebalancing.min_brokers", None),
    "load_manager.rebalancing.blacklist_topics": ("load_manager.rebalancing.exclude_topics", None),
    "storage.local_wal_root": ("storage.journal_dir", None),
    "wal_cloud.wal.dir": ("storage.journal_dir", None),
    "wal_cloud.uploader.interval_seconds": ("storage.upload_interval_seconds", None),
}
REWORDED: Final[dict[str, Callable[[Any], Any]]] = {
    "load_manager.rebalancing.aggressiveness": _aggressiveness,
}
"""Keys that have the same name here, and values that do not."""

_SYNCED: Final = "every message is synced to disk before it is acknowledged"
_TRIMMED: Final = (
    "the journal is trimmed as soon as segments have its messages; policies.retention_time_minutes and "
    "policies.retention_size_mb say how long a topic keeps them"
)
_RAFT: Final = "metadata is in the embedded Raft store"
WITHOUT_MEANING: Final = {
    "broker.advertised_listeners.connect_url": "every broker is reached at its own address",
    "meta_store_host": _RAFT,
    "meta_store_port": _RAFT,
    "meta_store.host": _RAFT,
    "meta_store.port": _RAFT,
    "wal_cloud.metadata": _RAFT,
    "storage.metadata_prefix": _RAFT,
    "wal_cloud.wal.file_name": "the journal names its files itself",
    "wal_cloud.wal.cache_capacity": "recent messages are cached up to a number of bytes",
    "wal_cloud.wal.file_sync": _SYNCED,
    "wal_cloud.wal.rotation": "the journal bounds its files itself",
    "wal_cloud.wal.retention": _TRIMMED,
    "wal_cloud.uploader.enabled": "segments are always written",
    "wal_cloud.uploader.root_prefix": "the path in storage.url is the prefix",
    "wal_cloud.uploader.max_object_mb": "segments bound their size themselves",
    "storage.local_retention": _TRIMMED,
    "storage.wal": f"{_SYNCED}, and the journal bounds its files and its cache itself",
    "storage.write_buffer": "journals have copies on other brokers' disks (journal.write_quorum)",
    "policies.max_dispatch_rate": "policies.max_subscription_dispatch_rate limits each subscription",
    "auth.tls.verify_client": "auth.tls.client_certificates says whether clients show certificates",
}

_SCHEMES: Final = {"s3": "s3", "gcs": "gs", "azblob": "az"}
_VARIABLES: Final = {
    "s3": {
        "endpoint": "AWS_ENDPOINT_URL",
        "region": "AWS_REGION",
        "access_key": "AWS_ACCESS_KEY_ID",
        "secret_key": "AWS_SECRET_ACCESS_KEY",
        "session_token": "AWS_SESSION_TOKEN",
    },
    "gcs": {"credentials_path": "GOOGLE_APPLICATION_CREDENTIALS"},
    "azblob": {
        "endpoint": "AZURE_STORAGE_ENDPOINT",
        "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
        "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
    },
}


def translated(given: Mapping[str, Any]) -> Translation:
    """Raises NotTranslatable."""
    done = Translation(_copied(given))
    _translate_auth(done)
    _translate_admin_tls(done)
    _translate_store(done)
    for source, (target, convert) in MOVED.items():
        if _has(done.tree, source):
            value = _taken(done.tree, source)
            _put(done, source, target, convert(value) if convert else value)
    for path, reword in REWORDED.items():
        if _has(done.tree, path) and (value := _taken(done.tree, path)) is not None:
            _branch(done.tree, path)[path.rpartition(".")[2]] = reworded = reword(value)
            if reworded != value:
                done.notes.append(f"{path}: Danube's {value!r} is taken as {reworded!r}")
    for path, reason in WITHOUT_MEANING.items():
        if _has(done.tree, path):
            _taken(done.tree, path)
            done.notes.append(f"{path} is ignored: {reason}")
    return done


def _translate_auth(done: Translation) -> None:
    """Danube names a mode; here all ports have TLS when ``auth.tls`` has files, and tokens count when
    ``auth.tokens`` names who signs them."""
    auth = done.tree.get("auth")
    mode = _taken(done.tree, "auth.mode") if _has(done.tree, "auth.mode") else None
    if mode not in (None, "none", "tls", "tlswithjwt"):
        raise NotTranslatable(f"auth.mode: {mode!r} is none of none, tls, tlswithjwt")
    has_tls = isinstance(auth, dict) and auth.get("tls") is not None
    if mode in ("tls", "tlswithjwt") and not has_tls:
        raise NotTranslatable(f"auth.mode: {mode} needs auth.tls.cert_file, key_file and ca_file")
    if mode == "none" and has_tls:
        _taken(done.tree, "auth.tls")
        done.notes.append("auth.tls is ignored: auth.mode is none")
    elif has_tls and mode is not None:
        done.notes.append("auth.mode is ignored: the ports have TLS when auth.tls has files")
        _know_brokers(done)
    if mode == "tlswithjwt":
        _translate_jwt(done)
    elif _has(done.tree, "auth.jwt"):
        _taken(done.tree, "auth.jwt")
        done.notes.append(f"auth.jwt is ignored: auth.mode is {mode or 'not tlswithjwt'}")
    if mode in ("tls", "tlswithjwt") and not _has(done.tree, "auth.super_admins"):
        # Danube's files from before it had roles: here every call needs one, which a first must grant.
        _branch(done.tree, "auth.super_admins")["super_admins"] = [FIRST_ADMIN]
        done.notes.append(
            f"auth.super_admins is not set: {FIRST_ADMIN} may do everything, and grants the others their "
            "roles (`sava auth bindings create`)"
        )


def _know_brokers(done: Translation) -> None:
    """Certificates that were made for Danube name hosts, and no brokers."""
    tls = done.tree["auth"]["tls"]
    if isinstance(tls, dict) and "ca_file" in tls and "broker_ca_file" not in tls:
        tls["broker_ca_file"] = tls["ca_file"]
        done.notes.append(
            "auth.tls.broker_ca_file is not set: a certificate of auth.tls.ca_file that names a broker's "
            "host is that broker's"
        )


def _translate_jwt(done: Translation) -> None:
    jwt = _taken(done.tree, "auth.jwt") if _has(done.tree, "auth.jwt") else None
    secret = jwt.get("secret_key") if isinstance(jwt, dict) else None
    if not isinstance(jwt, dict) or secret in (None, ""):
        raise NotTranslatable("auth.mode: tlswithjwt needs auth.jwt.secret_key")
    text = str(secret)
    if text.strip() != text or len(text.splitlines()) != 1:
        raise NotTranslatable(
            "auth.jwt.secret_key: it has a line break, or a space at an end; put a secret without into a "
            "file, and name that in auth.tokens (secret_file)"
        )
    if unknown := jwt.keys() - {"secret_key", "issuer", "expiration_time"}:
        raise NotTranslatable(f"auth.jwt.{min(unknown)}: unknown key")
    auth = _branch(done.tree, "auth.tokens")
    auth["tokens"] = [
        *(auth.get("tokens") or ()),
        {"issuer": jwt.get("issuer") or DANUBE_ISSUER, "algorithm": "HS256", "secret_file": JWT_SECRET},
    ]
    done.jwt_secret = text
    done.notes.append(
        f"auth.jwt is auth.tokens here: the secret is kept in the file {JWT_SECRET} of meta_store.data_dir"
    )
    if "expiration_time" in jwt:
        done.notes.append("auth.jwt.expiration_time is ignored: every token says when it ends")


def _translate_admin_tls(done: Translation) -> None:
    """Danube secures its admin port apart from the others."""
    auth = done.tree.get("auth")
    has_tls = isinstance(auth, dict) and auth.get("tls") is not None
    if not _has(done.tree, "admin_tls"):
        return
    if _taken(done.tree, "admin_tls") and not has_tls:
        raise NotTranslatable("admin_tls: the admin port has TLS when auth.tls has files; set those")
    done.notes.append("admin_tls is ignored: the admin port follows auth.tls")


def _translate_store(done: Translation) -> None:
    """``storage.mode`` with ``storage.durable``, or ``wal_cloud.cloud``: where segments live."""
    mode = None
    if _has(done.tree, "storage.mode"):
        mode = _taken(done.tree, "storage.mode")
        if mode not in ("local", "shared_fs", "object_store"):
            raise NotTranslatable(f"storage.mode: {mode!r} is none of local, shared_fs, object_store")
        if mode == "local":
            done.notes.append("storage.mode local: segments go to storage.url")
    for source in ("storage.durable", "wal_cloud.cloud"):
        if not _has(done.tree, source):
            continue
        store = _taken(done.tree, source)
        if not isinstance(store, dict):
            raise NotTranslatable(f"{source}: expected keys, found {type(store).__name__}")
        store = {key: value for key, value in store.items() if value is not None}
        backend = store.pop("backend", "fs" if mode == "shared_fs" else None)
        if backend == "memory":
            done.notes.append(
                f"{source}.backend memory is ignored: messages would be lost with the process; "
                "segments go to storage.url"
            )
        else:
            _put(done, source, "storage.url", _url(source, backend, store.pop("root", None)))
            _hand_over(done, source, backend, store)


def _url(source: str, backend: Any, root: Any) -> str:
    if not isinstance(root, str) or not root:
        raise NotTranslatable(f"{source}.root: a text is needed; or give storage.url")
    if backend == "fs":
        return Path(root.removeprefix("file://")).absolute().as_uri()
    if backend not in _SCHEMES:
        raise NotTranslatable(f"{source}.backend: {backend!r} is none of fs, s3, gcs, azblob, memory")
    return f"{_SCHEMES[backend]}://{root.partition('://')[2] or root}"


def _hand_over(done: Translation, source: str, backend: str, store: Mapping[str, Any]) -> None:
    """Endpoint and credentials; values are never part of a note."""
    variables = _VARIABLES.get(backend, {})
    for key, value in store.items():
        if key in variables:
            done.environment[variables[key]] = str(value)
            done.notes.append(f"{source}.{key} is taken as {variables[key]}, unless that is set")
            if key == "endpoint" and backend == "s3" and str(value).startswith("http://"):
                done.environment["AWS_ALLOW_HTTP"] = "true"
        elif key in ("anonymous", "virtual_host_style") and value is False:
            done.notes.append(f"{source}.{key} is ignored: false is the default")
        else:
            raise NotTranslatable(
                f"{source}.{key}: give it to the object store's client in the environment, and remove the key"
            )


# -- paths in a tree ---------------------------------------------------------------------------------


def _copied(tree: Mapping[str, Any]) -> Tree:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in tree.items()}


def _has(tree: Tree, path: str) -> bool:
    branch: Any = tree
    for key in path.split("."):
        if not isinstance(branch, dict) or key not in branch:
            return False
        branch = branch[key]
    return True


def _taken(tree: Tree, path: str) -> Any:
    """What is at the path, which is removed, with the sections that this leaves empty."""
    key, _, rest = path.partition(".")
    if not rest:
        return tree.pop(key)
    value = _taken(tree[key], rest)
    if not tree[key]:
        del tree[key]
    return value


def _branch(tree: Tree, path: str) -> Tree:
    """The section of the path, which is made where it is missing."""
    for key in path.split(".")[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    return tree


def _put(done: Translation, source: str, target: str, value: Any) -> None:
    branch, key = _branch(done.tree, target), target.rpartition(".")[2]
    if branch.setdefault(key, value) != value:
        raise NotTranslatable(
            f"{source} and {target} are the same setting, and differ ({value!r}, {branch[key]!r}); remove one"
        )
    done.notes.append(f"{source} is {target} here")
