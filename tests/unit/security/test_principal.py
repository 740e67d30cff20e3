import pytest

from sava.security.principal import Principal, PrincipalInvalid


@pytest.mark.parametrize(
    ("text", "principal"),
    [
        ("user:alice", Principal("user", "alice")),
        ("alice", Principal("user", "alice")),
        ("service:billing", Principal("service", "billing")),
    ],
)
def test_a_principal_is_read_from_its_text(text: str, principal: Principal) -> None:
    assert Principal.parse(text) == principal
    assert Principal.parse(str(principal)) == principal


@pytest.mark.parametrize("text", ["", ":", "user:", ":alice"])
def test_a_text_without_a_name_is_no_principal(text: str) -> None:
    with pytest.raises(PrincipalInvalid, match="user:NAME"):
        Principal.parse(text)
