"""What a broker accepts as a token, and what it refuses; keys that change while it runs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from sava.config import ConfigInvalid, check
from sava.security import tokens
from sava.security.principal import Principal
from sava.security.tokens import (
    KeysInvalid,
    KeysUnavailable,
    SecretExists,
    TokenInvalid,
    TokenIssuer,
    TokenVerifier,
    create_token,
    new_key_pair,
    new_secret,
    write_private,
)

ALICE = Principal("user", "alice")
SECRET = b"0123456789abcdef0123456789abcdef"
OTHER = b"fedcba9876543210fedcba9876543210"
ASYMMETRIC = ("RS256", "ES256", "ES384", "EdDSA")


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    write_private(path, SECRET + b"\n")
    return path


@pytest.fixture
def verifier(secret_file: Path, clock: Clock) -> TokenVerifier:
    return TokenVerifier([TokenIssuer("sava", secret_file=secret_file)], 30, clock=clock)


def claims_of(clock: Clock, **changes: Any) -> dict[str, Any]:
    claims = {"iss": "sava", "sub": "alice", "exp": int(clock.now) + 600, **changes}
    return {name: value for name, value in claims.items() if value is not None}


def signed(claims: dict[str, Any], secret: bytes = SECRET, **header: Any) -> str:
    return jwt.encode(claims, secret, algorithm="HS256", headers=header)


def part(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def by_hand(header: object, claims: object, secret: bytes | None = SECRET) -> str:
    """What a library refuses to sign."""
    signing = f"{part(header)}.{part(claims)}"
    signature = hmac.new(secret, signing.encode(), hashlib.sha256).digest() if secret is not None else b""
    return f"{signing}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def refusal(verifier: TokenVerifier, token: str) -> str:
    with pytest.raises(TokenInvalid) as caught:
        verifier.verify(token)
    assert len(str(caught.value)) < 400
    return str(caught.value)


# -- what is accepted ------------------------------------------------------------------------------


def test_a_token_that_was_created_names_its_principal(verifier: TokenVerifier, clock: Clock) -> None:
    token = create_token("sava", ALICE, 60, SECRET, now=clock.now)
    verified = verifier.verify(token)
    assert (verified.principal, verified.issuer) == (ALICE, "sava")
    assert verified.token_id == jwt.decode(token, options={"verify_signature": False})["jti"]
    assert clock.now + 90 <= verified.expires_at <= clock.now + 92


@pytest.mark.parametrize("algorithm", [*ASYMMETRIC, "HS384", "HS512"])
def test_every_algorithm_signs_and_verifies(algorithm: str, tmp_path: Path) -> None:
    if algorithm.startswith("HS"):
        signer = 2 * new_secret()
        (tmp_path / "key").write_bytes(signer)
        issuer = TokenIssuer("sava", algorithm, secret_file=tmp_path / "key")
    else:
        signer, public = new_key_pair(algorithm)
        (tmp_path / "key").write_bytes(public)
        issuer = TokenIssuer("sava", algorithm, public_key_file=tmp_path / "key")
    token = create_token("sava", ALICE, 60, signer, algorithm=algorithm)
    assert TokenVerifier([issuer]).verify(token).principal == ALICE


def test_claims_as_danube_has_them_name_the_principal(verifier: TokenVerifier, clock: Clock) -> None:
    claims = claims_of(clock, sub="id-17", principal_type="service_account", principal_name="billing")
    assert verifier.verify(signed(claims)).principal == Principal("service_account", "billing")


def test_a_token_without_type_is_the_user_in_sub(verifier: TokenVerifier, clock: Clock) -> None:
    verified = verifier.verify(signed(claims_of(clock, sub="system:serviceaccount:shop:cart")))
    assert verified.principal == Principal("user", "system:serviceaccount:shop:cart")
    assert Principal.parse(str(verified.principal)) == verified.principal


def test_a_token_without_jti_is_known_by_its_hash(verifier: TokenVerifier, clock: Clock) -> None:
    token = signed(claims_of(clock))
    assert verifier.verify(token).token_id == f"sha256:{hashlib.sha256(token.encode()).hexdigest()[:32]}"


def test_two_issuers_of_one_name_may_use_two_algorithms(tmp_path: Path, secret_file: Path) -> None:
    private, public = new_key_pair("ES256")
    (tmp_path / "public").write_bytes(public)
    verifier = TokenVerifier(
        [
            TokenIssuer("sava", secret_file=secret_file),
            TokenIssuer("sava", "ES256", public_key_file=tmp_path / "public"),
        ]
    )
    assert verifier.verify(create_token("sava", ALICE, 60, SECRET)).principal == ALICE
    assert verifier.verify(create_token("sava", ALICE, 60, private, algorithm="ES256")).principal == ALICE


def test_a_secret_as_short_as_in_danube_files_works_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "secret").write_bytes(b"short")
    with caplog.at_level(logging.WARNING):
        verifier = TokenVerifier([TokenIssuer("sava", secret_file=tmp_path / "secret")])
    assert "can be guessed" in caplog.text
    assert verifier.verify(create_token("sava", ALICE, 60, b"short")).principal == ALICE


def test_a_secret_that_others_may_read_is_warned_of(
    secret_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        TokenVerifier([TokenIssuer("sava", secret_file=secret_file)])
        assert caplog.text == ""
        secret_file.chmod(0o644)
        TokenVerifier([TokenIssuer("sava", secret_file=secret_file)])
    assert "others may read the secret file" in caplog.text
    assert SECRET.decode() not in caplog.text


# -- what is refused -------------------------------------------------------------------------------


def test_a_token_without_signature_is_refused(verifier: TokenVerifier, clock: Clock) -> None:
    for name in ("none", "None", "NONE", "nOnE"):
        token = by_hand({"alg": name, "typ": "JWT"}, claims_of(clock), None)
        assert "signed by" in refusal(verifier, token)
    whole = signed(claims_of(clock))
    refusal(verifier, whole.rpartition(".")[0] + ".")


@pytest.mark.parametrize("algorithm", ASYMMETRIC)
def test_the_text_of_a_public_key_is_no_secret(algorithm: str, tmp_path: Path, clock: Clock) -> None:
    """The known attack: the token says HS256, and the bytes that all clients know sign it."""
    _, public = new_key_pair(algorithm)
    (tmp_path / "public").write_bytes(public)
    verifier = TokenVerifier([TokenIssuer("sava", algorithm, public_key_file=tmp_path / "public")])
    for text in (public, public.strip(), public + b"\n"):
        assert "signed by 'HS256'" in refusal(verifier, by_hand({"alg": "HS256"}, claims_of(clock), text))


def test_another_hash_than_the_issuers_is_refused(verifier: TokenVerifier, clock: Clock) -> None:
    token = jwt.encode(claims_of(clock), 2 * SECRET, algorithm="HS512")
    assert "and issuer 'sava' by HS256" in refusal(verifier, token)


def test_another_secret_and_a_changed_claim_are_refused(verifier: TokenVerifier, clock: Clock) -> None:
    assert "no key" in refusal(verifier, signed(claims_of(clock), OTHER))
    header, _, signature = signed(claims_of(clock)).split(".")
    assert "no key" in refusal(verifier, f"{header}.{part(claims_of(clock, sub='root'))}.{signature}")


def test_keys_that_a_token_brings_along_are_not_looked_at(verifier: TokenVerifier, clock: Clock) -> None:
    for header in (
        {"jku": "http://127.0.0.1:1/"},
        {"jwk": {"kty": "oct", "k": part("k")}},
        {"x5u": "http://x/"},
    ):
        assert "no key" in refusal(verifier, signed(claims_of(clock), OTHER, **header))


@pytest.mark.parametrize("header", [{"crit": ["exp"]}, {"crit": ["b64"], "b64": False}, {"b64": False}])
def test_extensions_are_refused(header: dict[str, Any], verifier: TokenVerifier, clock: Clock) -> None:
    refusal(verifier, by_hand({"alg": "HS256", **header}, claims_of(clock)))


@pytest.mark.parametrize("issuer", ["other", "SAVA", "sava ", "", ["sava"], 7, None])
def test_another_issuer_is_refused(issuer: object, verifier: TokenVerifier, clock: Clock) -> None:
    assert "issuer" in refusal(verifier, by_hand({"alg": "HS256"}, claims_of(clock, iss=issuer)))


def test_the_audience_is_checked_where_it_is_set(secret_file: Path, clock: Clock) -> None:
    issuer = TokenIssuer("sava", audience="orders", secret_file=secret_file)
    verifier = TokenVerifier([issuer], clock=clock)
    for audience in ("billing", ["billing"], [], None, "ORDERS"):
        assert "refused" in refusal(verifier, by_hand({"alg": "HS256"}, claims_of(clock, aud=audience)))
    for audience in ("orders", ["billing", "orders"]):
        assert verifier.verify(signed(claims_of(clock, aud=audience))).principal == ALICE


def test_a_token_for_another_audience_passes_where_none_is_set(verifier: TokenVerifier, clock: Clock) -> None:
    assert verifier.verify(signed(claims_of(clock, aud="billing"))).principal == ALICE


def test_the_end_is_kept_with_the_skew_of_clocks(verifier: TokenVerifier, clock: Clock) -> None:
    token = signed(claims_of(clock, exp=int(clock.now) + 10))
    assert verifier.verify(token).principal == ALICE
    clock.now += 39
    assert verifier.verify(token).principal == ALICE
    clock.now += 2
    assert "expired" in refusal(verifier, token)


def test_a_token_is_refused_until_it_begins(verifier: TokenVerifier, clock: Clock) -> None:
    token = signed(claims_of(clock, nbf=int(clock.now) + 40))
    assert "not valid yet" in refusal(verifier, token)
    clock.now += 11
    assert verifier.verify(token).principal == ALICE


def test_a_token_without_end_is_refused(verifier: TokenVerifier, clock: Clock) -> None:
    assert "exp" in refusal(verifier, signed(claims_of(clock, exp=None)))


@pytest.mark.parametrize("end", ["tomorrow", True, [], {}, float("nan"), float("inf"), 10**400, "9999999999"])
def test_an_end_that_is_no_time_is_refused(end: object, verifier: TokenVerifier, clock: Clock) -> None:
    assert "exp" in refusal(verifier, by_hand({"alg": "HS256"}, claims_of(clock, exp=end)))


@pytest.mark.parametrize(
    "kind", ["broker", "anonymous", "broker_internal", "Broker", "us er", "a:b", 7, ["user"]]
)
def test_a_token_makes_no_broker(kind: object, verifier: TokenVerifier, clock: Clock) -> None:
    assert "token" in refusal(verifier, signed(claims_of(clock, principal_type=kind, principal_name="1")))


@pytest.mark.parametrize("name", [None, "", "a b", "a\nb", "\u0430dmin", "x" * 257, 7, ["alice"], {"a": 1}])
def test_a_name_is_short_printable_ascii(name: object, verifier: TokenVerifier, clock: Clock) -> None:
    claims = claims_of(clock, sub=None, principal_name=name)
    assert "principal_name" in refusal(verifier, by_hand({"alg": "HS256"}, claims))


@pytest.mark.parametrize("name", [7, ["x"], "x" * 257, "a\nb"])
def test_a_jti_is_a_short_text(name: object, verifier: TokenVerifier, clock: Clock) -> None:
    assert "jti" in refusal(verifier, by_hand({"alg": "HS256"}, claims_of(clock, jti=name)))


def test_a_huge_token_is_refused_before_it_is_opened(
    verifier: TokenVerifier, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = signed(claims_of(clock, pad="x" * (16 << 10)))
    monkeypatch.setattr(jwt, "decode_complete", pytest.fail)
    assert "16384 bytes" in refusal(verifier, token)


@pytest.mark.parametrize(
    "token",
    [
        *("", ".", "..", "...", "a.b.c", "\x00.\x00.\x00", "é.é.é", "Bearer x", " "),
        f"{part('[' * 6000)}.{part({})}.",
        f"{part({'alg': 'HS256'})}.{part('[' * 9000)}.",
        f"{part({'alg': 'HS256'})}.{part('9' * 8000)}.",
        f"{part([])}.{part({})}.",
        f"{part({'alg': 'HS256'})}.{part([])}.",
        f"{part({'alg': ['HS256'], 'kid': 'k'})}.{part({'iss': 'sava'})}.",
        f"{part({'alg': {}, 'kid': 'k'})}.{part({'iss': 'sava'})}.",
        f"{part({'alg': 'HS256', 'kid': 7})}.{part({'iss': 'sava'})}.",
    ],
)
def test_garbage_is_refused(token: str, verifier: TokenVerifier) -> None:
    refusal(verifier, token)


def test_no_error_holds_the_token(verifier: TokenVerifier, clock: Clock) -> None:
    for token in (signed(claims_of(clock), OTHER), signed(claims_of(clock, exp=1)), "marker.marker.marker"):
        text = refusal(verifier, token)
        assert not any(piece in text for piece in token.split("."))


# -- memory ----------------------------------------------------------------------------------------


def test_a_known_token_is_not_verified_again(
    verifier: TokenVerifier, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = signed(claims_of(clock))
    first = verifier.verify(token)
    opened: list[str] = []
    seen = tokens._opened
    monkeypatch.setattr(tokens, "_opened", lambda token: opened.__iadd__([token]) and seen(token))
    clock.now += 29
    assert verifier.verify(token) is first
    assert opened == []
    clock.now += 2
    verifier.verify(token)
    assert opened == [token]


def test_the_memory_of_tokens_is_bounded(
    verifier: TokenVerifier, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "REMEMBERED", 5)
    for number in range(20):
        verifier.verify(signed(claims_of(clock, jti=str(number))))
    assert len(verifier._remembered) == 5


# -- keys that change ------------------------------------------------------------------------------


def test_a_new_secret_joins_the_old_and_the_old_then_goes(
    verifier: TokenVerifier, clock: Clock, secret_file: Path
) -> None:
    old, new = signed(claims_of(clock)), signed(claims_of(clock), OTHER)
    assert verifier.verify(old).principal == ALICE
    assert "no key" in refusal(verifier, new)

    secret_file.write_bytes(SECRET + b"\n" + OTHER + b"\n")
    clock.now += 2.1
    assert verifier.verify(old).principal == verifier.verify(new).principal == ALICE

    secret_file.write_bytes(OTHER + b"\n")
    clock.now += 2.1
    assert verifier.verify(new).principal == ALICE
    assert "no key" in refusal(verifier, old)  # although it was remembered


def test_a_file_is_looked_at_every_two_seconds_only(
    verifier: TokenVerifier, clock: Clock, secret_file: Path
) -> None:
    secret_file.write_bytes(OTHER)
    clock.now += 1.9
    assert "no key" in refusal(verifier, signed(claims_of(clock), OTHER))
    clock.now += 0.2
    assert verifier.verify(signed(claims_of(clock), OTHER)).principal == ALICE


def test_a_clock_that_was_set_back_does_not_stop_the_rotation(
    verifier: TokenVerifier, clock: Clock, secret_file: Path
) -> None:
    clock.now -= 100_000
    secret_file.write_bytes(OTHER)
    assert verifier.verify(signed(claims_of(clock), OTHER)).principal == ALICE


@pytest.mark.parametrize("content", [b"", b"\n\n", None, b"x" * (2 << 20)])
def test_a_file_that_breaks_keeps_its_keys(
    content: bytes | None,
    verifier: TokenVerifier,
    clock: Clock,
    secret_file: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if content is None:
        secret_file.unlink()
    else:
        secret_file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.now += 3
            assert verifier.verify(signed(claims_of(clock))).principal == ALICE
    assert caplog.text.count("the keys that it had stay valid") == 1


def test_a_file_with_several_public_keys_takes_each(tmp_path: Path) -> None:
    pairs = [new_key_pair("ES256") for _ in range(3)]
    (tmp_path / "public").write_bytes(b"a comment\n" + b"\n".join(public for _, public in pairs[:2]))
    verifier = TokenVerifier([TokenIssuer("sava", "ES256", public_key_file=tmp_path / "public")])
    for private, _ in pairs[:2]:
        verifier.verify(create_token("sava", ALICE, 60, private, algorithm="ES256"))
    assert "no key" in refusal(verifier, create_token("sava", ALICE, 60, pairs[2][0], algorithm="ES256"))


def test_files_that_hold_no_fitting_key_are_refused_at_the_start(tmp_path: Path) -> None:
    private, public = new_key_pair("ES256")
    weak = b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"
    path = tmp_path / "key"
    for content, algorithm in [
        *((private, "ES256"), (public, "RS256"), (public, "ES384"), (public, "EdDSA")),
        *((b"nothing", "ES256"), (weak, "ES256"), (b"", "ES256")),
    ]:
        path.write_bytes(content)
        with pytest.raises(KeysInvalid, match="key"):
            TokenVerifier([TokenIssuer("sava", algorithm, public_key_file=path)])
    path.write_bytes(public)
    with pytest.raises(KeysInvalid, match="no secret"):
        TokenVerifier([TokenIssuer("sava", secret_file=path)])
    with pytest.raises(KeysInvalid, match="cannot be read"):
        TokenVerifier([TokenIssuer("sava", secret_file=tmp_path / "missing")])


# -- key sets --------------------------------------------------------------------------------------


def jwk_of(public: bytes, algorithm: str, **fields: object) -> dict[str, Any]:
    signer = jwt.get_algorithm_by_name(algorithm)
    return {**json.loads(signer.to_jwk(load_pem_public_key(public))), **fields}


def token_by(private: bytes, clock: Clock, algorithm: str = "ES256", **header: Any) -> str:
    return jwt.encode(claims_of(clock), private.decode(), algorithm=algorithm, headers=header)


def test_the_kid_chooses_the_key_of_a_set(tmp_path: Path, clock: Clock) -> None:
    (first, first_public), (second, second_public) = new_key_pair("ES256"), new_key_pair("ES256")
    stranger, foreign = new_key_pair("RS256")[1], new_key_pair("ES384")[1]
    keys = [
        jwk_of(first_public, "ES256", kid="1"),
        jwk_of(second_public, "ES256", kid="2", use="sig", alg="ES256"),
        jwk_of(stranger, "RS256", kid="3"),
        jwk_of(foreign, "ES384", kid="4"),
        jwk_of(first_public, "ES256", kid="5", use="enc"),
        {"kty": "oct", "k": part("secret"), "kid": "6"},
        {"kty": "EC", "crv": "P-256", "x": "broken", "kid": "7"},
    ]
    (tmp_path / "jwks").write_text(json.dumps({"keys": keys}))
    verifier = TokenVerifier([TokenIssuer("sava", "ES256", jwks_file=tmp_path / "jwks")], clock=clock)
    assert verifier.verify(token_by(first, clock, kid="1")).principal == ALICE
    assert verifier.verify(token_by(second, clock, kid="2")).principal == ALICE
    for private, kid in [
        (first, "2"),
        (second, "1"),
        (first, "5"),
        (first, "6"),
        (first, "../../etc/passwd"),
    ]:
        assert "no key" in refusal(verifier, token_by(private, clock, kid=kid))
    assert "no key" in refusal(verifier, token_by(first, clock))  # which one, it does not say
    secret = by_hand({"alg": "HS256", "kid": "6"}, claims_of(clock), b"secret")
    assert "signed by 'HS256'" in refusal(verifier, secret)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"keys": {}}', '{"keys": []}', "[" * 100_000, "null"])
def test_a_set_without_keys_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "jwks").write_text(content)
    with pytest.raises(KeysInvalid, match="key"):
        TokenVerifier([TokenIssuer("sava", "ES256", jwks_file=tmp_path / "jwks")])


class KeyServer(ThreadingHTTPServer):
    """An issuer's server on this machine."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), KeyHandler)
        self.answer: bytes = b""
        self.status = 200
        self.asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/keys"

    def show(self, *keys: dict[str, Any]) -> None:
        self.answer = json.dumps({"keys": list(keys)}).encode()


class KeyHandler(BaseHTTPRequestHandler):
    server: KeyServer

    def do_GET(self) -> None:
        self.server.asked += 1
        self.server.may_answer.wait(10)
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", "/keys")
        self.send_header("Content-Length", str(len(self.server.answer)))
        self.end_headers()
        try:
            self.wfile.write(self.server.answer)
        except OSError:
            return  # the broker has read enough

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[KeyServer]:
    with KeyServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.may_answer.set()
        server.shutdown()
        thread.join()


async def test_a_set_is_fetched_once_and_kept_for_five_minutes(server: KeyServer, clock: Clock) -> None:
    private, public = new_key_pair("ES256")
    server.show(jwk_of(public, "ES256", kid="1"))
    verifier = TokenVerifier([TokenIssuer("sava", "ES256", jwks_url=server.url)], clock=clock)
    token = token_by(private, clock, kid="1")
    found = await asyncio.gather(*(verifier.authenticate(token) for _ in range(20)))
    assert {each.principal for each in found} == {ALICE}
    clock.now += 299
    assert (await verifier.authenticate(token)).principal == ALICE
    assert server.asked == 1


async def test_a_set_is_fetched_again_behind_calls_that_go_on(server: KeyServer, clock: Clock) -> None:
    (first, first_public), (second, second_public) = new_key_pair("ES256"), new_key_pair("ES256")
    server.show(jwk_of(first_public, "ES256", kid="1"))
    verifier = TokenVerifier([TokenIssuer("sava", "ES256", jwks_url=server.url)], clock=clock)
    await verifier.authenticate(token_by(first, clock, kid="1"))
    clock.now += 301
    server.show(jwk_of(second_public, "ES256", kid="2"))
    assert (await verifier.authenticate(token_by(first, clock, kid="1"))).principal == ALICE
    assert (await verifier.authenticate(token_by(second, clock, kid="2"))).principal == ALICE
    clock.now += 31
    with pytest.raises(TokenInvalid, match="no key"):
        await verifier.authenticate(token_by(first, clock, kid="1"))


async def test_unknown_kids_fetch_at_most_every_ten_seconds(server: KeyServer, clock: Clock) -> None:
    private, public = new_key_pair("ES256")
    server.show(jwk_of(public, "ES256", kid="1"))
    verifier = TokenVerifier([TokenIssuer("sava", "ES256", jwks_url=server.url)], clock=clock)
    await verifier.authenticate(token_by(private, clock, kid="1"))
    for number in range(50):
        with pytest.raises(TokenInvalid, match="no key"):
            await verifier.authenticate(token_by(private, clock, kid=f"made-up-{number}"))
    assert server.asked == 1
    clock.now += 11
    for number in range(50):
        with pytest.raises(TokenInvalid, match="no key"):
            await verifier.authenticate(token_by(private, clock, kid=f"made-up-{number}"))
    assert server.asked == 2


@pytest.mark.parametrize("fault", ["status", "garbage", "huge", "redirect"])
async def test_a_fetch_that_fails_keeps_the_set(fault: str, server: KeyServer, clock: Clock) -> None:
    private, public = new_key_pair("ES256")
    server.show(jwk_of(public, "ES256", kid="1"))
    verifier = TokenVerifier([TokenIssuer("sava", "ES256", jwks_url=server.url)], clock=clock)
    await verifier.authenticate(token_by(private, clock, kid="1"))
    if fault == "status":
        server.status = 500
    elif fault == "redirect":
        server.status = 302
    else:
        server.answer = b"garbage" if fault == "garbage" else b"x" * (2 << 20)
    clock.now += 301
    await verifier.authenticate(token_by(private, clock, kid="1"))
    with pytest.raises(TokenInvalid, match="no key"):
        await verifier.authenticate(token_by(private, clock, kid="2"))  # waits for the fetch
    assert server.asked == 2
    assert (await verifier.authenticate(token_by(private, clock, kid="1"))).principal == ALICE


async def test_without_any_set_nothing_is_known_about_a_token(server: KeyServer, clock: Clock) -> None:
    private, public = new_key_pair("ES256")
    server.status = 503
    verifier = TokenVerifier([TokenIssuer("sava", "ES256", jwks_url=server.url)], clock=clock)
    with pytest.raises(KeysUnavailable, match="503"):
        await verifier.authenticate(token_by(private, clock, kid="1"))
    server.status = 200
    server.show(jwk_of(public, "ES256", kid="1"))
    clock.now += 1.1
    assert (await verifier.authenticate(token_by(private, clock, kid="1"))).principal == ALICE


async def test_a_server_that_does_not_answer_is_given_up(
    server: KeyServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "FETCH_TIMEOUT_S", 0.2)
    private, _ = new_key_pair("ES256")
    server.may_answer.clear()
    verifier = TokenVerifier([TokenIssuer("sava", "ES256", jwks_url=server.url)], clock=clock)
    with pytest.raises(KeysUnavailable, match="keys of issuer"):
        await verifier.authenticate(token_by(private, clock, kid="1"))


# -- settings, and making keys ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "refused"),
    [
        ("https://issuer.example/keys", ""),
        ("http://127.0.0.1:8080/keys", ""),
        ("http://localhost/keys", ""),
        ("http://[::1]/keys", ""),
        ("http://issuer.example/keys", "https is needed"),
        ("http://127.0.0.1.example/keys", "https is needed"),
        ("file:///etc/passwd", "written https://"),
        ("ftp://issuer.example/keys", "written https://"),
        ("https://user:password@issuer.example/keys", "password"),
    ],
)
def test_the_settings_refuse_urls_that_prove_nothing(url: str, refused: str) -> None:
    tree = {"auth": {"tokens": [{"issuer": "i", "algorithm": "ES256", "jwks_url": url}]}}
    if not refused:
        assert check(tree, source="test").auth.issuers == (TokenIssuer("i", "ES256", jwks_url=url),)
        return
    with pytest.raises(ConfigInvalid, match=refused):
        check(tree, source="test")


def test_a_secret_is_written_for_its_owner_only_and_never_over_another(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        write_private(tmp_path / "keys" / "secret", SECRET)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "keys" / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    with pytest.raises(SecretExists, match="exists"):
        write_private(tmp_path / "keys" / "secret", OTHER)
    assert (tmp_path / "keys" / "secret").read_bytes() == SECRET


def test_a_key_of_another_kind_signs_nothing() -> None:
    for algorithm, key in [("ES256", SECRET), ("RS256", new_key_pair("ES256")[0]), ("ES256", b"")]:
        with pytest.raises(KeysInvalid):
            create_token("sava", ALICE, 60, key, algorithm=algorithm)
    with pytest.raises(KeysInvalid):
        create_token("sava", ALICE, 60, b"")
    with pytest.raises(TokenInvalid, match="broker"):
        create_token("sava", Principal("broker", "1"), 60, SECRET)
