"""``sava auth``: files that a secured cluster begins with, tokens, and what never stands in a message."""

from __future__ import annotations

import json
import ssl
import stat
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from sava import config
from sava.security.certificates import brokers_of, principal_of, read_certificate
from sava.security.principal import Principal
from sava.security.tokens import TokenVerifier
from tests.support.commands import Sava


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_bootstrap_makes_all_that_a_broker_needs(sava: Sava, tmp_path: Path) -> None:
    home = tmp_path / "auth"
    made = sava(
        f"auth bootstrap {home} --ca --cluster-name shop --broker a.example --broker 10.0.0.2 --user alice "
        "-o json"
    ).json
    assert mode(home) == 0o700
    assert {mode(home / name) for name in made["files"]} == {0o600}
    assert set(made["files"]) == {
        *("token.key", "token.pub", "cluster_secret", "auth.yml", "ca.key", "ca.pem"),
        *(
            f"{name}.{kind}"
            for name in ("a.example", "10.0.0.2", "admin", "alice")
            for kind in ("pem", "key")
        ),
        *("admin.token", "alice.token"),
    }

    settings = tmp_path / "sava.yml"
    settings.write_text(f"cluster_name: shop\n{(home / 'auth.yml').read_text()}")
    auth = config.load(settings, {}).auth
    assert (auth.super_admins, auth.client_certificates) == (("user:admin",), "optional")
    verifier = TokenVerifier(auth.issuers)
    for name in ("admin", "alice"):
        token = (home / f"{name}.token").read_text().strip()
        assert verifier.verify(token).principal == Principal("user", name)
        assert token not in json.dumps(made)

    broker = read_certificate((home / "10.0.0.2.pem").read_bytes())
    assert (brokers_of(broker, "shop"), broker.hosts) == (("10.0.0.2",), ("10.0.0.2",))
    user = read_certificate((home / "alice.pem").read_bytes())
    assert principal_of(user, "shop") == Principal("user", "alice")
    assert brokers_of(user, "shop") == ()


def test_certificates_verify_against_their_authority(sava: Sava, tmp_path: Path) -> None:
    sava(f"auth bootstrap {tmp_path / 'auth'} --ca")
    sava(f"auth certificate {tmp_path / 'auth'} --broker late.example --user bob --out {tmp_path / 'new'}")
    for directory, name in (
        ("auth", "127.0.0.1"),
        ("auth", "admin"),
        ("new", "late.example"),
        ("new", "bob"),
    ):
        context = ssl.create_default_context(cafile=str(tmp_path / "auth" / "ca.pem"))
        # Raises if key and certificate do not belong together.
        context.load_cert_chain(tmp_path / directory / f"{name}.pem", tmp_path / directory / f"{name}.key")
        found = x509.load_pem_x509_certificate((tmp_path / directory / f"{name}.pem").read_bytes())
        own = x509.load_pem_x509_certificate((tmp_path / "auth" / "ca.pem").read_bytes())
        found.verify_directly_issued_by(own)
    again = sava(f"auth certificate {tmp_path / 'auth'} --broker 127.0.0.1", code=1)
    assert "exists" in again.err


def test_a_second_bootstrap_writes_over_nothing(sava: Sava, tmp_path: Path) -> None:
    sava(f"auth bootstrap {tmp_path / 'auth'}")
    before = {path.name: path.read_bytes() for path in (tmp_path / "auth").iterdir()}
    assert "exists" in sava(f"auth bootstrap {tmp_path / 'auth'}", code=1).err
    assert {path.name: path.read_bytes() for path in (tmp_path / "auth").iterdir()} == before


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "a%b", "-x"])
def test_a_name_becomes_no_path(name: str, sava: Sava, tmp_path: Path) -> None:
    refused = sava(f"auth bootstrap {tmp_path / 'auth'} --user={name}", code=2)
    assert "name of a file" in " ".join(refused.err.replace("│", " ").split())
    assert not (tmp_path / "auth").exists()


@pytest.mark.parametrize("algorithm", ["ES256", "ES384", "EdDSA", "RS256", "HS256", "HS512"])
def test_a_token_is_created_and_verified_by_new_keys(algorithm: str, sava: Sava, tmp_path: Path) -> None:
    key = tmp_path / "signing.key"
    sava(f"auth token new-key {key} --algorithm {algorithm}")
    public = key if algorithm.startswith("HS") else tmp_path / "signing.pub"
    named = f"--algorithm {algorithm}" if algorithm == "HS512" else ""
    sava(f"auth token create service_account:billing --key {key} --ttl 2h --out {tmp_path / 'token'} {named}")
    assert mode(key) == mode(tmp_path / "token") == 0o600
    shown = sava(f"auth token verify @{tmp_path / 'token'} --key {public} {named} -o json").json
    assert (shown["valid"], shown["principal"], shown["issuer"]) == (True, "service_account:billing", "sava")


def test_a_token_is_verified_by_the_settings_of_a_broker(
    sava: Sava, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sava(f"auth bootstrap {tmp_path / 'auth'}")
    settings = tmp_path / "auth" / "auth.yml"
    monkeypatch.setenv("SAVA_TOKEN_FILE", str(tmp_path / "auth" / "admin.token"))
    assert "user:admin" in sava(f"auth token verify --config {settings}").out
    sava(f"auth token new-key {tmp_path / 'other'}")
    sava(f"auth token create admin --key {tmp_path / 'other'} --out {tmp_path / 'forged'}")
    refused = sava(f"auth token verify @{tmp_path / 'forged'} --config {settings}", code=1)
    assert "no key of issuer 'sava' has signed the token" in refused.err


def test_a_token_in_the_arguments_is_warned_of(sava: Sava, tmp_path: Path) -> None:
    sava(f"auth bootstrap {tmp_path / 'auth'}")
    token = (tmp_path / "auth" / "admin.token").read_text().strip()
    said = sava(f"auth token verify {token} --config {tmp_path / 'auth' / 'auth.yml'}")
    assert "can be read by every user" in said.err
    assert token not in said.out + said.err
    said = sava(f"auth revoke --token {token}", code=2)
    assert "can be read by every user" in said.err
    assert token not in said.out + said.err


@pytest.mark.parametrize("ttl", ["0d", "5", "1y", "-1h", "", "1h1h"])
def test_a_time_to_live_is_a_number_and_a_unit(ttl: str, sava: Sava, tmp_path: Path) -> None:
    sava(f"auth bootstrap {tmp_path / 'auth'} --ttl={ttl}", code=2)
    assert not (tmp_path / "auth").exists()


def test_the_section_is_what_a_user_pastes(sava: Sava, tmp_path: Path) -> None:
    said = sava(f"auth bootstrap {tmp_path / 'auth'} --ca").out
    section = (tmp_path / "auth" / "auth.yml").read_text()
    assert section in said
    assert list(yaml.safe_load(section)) == ["auth"]
    secret = (tmp_path / "auth" / "cluster_secret").read_text().strip()
    assert secret not in said
