"""Quotas as they are configured: names by salt or tag, and what cannot be one."""

from __future__ import annotations

import pytest

from kvstore.config import load_config
from kvstore.model.errors import ConfigError
from kvstore.model.keys import KeyExtras
from kvstore.model.quotas import QuotaRules, owner_named, parse_quotas, parse_server_quotas

GIB = 1 << 30
SALT = KeyExtras(cache_salt="s3cret").salt_name


def test_sizes_are_gib() -> None:
    assert parse_quotas(" a=1, b = 0.5 ,*=2,", "k") == {"a": GIB, "b": GIB // 2, "*": 2 * GIB}
    assert parse_quotas("", "k") == {}
    assert parse_quotas("a=b=1", "k") == {"a=b": GIB}


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=0", "a=-1", "a=x", "a=inf", "a=nan"])
def test_what_is_no_quota_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no quota"):
        parse_quotas(text, "k")


@pytest.mark.parametrize(
    ("by", "quotas", "says"),
    [
        ("salt", "s3cret=1", "first 16 hexadecimal digits"),
        ("salt", "s3cret", "number 1"),
        ("tag:team", "other=1", "metrics cannot show"),
        ("tag:team", "a|b=1", "metrics cannot show"),
        ("tag:", "a=1", "quota_by"),
        ("team", "a=1", "quota_by"),
        ("tag:team", ", ".join(f"{number}=1" for number in range(257)), "at most 256"),
    ],
    ids=["a salt itself", "no size", "other", "a separator", "no tag", "neither", "too many"],
)
def test_names_that_cannot_be_are_refused_and_no_salt_is_shown(by: str, quotas: str, says: str) -> None:
    given = {"kvstore.quota_by": by, "kvstore.local_cpu_quotas": quotas}
    with pytest.raises(ConfigError, match=says) as refused:
        load_config(given, environ={})
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(("memory", "disk"), [("a=1", "*=1"), ("a=1, b=1", "a=1"), ("*=1", "a=1")])
def test_a_name_has_quotas_in_both_tiers_or_in_the_only_one(memory: str, disk: str) -> None:
    with pytest.raises(ConfigError, match="in only one"):
        QuotaRules.parse("tag:team", memory, disk)
    assert QuotaRules.parse("tag:team", memory, None)
    assert QuotaRules.parse("tag:team", None, disk)


@pytest.mark.parametrize(
    "given",
    [{"local_cpu": False, "local_cpu_quotas": "*=1"}, {"local_disk_quotas": "*=1"}],
    ids=["no memory", "no disk"],
)
def test_a_quota_of_nothing_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="needs local_"):
        load_config({f"kvstore.{key}": value for key, value in given.items()}, environ={})


def test_a_name_is_a_tag_or_the_hash_of_a_salt() -> None:
    by_tag = QuotaRules.parse("tag:team", "red=1, *=2", None)
    assert by_tag.name_of(KeyExtras(tags=(("team", "red"), ("user", "x")), cache_salt="s3cret")) == "red"
    assert by_tag.name_of(KeyExtras(tags=(("user", "red"),))) == ""
    by_salt = QuotaRules.parse("salt", f"{SALT}=1", f"{SALT}=2")
    assert by_salt.name_of(KeyExtras(cache_salt="s3cret", tags=(("team", "red"),))) == SALT
    assert (by_salt.names, by_tag.names) == ((SALT,), ("red",))
    assert not QuotaRules.parse("salt", None, None)


def test_a_server_has_quotas_of_tags_and_salts_within_tenants() -> None:
    text = f"team-a=40, team-a/tag:customer/red=5, tag:customer/a/b=c=3, salt:{SALT}=2, org/model=1, *=10"
    quotas = parse_server_quotas(text)
    assert quotas["org/model"] == GIB
    owners = [owner for owner in map(owner_named, quotas) if owner is not None]
    assert [(owner.tenant, owner.name) for owner in owners] == [
        ("team-a", "tag:customer/red"),
        ("", "tag:customer/a/b=c"),
        ("", f"salt:{SALT}"),
    ]
    by_tag, by_salt = QuotaRules.parse("tag:customer", None, None), QuotaRules.parse("salt", None, None)
    assert [owner.id for owner in owners] == [by_tag.owner_of("red"), by_tag.owner_of("a/b=c"), by_salt.owner_of(SALT)]
    assert parse_server_quotas("") == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("salt:s3cret=1", "names a salt in a way"),
        (f"team a/salt:{SALT}=1", "after a tenant"),
        (f"salt:{SALT.upper()}=1", "16 hexadecimal digits"),
        (f"salt:{SALT}0=1", "16 hexadecimal digits"),
        ("salt:s3cret=x", "number 1, that is no quota"),
        ("a=1, a/salt:s3cret", "number 2, that is no quota"),
        ("tag:customer=1", "'tag:customer' in a way"),
        ("tag:customer/=1", "'tag:customer/' in a way"),
        ("tag:/red=1", "write tag:NAME/VALUE"),
        ("a/b/tag:customer/red=1", "'a/b/tag:customer/red'"),
        ("/tag:customer/red=1", "'/tag:customer/red'"),
        (", ".join(f"tag:customer/{number}=1" for number in range(257)), "257 tags and salts: at most 256"),
    ],
    ids=[
        "a salt itself",
        "no tenant's name",
        "capitals",
        "too long",
        "no size",
        "no equals sign",
        "no value",
        "an empty value",
        "no tag",
        "a path",
        "no tenant",
        "too many",
    ],
)
def test_what_nearly_names_a_tag_or_salt_is_refused_and_no_salt_is_shown(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        parse_server_quotas(text)
    assert "s3cret" not in str(refused.value)
