"""Tenants as an operator writes them, what they use of their quotas, and what their caches are called."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_builder.__main__ import main as ssd_cache
from server.admission.quotas import Account, Reservation, SharedBudget, TokenBucket
from server.admission.registry import SALTED_TOKENS, Generations, NamespaceNames, Tenants
from server.admission.tenant_config import Quotas, Tenant, digest_of, parse_rules, read_rules
from server.admission.tenant_loader import TenantReloader, load_or_create_secret, open_tenants, read_given_secret
from server.base.errors import ApiError
from server.base.settings import ServerSettings
from ssd.errors import ConfigError, RequestError
from ssd.retrieval.directory import SegmentDirectory
from ssd.retrieval.owners import dump_secret
from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.suffix_array import build_segment
from tests.cache_files import FINGERPRINT
from tests.server.client import wait_until

SECRET = b"0123456789abcdef0123"
SETTINGS = ServerSettings(model_names=("m",), model="m")
RULES = f"""
[defaults]
max_running = 2
reads_shared = true

[tenants.alice]
keys = ["alices-key", "sha256:{digest_of("alices-other-key")}"]
requests_per_minute = 60
cache_tokens = 8192

[tenants.bob]
keys = ["bobs-key"]
max_running = 1
reads_shared = false

[tenants.ops]
keys = ["ops-key"]
operator = true
"""


def charged(account: Account, num_prompt_tokens: int, num_slots: int) -> Reservation:
    """A request with one choice that the account has room for."""
    reservation = SharedBudget(1, "things").reserve()
    reservation.charge(account, 1, num_prompt_tokens, num_slots)
    return reservation


def account_of(tenants: Tenants, key: str) -> Account:
    found = tenants.find(key)
    assert found is not None
    return found


def opened(path: Path, *, keys: tuple[str, ...] = (), directory: Path | None = None) -> Tenants:
    return open_tenants(SETTINGS, SECRET, keys=keys, path=path, cache_directory=directory)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(RULES)
    path.chmod(0o600)
    return path


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_file_says_who_there_is_and_what_each_may(rules: Path) -> None:
    tenants = opened(rules, keys=("simple-key",))
    alice, bob, simple = (tenants.find(key) for key in ("alices-key", "bobs-key", "simple-key"))
    assert alice is not None and bob is not None and simple is not None
    assert tenants.find("alices-other-key") is alice and tenants.find("") is None and tenants.find("wrong") is None
    assert alice.tenant.quotas == Quotas(max_running=2, requests_per_minute=60, cache_tokens=8192)
    assert (bob.tenant.quotas.max_running, bob.tenant.reads_shared, alice.tenant.reads_shared) == (1, False, True)
    assert simple.tenant.quotas == Quotas(max_running=2) and simple.name.startswith("key-")
    assert "simple" not in simple.name and digest_of("simple-key")[:8] not in simple.name
    assert [account.name for account in tenants.accounts() if account.tenant.is_operator] == ["ops"]
    assert not any(key in str(tenants.describe()) for key in ("alices-key", "simple-key", digest_of("bobs-key")))


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("[tenants.a]\nkeys = [1]", "tenants.a.keys.0: .* valid string"),
        ("[tenants.a]", "tenants.a.keys: Field required"),
        ("[tenants.a]\nkeys = ['k']\nmax_running = 0", "tenants.a.max_running: .* greater than or equal to 1"),
        ("[tenants.a]\nkeys = ['k']\nmax_running = true", "max_running: .* valid integer"),
        ("[tenants.a]\nkeys = ['k']\nmax_runing = 1", "tenants.a.max_runing: "),
        ("[tenants.a]\nkeys = ['k']\noperator = 1", "tenants.a.operator: .* valid boolean"),
        ("[tenants.a]\nkeys = ['k']\ncache_tokens = 5", "cache_tokens: .* greater than or equal to 8192"),
        ("[tenants.a]\nkeys = ['sha256:12']", "keys: entry 1 must be sha256: followed by 64"),
        ('[tenants.a]\nkeys = ["good", "secr\\u00e9t"]', "entry 2 must be printable"),
        ("[tenants.a]\nkeys = ['secret']\n[tenants.b]\nkeys = ['secret']", "tenants.b: one of its keys already"),
        ("[tenants.'a b']\nkeys = ['k']", "tenants.a b: its name must have 1 to 64"),
        ("[tenant.a]\nkeys = ['k']", "tenant: "),
        ("[defaults]\noperator = true", "defaults.operator: "),
        ("tenants = 3", "tenants: .* valid dictionary"),
        ("keys = secret", "not TOML \\(at line 1"),
        (b"\xff", "not TOML"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line_that_names_it_and_no_key(content: str | bytes, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as error:
        parse_rules(content if isinstance(content, bytes) else content.encode(), "--tenants f")
    message = str(error.value)
    assert message.startswith("--tenants f") and "\n" not in message and "secr" not in message


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_rules_or_one_line(content: bytes) -> None:
    try:
        parse_rules(content, "f")
    except ConfigError as error:
        assert "\n" not in str(error)


def test_a_file_that_is_not_there_or_is_everybodys_is_said(rules: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rules(rules.with_name("other"))
    rules.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        read_rules(rules)
    assert "chmod 600" in caplog.text
    with pytest.raises(ConfigError, match="is also given outside the tenants file"):
        opened(rules, keys=("bobs-key",))
    rules.write_text("[defaults]\n")
    with pytest.raises(ConfigError, match="contains no tenant"):
        opened(rules)


# -- reloading ---------------------------------------------------------------------------------------------------------


def test_rules_are_replaced_while_the_server_runs_and_broken_ones_are_not(
    rules: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tenants = opened(rules)
    watch = TenantReloader(tenants, [rules], interval_s=0.02)
    alice = account_of(tenants, "alices-key")
    reservation = charged(alice, 3, num_slots=4)
    assert alice.num_prompt_tokens == 0  # counters never go down: what is refused is not counted at all
    reservation.mark_accepted()
    watch.start()
    try:
        rules.write_text(RULES.replace("alices-key", "alices-new-key").replace("requests_per_minute = 60", ""))
        wait_until(lambda: tenants.find("alices-new-key") is alice)
        assert tenants.find("alices-key") is None and alice.headers() == {}
        assert alice.num_in_flight == 1
        with caplog.at_level(logging.ERROR):
            rules.write_text("[tenants.alice]\nkeys = 'secret'")
            wait_until(lambda: "were not reloaded" in caplog.text)
            rules.unlink()
            wait_until(lambda: "cannot be read" in caplog.text)
        assert "secret" not in caplog.text
        assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 2  # one a change
        assert tenants.find("alices-new-key") is alice and tenants.find("bobs-key") is not None
        rules.write_text("[defaults]\nmax_running = 1\n")
        wait_until(lambda: "no longer contain an API key" in caplog.text)
        rules.write_text(RULES.replace("tenants.alice", "tenants.carol"))
        wait_until(lambda: tenants.find("bobs-key") is not None and tenants.find("alices-new-key") is None)
        reservation.release(5)  # of a tenant that is gone
        assert (alice.num_in_flight, alice.num_output_tokens) == (0, 5)
    finally:
        watch.stop()


# -- quotas ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50))), st.integers(1, 1000))
def test_an_allowance_is_never_above_its_rate(takings: list[tuple[float, float]], per_minute: int) -> None:
    """Who takes only what is there has at no time taken more than a minute's worth and what came since."""
    allowance, now, taken = TokenBucket(per_minute, 0.0), 0.0, 0.0
    for amount, passed in takings:
        now += passed
        wait_s = allowance.wait_s(amount, now)
        assert (wait_s == 0) == (allowance.available(now) >= min(amount, per_minute))
        if wait_s == 0 and amount <= per_minute:
            allowance.consume(amount, now)
            taken += amount
        assert taken <= per_minute * (1 + now / 60) + 1e-6
        assert allowance.available(now + wait_s + 1e-6) >= min(amount, per_minute) - 1e-3 or wait_s == 0


def test_a_lower_quota_locks_nobody_out_for_longer_than_a_minute_or_what_was_owed() -> None:
    allowance = TokenBucket(100_000, 0.0)
    allowance.consume(90_000, 0.0)
    allowance.change(1000, 0.0)
    assert allowance.available(0.0) == 0 and allowance.wait_s(1000, 0.0) == 60
    allowance.change(100_000, 0.0)
    assert allowance.available(0.0) == 99_000
    allowance.consume(150_000, 0.0)
    allowance.change(1000, 0.0)
    assert allowance.available(0.0) == -51_000


def test_what_is_refused_says_when_it_will_not_be() -> None:
    now = 0.0
    quotas = Quotas(requests_per_minute=2, tokens_per_minute=60)
    tenant = Account(Tenant(name="a", seed="a", digests=frozenset(), quotas=quotas), lambda: now)

    def spend(num_prompt_tokens: int, num_output_tokens: int) -> None:
        reservation = charged(tenant, num_prompt_tokens, num_slots=2)
        reservation.mark_accepted()
        reservation.release(num_output_tokens)

    for _ in range(2):
        tenant.enter()
        spend(5, 10)
    with pytest.raises(ApiError) as limit:
        tenant.enter()
    assert limit.value.headers == {
        "retry-after": "30",
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "30",
        "x-ratelimit-reset-tokens": "30s",
    }
    now = 30.0
    tenant.enter()
    spend(60, 60)  # a debt of a minute
    now = 60.0
    with pytest.raises(ApiError) as limit:
        charged(tenant, 1, num_slots=2)
    assert limit.value.headers["retry-after"] == "31"
    with pytest.raises(RequestError, match="60 per minute"):
        charged(tenant, 61, num_slots=2)
    assert tenant.num_refused == {"requests": 1, "tokens": 1}


# -- names and deletion ------------------------------------------------------------------------------------------------


def test_names_of_caches_tell_apart_what_is_apart_and_tell_nothing() -> None:
    names = NamespaceNames(SECRET)
    found = [
        names.tenant("default", "tenant:a", 0),
        names.tenant("default", "tenant:b", 0),
        names.tenant("x", "tenant:a", 0),
        names.tenant("default", "tenant:a", 1),
        names.counter("default", "tenant:a"),
        names.salted_namespace("default", "s"),
        names.salted_namespace("default", "t"),
        names.salted_namespace(names.tenant("default", "tenant:a", 0), "s"),
    ]
    assert len(set(found)) == len(found) and not any("a:" in name or "default" in name for name in found)
    assert NamespaceNames(SECRET).tenant("default", "tenant:a", 0) == found[0]
    assert NamespaceNames(b"another secret of it").tenant("default", "tenant:a", 0) != found[0]


def test_each_tenant_has_a_cache_of_its_own_and_a_salt_one_inside_it(rules: Path) -> None:
    tenants = opened(rules)
    alice, bob, ops = (account_of(tenants, key) for key in ("alices-key", "bobs-key", "ops-key"))
    uses = [tenants.cache_use(account, "default", salt) for account in (alice, bob, ops) for salt in (None, "s", "t")]
    assert len({use.namespace for use in uses}) == 9
    assert uses[6].namespace == "default" and not uses[6].policy.reads_shared
    assert uses[0].policy.capacity_tokens == 8192 and uses[0].policy.reads_shared and uses[0].policy.is_durable
    for salted, main in ((uses[1], uses[0]), (uses[4], uses[3])):
        assert salted.policy.group == main.namespace and not salted.policy.is_durable
        assert salted.policy.reads_shared == main.policy.reads_shared
    assert (uses[1].policy.capacity_tokens, uses[4].policy.capacity_tokens) == (8192, SALTED_TOKENS)
    assert tenants.cache_use(alice, None, "s").namespace is None
    assert tenants.labels() == {uses[0].namespace: "alice", uses[3].namespace: "bob"}


def noting(names: list[str]) -> Any:
    """What takes names of caches that go: the caches, or the log of replicas."""
    return SimpleNamespace(discard=names.append, delete_stream=names.append)


def test_a_deleted_cache_has_another_name_afterwards_also_after_a_restart(rules: Path, tmp_path: Path) -> None:
    tenants, gone, told = opened(rules, directory=tmp_path), list[str](), list[str]()
    tenants.caches, tenants.sharing = lambda: noting(gone), lambda: noting(told)
    alice = account_of(tenants, "alices-key")
    before = tenants.cache_use(alice, "default", None).namespace
    assert tenants.delete_cache("alice")["deleted"] and gone == told == [before]
    after = tenants.cache_use(alice, "default", None).namespace
    assert after != before
    tenants.sweep()  # what came late goes as well
    assert gone == [before, before]
    again = opened(rules, directory=tmp_path)
    assert again.cache_use(account_of(again, "alices-key"), "default", None).namespace == after
    assert stat.S_IMODE((tmp_path / ".ssd" / "generations.json").stat().st_mode) == 0o600
    for name, code in (("nobody", 404), ("ops", 409)):
        with pytest.raises(ApiError) as error:
            tenants.delete_cache(name)
        assert error.value.status == code


# -- what lies in the directory ----------------------------------------------------------------------------------------


def taught(tenants: Tenants, directory: Path, key: str = "alices-key", base: str = "default") -> Path:
    """The directory of a tenant's cache, with a segment in it."""
    use = tenants.cache_use(account_of(tenants, key), base, None)
    assert use.namespace is not None
    path = directory / use.namespace
    kept = SegmentDirectory(path, fingerprint=FINGERPRINT, namespace=use.namespace, owner=use.policy.owner)
    segment = build_segment(np.array([1, 2, SEPARATOR], np.int32), start=0, segment_id="0-0")
    kept.commit([kept.write(segment)], next_position=3)
    kept.close()
    return path


def test_a_secret_of_a_former_version_is_taken_and_kept_with_a_checksum(tmp_path: Path) -> None:
    path = tmp_path / ".ssd" / "secret"
    path.parent.mkdir()
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o600)
    for _ in range(2):
        assert load_or_create_secret(tmp_path) == SECRET
        assert b"xxh3" in path.read_bytes() and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_caches_that_the_secret_does_not_explain_are_orphans_to_who_inspects_them(
    rules: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = taught(opened(rules, directory=tmp_path), tmp_path)
    (tmp_path / ".ssd").mkdir(exist_ok=True)
    for secret, status in ((b"another secret of it", 1), (SECRET, 0)):
        (tmp_path / ".ssd" / "secret").write_bytes(dump_secret(secret))
        assert ssd_cache(["inspect", str(tmp_path)]) == status
        assert (f"{path.name} is an orphan" in capsys.readouterr().out) == bool(status)


def test_a_cache_of_a_tenant_that_is_no_more_is_in_nobodys_way(
    rules: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = taught(opened(rules, directory=tmp_path), tmp_path, "bobs-key")
    rules.write_text(RULES.replace("[tenants.bob]", "[tenants.carol]"))
    tenants = opened(rules, directory=tmp_path)
    assert tenants.delete_cache("alice")["deleted"] and path.exists() and not caplog.records


def test_numbers_of_a_former_version_are_kept_with_a_checksum(rules: Path, tmp_path: Path) -> None:
    tenants = opened(rules, directory=tmp_path)
    tenants.delete_cache("alice")
    file = tmp_path / ".ssd" / "generations.json"
    counter = NamespaceNames(SECRET).counter("default", "tenant:alice")
    file.write_text(json.dumps({counter: 7}))
    for _ in range(2):
        tenants = opened(rules, directory=tmp_path)
        namespace = NamespaceNames(SECRET).tenant("default", "tenant:alice", 7)
        assert tenants.cache_use(account_of(tenants, "alices-key"), "default", None).namespace == namespace
        assert "xxh3" in file.read_text()


def test_a_deletion_that_was_broken_off_is_ended_by_the_next_start_or_the_next_deletion(
    rules: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tenants = opened(rules, directory=tmp_path)
    old = taught(tenants, tmp_path)
    Generations(tmp_path / ".ssd" / "generations.json", None).increment(
        NamespaceNames(SECRET).counter("default", "tenant:alice")
    )
    tenants = opened(rules, directory=tmp_path)
    tenants.sweep()
    assert old.exists() and "next deletion of the tenant's cache removes" in caplog.text  # or the number is wrong
    new = taught(tenants, tmp_path)
    tenants = opened(rules, directory=tmp_path)
    tenants.sweep()
    assert not old.exists() and new.exists()


def test_what_a_tenant_said_to_an_adapter_that_is_not_served_goes_with_its_cache(rules: Path, tmp_path: Path) -> None:
    settings = ServerSettings(model_names=("m",), model="m", adapters={"sql": "adapters/sql"})
    tenants = open_tenants(settings, SECRET, path=rules, cache_directory=tmp_path)
    paths = [taught(tenants, tmp_path, base=base) for base in settings.namespaces]
    others = taught(tenants, tmp_path, "bobs-key")
    assert opened(rules, directory=tmp_path).delete_cache("alice")["deleted"]
    assert not any(path.exists() for path in paths) and others.exists()


class _Counters:
    """What replicas count with, when it is there."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.is_there = True
        self.num_garbled = 0

    def read(self, names: list[str]) -> list[int]:
        if not self.is_there:
            raise ConnectionError
        if self.num_garbled:
            self.num_garbled -= 1
            return [7] * len(names)
        return [self.numbers.get(name, 0) for name in names]

    def add(self, name: str, amount: int) -> int:
        self.read([])
        self.numbers[name] = self.numbers.get(name, 0) + amount
        return self.numbers[name]

    def raise_to(self, name: str, number: int) -> int:
        self.read([])
        self.numbers[name] = max(number, self.numbers.get(name, 0))
        return self.numbers[name]


def test_one_garbled_answer_deletes_nothing() -> None:
    counters: Any = _Counters()
    generations = Generations(None, counters)
    counters.num_garbled = 1
    assert generations.exchange(["a", "b"]) == {}
    assert generations.get("a") == generations.get("b") == 0
    counters.add("b", 1)
    assert generations.exchange(["a", "b"]) == {"b": 0}


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["advance", "absorb", "cut", "mend", "empty"]))))
def test_replicas_agree_on_what_was_deleted_and_none_goes_back(given_steps: list[tuple[int, str]]) -> None:
    counters: Any = _Counters()
    replicas = [Generations(None, counters) for _ in range(3)]
    for which, what in given_steps:
        before = [replica.get("a") for replica in replicas]
        if what == "advance":
            number, is_told = replicas[which].increment("a")
            assert number > max(before[which], 0) and (not is_told or counters.numbers["a"] >= number)
        elif what == "absorb":
            replicas[which].exchange(["a"])
        elif what == "empty":
            counters.numbers.clear()
        else:
            counters.is_there = what == "mend"
        assert all(replica.get("a") >= number for replica, number in zip(replicas, before, strict=True))
    counters.is_there = True
    newest = max(replica.get("a") for replica in replicas)
    for replica in (*replicas, *replicas):
        replica.exchange(["a"])
    assert {replica.get("a") for replica in replicas} == {max(newest, counters.numbers.get("a", 0))}


# -- the secret --------------------------------------------------------------------------------------------------------


def test_a_secret_is_given_or_made_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b" a secret of some length \n")
    path.chmod(0o600)
    assert read_given_secret(path, "x" * 20) == b"a secret of some length"
    assert read_given_secret(None, "x" * 20 + "\n") == b"x" * 20  # as of a file
    assert read_given_secret(None, None) is None
    made = load_or_create_secret(tmp_path / "cache")
    assert made == load_or_create_secret(tmp_path / "cache") != load_or_create_secret(tmp_path / "other")
    kept = tmp_path / "cache" / ".ssd"
    assert [file.name for file in kept.iterdir()] == ["secret"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (kept / "secret", kept, kept.parent)] == [0o600, 0o700, 0o700]
    assert load_or_create_secret(None) != load_or_create_secret(None)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="16 to 4096 bytes: `openssl rand"):
        read_given_secret(path, None)
    for other in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"--secret-file .* cannot be read: .*\. `openssl rand .* the same file"):
            read_given_secret(other, None)


def test_what_a_tenant_said_to_each_adapter_is_apart_and_deleted_together(rules: Path) -> None:
    settings = ServerSettings(model_names=("m",), model="m", adapters={"sql": "adapters/sql"})
    tenants, gone = open_tenants(settings, SECRET, path=rules), list[str]()
    tenants.caches = lambda: noting(gone)
    alice = account_of(tenants, "alices-key")
    names = [tenants.cache_use(alice, base, None).namespace for base in settings.namespaces]
    assert len(set(names)) == 2 and set(tenants.labels()) > {*names}
    assert tenants.labels()[names[1] or ""] == "alice/default.sql"
    tenants.delete_cache("alice")
    assert gone == names


def flips(content: bytes) -> Iterator[bytes]:
    """``content`` with one wrong bit, in each byte."""
    for place in range(len(content)):
        yield content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]


def test_no_wrong_bit_of_a_kept_secret_is_believed(tmp_path: Path) -> None:
    load_or_create_secret(tmp_path)
    path = tmp_path / ".ssd" / "secret"
    whole = path.read_bytes()
    for content in flips(whole):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"is damaged .*Restore it from a copy"):
            load_or_create_secret(tmp_path)
        assert path.read_bytes() == content
    for cut in (whole[: len(whole) // 2], b"", bytes(len(whole))):
        path.write_bytes(cut)
        with pytest.raises(ConfigError):
            load_or_create_secret(tmp_path)


def test_a_lost_secret_is_not_made_anew_where_tenants_have_caches(rules: Path, tmp_path: Path) -> None:
    home = tmp_path / "cache"
    path = taught(opened(rules, directory=home), home)
    with pytest.raises(
        ConfigError,
        match=rf"secret is missing\. Without this secret, 1 cache\(s\).*{path.name}.*cannot be found.*inspect",
    ):
        load_or_create_secret(home)
    assert not (home / ".ssd" / "secret").exists()


@pytest.mark.parametrize("damage", ["lost", "flipped", "older", "empty"])
def test_a_lost_number_of_deletions_hides_no_cache_and_keeps_none_from_its_deletion(
    rules: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    tenants = opened(rules, directory=tmp_path)
    file = tmp_path / ".ssd" / "generations.json"
    tenants.delete_cache("alice")
    older = file.read_bytes()
    tenants.delete_cache("alice")
    path = taught(tenants, tmp_path)
    for content in [older] if damage == "older" else [b""] if damage == "empty" else flips(file.read_bytes()):
        if damage == "lost":
            file.unlink()
        else:
            file.write_bytes(content)
        caplog.clear()
        tenants = opened(rules, directory=tmp_path)
        use = tenants.cache_use(account_of(tenants, "alices-key"), "default", None)
        assert tmp_path / (use.namespace or "") == path
        assert "deletions of tenant alice was lost, and was recovered" in caplog.text
    assert tenants.delete_cache("alice")["deleted"] and not path.exists()
