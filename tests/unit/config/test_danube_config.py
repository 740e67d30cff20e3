"""Files that were written for Danube are taken as they stand; what cannot be taken says why."""

from __future__ import annotations

import os
import stat
import time
import warnings
from pathlib import Path
from typing import Any

import jwt
import pytest
import yaml

from sava import config
from sava.config import Config, ConfigInvalid
from sava.danube_config import MOVED, WITHOUT_MEANING, translated
from sava.security.principal import Principal
from sava.security.tokens import TokenVerifier

REFERENCE = """
cluster_name: "production"
broker:
  host: "0.0.0.0"
  ports: {client: 6650, admin: 50051, prometheus: 9040, raft: 6680}
meta_store:
  data_dir: "/var/lib/danube/raft"
  heartbeat_interval_ms: 500
  election_timeout_ms: 3000
  snapshot_threshold: 10000
  max_payload_entries: 300
bootstrap_namespaces: []
auto_create_topics: true
policies:
  max_producers: 0
  max_subscriptions: 0
  max_consumers: 0
  max_message_size: 0
  retention_time_minutes: 0
  retention_size_mb: 0
wal_cloud:
  wal: {dir: "/var/lib/danube/wal"}
  uploader: {interval_seconds: 60}
  cloud: {backend: s3, root: "danube-production"}
  metadata: {in_memory: false}
auth: {mode: "none"}
load_manager:
  assignment_strategy: "round_robin"
  load_report_interval_seconds: 30
  rebalancing:
    {enabled: true, check_interval_seconds: 120, aggressiveness: "moderate", max_moves_per_hour: 10}
"""
"""A complete file of a cluster with an embedded metadata store."""

LIMITS = """
policies:
  max_producers_per_topic: 4
  max_subscriptions_per_topic: 5
  max_consumers_per_topic: 6
  max_consumers_per_subscription: 7
  max_publish_rate: 8
  max_dispatch_rate: 0
  max_subscription_dispatch_rate: 9
  max_message_size: 10485760
"""
BALANCING = """
load_manager:
  assignment_strategy: "fair"
  load_report_interval_seconds: 30
  rebalancing:
    enabled: false
    aggressiveness: "balanced"
    check_interval_seconds: 300
    max_moves_per_hour: 10
    cooldown_seconds: 60
    min_brokers_for_rebalance: 3
    min_topic_age_seconds: 300
    blacklist_topics: ["/default/quiet"]
"""
WITH_ETCD = (
    """
cluster_name: "MY_CLUSTER"
broker_host: "0.0.0.0"
broker_port: 6651
admin_port: 50052
prom_port: 9041
meta_store_host: "127.0.0.1"
meta_store_port: 2379
bootstrap_namespaces: ["default"]
auto_create_topics: true
auth:
  mode: tlswithjwt
  tls: {cert_file: ./c.pem, key_file: ./k.pem, ca_file: ./ca.pem, verify_client: false}
  jwt: {secret_key: "marker-of-a-secret", issuer: "danube-auth", expiration_time: 3600}
wal_cloud:
  wal:
    dir: "./danube-data/wal"
    file_name: "wal.log"
    cache_capacity: 1024
    file_sync: {interval_ms: 5000, max_batch_bytes: 10485760}
    rotation: {max_bytes: 536870912}
    retention: {time_minutes: 2880, size_mb: 20480, check_interval_minutes: 5}
  uploader: {enabled: true, interval_seconds: 300, root_prefix: "/danube-data", max_object_mb: 1024}
  cloud: {backend: "memory", root: "mem-prefix"}
  metadata: {etcd_endpoint: "127.0.0.1:2379", in_memory: false}
"""
    + LIMITS
)
"""Danube's file as it was while it needed etcd."""

WITH_RAFT = (
    """
cluster_name: "MY_CLUSTER"
broker:
  host: "0.0.0.0"
  ports: {client: 6650, admin: 50051, raft: 7650, prometheus: 9040}
  advertised_listeners: {broker_url: "http://broker-1.example:6650", connect_url: "http://proxy.example:6650"}
meta_store: {data_dir: "./danube-data/raft"}
bootstrap_namespaces: ["default"]
auto_create_topics: true
auth:
  mode: tls
  tls: {cert_file: ./c.pem, key_file: ./k.pem, ca_file: ./ca.pem}
  jwt: {secret_key: "marker-of-a-secret", issuer: "danube-auth", expiration_time: 3600}
  super_admins: ["admin"]
admin_tls: true
storage:
  mode: local
  local_wal_root: "./danube-data/wal"
  metadata_prefix: "/danube"
  local_retention: {time_minutes: 2880, size_mb: 20480, check_interval_minutes: 5}
  wal: {rotation: {max_bytes: 536870912, max_hours: 24}, cache_capacity: 1024}
  write_buffer:
    backend: valkey
    endpoints: ["redis://127.0.0.1:6379"]
    wait_replicas: 0
    wait_timeout_ms: 100
    on_wait_timeout: fail
    max_cached_closed_segments: 5
dispatch: {max_unacked_messages: 10}
"""
    + LIMITS
    + BALANCING
)
"""Danube's file as it is now, with all that it may hold."""


def load(tmp_path: Path, text: str, environment: dict[str, str] | None = None) -> Config:
    file = tmp_path / "danube_broker.yml"
    file.write_text(text)
    return config.load(file, environment or {})


def test_the_complete_reference_is_taken(tmp_path: Path) -> None:
    """``wal_cloud`` used to be refused as an unknown key."""
    loaded = load(tmp_path, REFERENCE)
    assert loaded.storage.url == "s3://danube-production"
    assert loaded.storage.journal_dir == Path("/var/lib/danube/wal")
    assert loaded.storage.upload_interval_seconds == 60
    assert set(loaded.notes) == {
        "wal_cloud.cloud is storage.url here",
        "wal_cloud.wal.dir is storage.journal_dir here",
        "wal_cloud.uploader.interval_seconds is storage.upload_interval_seconds here",
        "wal_cloud.metadata is ignored: metadata is in the embedded Raft store",
    }


def test_the_file_of_a_danube_with_etcd_is_taken(tmp_path: Path) -> None:
    loaded = load(tmp_path, WITH_ETCD)
    ports = loaded.broker.ports
    assert (ports.client, ports.admin, ports.prometheus) == (6651, 50052, 9041)
    assert loaded.auth.tls is not None
    assert loaded.storage.url == Config().storage.url, "and not in memory"
    assert any("messages would be lost" in note for note in loaded.notes)
    policies = loaded.policies
    assert (policies.max_producers, policies.max_subscriptions, policies.max_consumers) == (4, 5, 6)
    assert (policies.max_consumers_per_subscription, policies.max_publish_rate) == (7, 8)
    assert not any("marker-of-a-secret" in note for note in loaded.notes)


def test_the_file_of_a_danube_with_raft_is_taken(tmp_path: Path) -> None:
    loaded = load(tmp_path, WITH_RAFT)
    assert loaded.broker.advertised_host == "broker-1.example"
    assert loaded.storage.journal_dir == Path("./danube-data/wal")
    rebalancing = loaded.load_manager.rebalancing
    assert (rebalancing.aggressiveness, rebalancing.min_brokers) == ("moderate", 3)
    assert rebalancing.exclude_topics == ("/default/quiet",)
    assert any(
        note.startswith("storage.write_buffer is ignored: journals have copies") for note in loaded.notes
    )
    assert "auth.jwt is ignored: auth.mode is tls" in loaded.notes
    assert loaded.auth.super_admins == ("admin",)


def test_danubes_tokens_are_checked_by_its_secret(tmp_path: Path) -> None:
    """The secret stands in the file; brokers read it from one that its owner alone can read."""
    loaded = load(tmp_path, WITH_ETCD, {"SAVA__META_STORE__DATA_DIR": str(tmp_path / "data")})
    kept = tmp_path / "data" / "danube_jwt_secret"
    assert not kept.exists(), "a command that only reads settings writes nothing"
    for _ in range(2):
        loaded.keep_secret()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert loaded.auth.client_certificates == "optional"
    claims = {
        "iss": "danube-auth",
        "sub": "billing",
        "exp": int(time.time()) + 60,
        "principal_type": "service_account",
        "principal_name": "billing",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        token = jwt.encode(claims, "marker-of-a-secret", algorithm="HS256")
    verified = TokenVerifier(loaded.auth.issuers).verify(token)
    assert verified.principal == Principal("service_account", "billing")
    assert loaded.auth.super_admins == ("user:admin",)
    assert any(note.startswith("auth.super_admins is not set") for note in loaded.notes)
    assert "marker-of-a-secret" not in f"{loaded!r} {loaded.notes}"

    changed = load(
        tmp_path,
        WITH_ETCD.replace("marker-of-a-secret", "another-secret"),
        {"SAVA__META_STORE__DATA_DIR": str(tmp_path / "data")},
    )
    changed.keep_secret()
    assert kept.read_text() == "another-secret\n"


@pytest.mark.parametrize(
    ("section", "url"),
    [
        ({"mode": "shared_fs", "durable": {"root": "/mnt/shared"}}, "file:///mnt/shared"),
        ({"mode": "object_store", "durable": {"backend": "s3", "root": "s3://b/p"}}, "s3://b/p"),
        ({"mode": "object_store", "durable": {"backend": "gcs", "root": "gcs://b/p"}}, "gs://b/p"),
        ({"mode": "object_store", "durable": {"backend": "azblob", "root": "box/p"}}, "az://box/p"),
        ({"mode": "object_store", "durable": {"backend": "fs", "root": "/mnt/x"}}, "file:///mnt/x"),
    ],
)
def test_an_object_store_becomes_a_url(tmp_path: Path, section: dict[str, Any], url: str) -> None:
    assert load(tmp_path, yaml.safe_dump({"storage": section})).storage.url == url


def test_credentials_go_to_the_environment_and_into_no_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the environment")
    cloud = {
        "backend": "s3",
        "root": "s3://messages/data",
        "region": "us-east-1",
        "endpoint": "http://minio:9000",
        "access_key": "marker-of-a-key",
        "secret_key": "marker-of-a-secret",
        "anonymous": False,
        "virtual_host_style": False,
        "profile": None,
    }
    loaded = load(tmp_path, yaml.safe_dump({"wal_cloud": {"cloud": cloud}}))
    assert os.environ["AWS_ENDPOINT_URL"] == "http://minio:9000"
    assert os.environ["AWS_ACCESS_KEY_ID"] == "marker-of-a-key"
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "of the environment"
    assert not any("marker" in note for note in loaded.notes)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("wal_cloud: {wal: {dirr: x}}", "wal_cloud: unknown key"),
        ("wal_cloud: {cloud: {backend: tape, root: x}}", "wal_cloud.cloud.backend: 'tape' is none of"),
        ("wal_cloud: {cloud: {backend: s3}}", "wal_cloud.cloud.root: a text is needed"),
        ("wal_cloud: {cloud: {backend: s3, root: x, role_arn: y}}", "wal_cloud.cloud.role_arn: give it to"),
        ("wal_cloud: {cloud: text}", "wal_cloud.cloud: expected keys"),
        ("storage: {mode: cloudy}", "storage.mode: 'cloudy' is none of"),
        ("broker: {advertised_listeners: {broker_url: ''}}", "names no host"),
        (
            "auth: {mode: tlswithjwt, tls: {cert_file: c, key_file: k, ca_file: a}}",
            "auth.mode: tlswithjwt needs auth.jwt.secret_key",
        ),
        (
            "auth: {mode: tlswithjwt, tls: {cert_file: c, key_file: k, ca_file: a}, jwt: {secret_key: ' x'}}",
            "auth.jwt.secret_key: it has a line break, or a space",
        ),
        ("admin_tls: true", "admin_tls: the admin port has TLS when auth.tls has files"),
        (
            "{storage: {local_wal_root: /a, journal_dir: /b}}",
            "storage.local_wal_root and storage.journal_dir are the same setting, and differ",
        ),
    ],
)
def test_what_cannot_be_taken_is_refused_with_the_way_out(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigInvalid, match="refused") as caught:
        load(tmp_path, text)
    assert complaint in str(caught.value)


def test_the_environment_and_the_command_line_win_over_danubes_names(tmp_path: Path) -> None:
    loaded = load(tmp_path, REFERENCE, {"SAVA__STORAGE__JOURNAL_DIR": "/elsewhere"})
    assert loaded.storage.journal_dir == Path("/elsewhere")


def test_a_file_of_savas_own_has_no_notes(tmp_path: Path) -> None:
    assert load(tmp_path, "storage: {url: 'file:///x'}").notes == ()


@pytest.mark.parametrize("path", [*MOVED, *WITHOUT_MEANING])
def test_no_key_of_danubes_is_also_one_of_savas(path: str) -> None:
    """It could not be told which one a file means."""
    tree: Any = "value"
    for key in reversed(path.split(".")):
        tree = {key: tree}
    with pytest.raises(ConfigInvalid, match="unknown key"):
        config.check(tree, source="test")
    assert translated({}).notes == []
