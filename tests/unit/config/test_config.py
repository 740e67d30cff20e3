"""The configuration is complete, strict, and says where it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sava import config
from sava.config import Config, ConfigInvalid

SEED = """
cluster_name: production
broker:
  host: 0.0.0.0
  ports: {client: 6650, admin: 50051, prometheus: 9040, raft: 7650}
meta_store:
  data_dir: /var/lib/sava/raft
  heartbeat_interval_ms: 500
  election_timeout_ms: 3000
  snapshot_threshold: 10000
  max_payload_entries: 300
bootstrap_namespaces: [default]
auto_create_topics: true
policies: {max_producers: 0, max_message_size: 0, retention_time_minutes: 0}
storage: {url: "s3://bucket/prefix"}
auth: {mode: none}
load_manager:
  assignment_strategy: round_robin
  load_report_interval_seconds: 30
  rebalancing: {enabled: true, check_interval_seconds: 120, aggressiveness: moderate, max_moves_per_hour: 10}
"""


def test_the_example_of_the_seed_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "sava.yaml"
    file.write_text(SEED)
    loaded = config.load(file, {})
    assert loaded.cluster_name == "production"
    assert loaded.bootstrap_namespaces == ("default",)
    assert loaded.meta_store.data_dir == Path("/var/lib/sava/raft")


def test_no_file_means_defaults_and_those_fail_over_within_three_seconds() -> None:
    loaded = config.load(None, {})
    assert loaded == Config()
    assert 2 * loaded.meta_store.election_timeout_ms < 3000
    assert (loaded.broker.ports.client, loaded.broker.ports.raft) == (6650, 7650)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("brokr: {}", "brokr: unknown key"),
        ("broker: {ports: {rafft: 1}}", "broker.ports.rafft: unknown key"),
        ("broker: {ports: {raft: '7650'}}", "broker.ports.raft: "),
        ("broker: {ports: {raft: 70000}}", "broker.ports.raft: "),
        ("auto_create_topics: 1", "auto_create_topics: "),
        ("meta_store: {heartbeat_interval_ms: 100, election_timeout_ms: 200}", "meta_store: "),
        ("auth: {tls: {cert_file: a}}", "auth.tls.key_file: "),
        ("- a\n- b", "expected keys at the top"),
        ("a: [", "not YAML"),
        ("a: 2024-01-01", "of a kind that no key takes"),
    ],
)
def test_what_is_wrong_is_refused_with_its_path(tmp_path: Path, text: str, path: str) -> None:
    file = tmp_path / "sava.yaml"
    file.write_text(text)
    with pytest.raises(ConfigInvalid) as refused:
        config.load(file, {})
    assert path in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "sava.yaml"
    file.write_text("{brokr: 1, auto_create_topics: 3}")
    with pytest.raises(ConfigInvalid, match=r"auto_create_topics.*brokr|brokr.*auto_create_topics"):
        config.load(file, {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"nowhere\.yaml"):
        config.load(tmp_path / "nowhere.yaml", {})


def leaves(section: type[config.SettingsSection], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, field in section.model_fields.items():
        annotation: Any = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, config.SettingsSection):
            found += leaves(annotation, (*path, name))
        else:
            found.append((*path, name))
    return found


@pytest.mark.parametrize("path", leaves(Config), ids=".".join)
def test_every_key_can_be_overridden_by_the_environment(path: tuple[str, ...]) -> None:
    value: Any = Config().model_dump(mode="json")
    for name in path:
        value = value[name]
    variable = "SAVA__" + "__".join(path).upper()
    assert config.load(None, {variable: _yaml(value)}) == Config()
    with pytest.raises(ConfigInvalid, match=path[0]):
        config.load(None, {variable: "{no: such}"})


def _yaml(value: Any) -> str:
    import json

    return json.dumps(value)


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "sava.yaml"
    file.write_text("{cluster_name: file, broker: {host: file, ports: {raft: 1, admin: 2}}}")
    environment = {"SAVA__BROKER__HOST": "environment", "SAVA__BROKER__PORTS__RAFT": "3"}
    loaded = config.load(file, environment, {"broker": {"host": "line"}})
    assert loaded.cluster_name == "file"
    assert loaded.broker.host == "line"
    assert (loaded.broker.ports.raft, loaded.broker.ports.admin) == (3, 2)


def test_the_advertised_host() -> None:
    assert config.load(None, {"SAVA__BROKER__HOST": "10.0.0.1"}).broker.reachable_host == "10.0.0.1"
    assert config.load(None, {}).broker.reachable_host == config.load(None, {}).broker.host == "127.0.0.1"
    everywhere = config.load(None, {"SAVA__BROKER__HOST": "0.0.0.0"}).broker
    assert everywhere.reachable_host not in ("", "0.0.0.0", "127.0.0.1")
    variables = {"SAVA__BROKER__ADVERTISED_HOST": "broker-1"}
    assert config.load(None, variables).broker.reachable_host == "broker-1"


@pytest.mark.parametrize("value", ["true", "false"])
def test_pulsar_s_name_for_creating_topics_at_remotes_is_taken(tmp_path: Path, value: str) -> None:
    path = tmp_path / "sava.yml"
    path.write_text(f"createTopicToRemoteClusterForReplication: {value}\n")
    assert config.load(path, {}).replication.create_topic_to_remote_cluster == (value == "true")
    variable = {"SAVA__CREATETOPICTOREMOTECLUSTERFORREPLICATION": value}
    assert config.load(None, variable).replication.create_topic_to_remote_cluster == (value == "true")


def test_one_setting_under_two_names_must_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "sava.yml"
    here = "replication: {create_topic_to_remote_cluster: true}\n"
    path.write_text(f"{here}createTopicToRemoteClusterForReplication: true\n")
    assert config.load(path, {}).replication.create_topic_to_remote_cluster
    path.write_text(f"{here}createTopicToRemoteClusterForReplication: false\n")
    with pytest.raises(ConfigInvalid, match="are the same setting, and differ"):
        config.load(path, {})


@pytest.mark.parametrize("text", ["createTopicToRemoteClusterForReplication: 7", "replication: 7"])
def test_pulsar_s_name_is_checked_like_any_other(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sava.yml"
    path.write_text(f"{text}\ncreateTopicToRemoteClusterForReplication: 7\n")
    with pytest.raises(ConfigInvalid, match="replication"):
        config.load(path, {})
