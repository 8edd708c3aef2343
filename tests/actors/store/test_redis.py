"""The Redis store: its settings, and what is wrong. `test_base.py` has what all do."""

import pytest
import redis

from ramify.actors.store.base import StoreError
from ramify.actors.store.redis import LAYOUT, RedisStore
from tests.actors.store.conftest import changes


def test_a_lost_connection_is_made_anew(redis_url: str) -> None:
    store = RedisStore(redis_url)
    store.write([changes()])
    with redis.Redis.from_url(redis_url) as db:
        db.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        store.write([changes("s_2")])
        db.script_flush()
        store.write([changes("s_3")])
    assert {kept.session for kept in store.kept()} == {"s_1", "s_2", "s_3"}
    store.close()


def test_settings_that_lose_sessions_are_told(redis_url: str) -> None:
    store = RedisStore(redis_url)
    assert store.warnings() == []
    with redis.Redis.from_url(redis_url) as db:
        for name, value, words in (
            ("appendfsync", "everysec", "needs appendfsync always"),
            ("maxmemory-policy", "allkeys-lru", "give it noeviction"),
            ("appendonly", "no", "a restart of it loses sessions"),
        ):
            before = db.config_get(name)[name]
            db.config_set(name, value)
            try:
                (warning,) = store.warnings()
            finally:
                db.config_set(name, before)
            assert words in warning
            assert "secret" not in warning
    store.close()


def test_a_full_memory_is_told_and_nothing_is_half_written(redis_url: str) -> None:
    store = RedisStore(redis_url)
    store.write([changes()])
    with redis.Redis.from_url(redis_url) as db:
        db.config_set("maxmemory", "1mb")
        try:
            with pytest.raises(StoreError, match="more memory"):
                store.write([changes("s_2"), changes("s_3", put={"head": b"x" * 3_000_000})])
        finally:
            db.config_set("maxmemory", "0")
    assert [kept.session for kept in store.kept()] == ["s_1"]
    assert store.check() == []
    store.close()


def test_a_newer_store_is_refused(redis_url: str) -> None:
    RedisStore(redis_url).close()
    with redis.Redis.from_url(redis_url) as db:
        db.hset("ramify:about", "format", str(LAYOUT + 1))
    with pytest.raises(StoreError, match="use the newer version"):
        RedisStore(redis_url)


def test_who_only_looks_makes_nothing(redis_url: str) -> None:
    with pytest.raises(StoreError, match="no store of sessions"):
        RedisStore(redis_url, read_only=True)
    with redis.Redis.from_url(redis_url) as db:
        assert db.dbsize() == 0


def test_valkey_is_redis(redis_url: str) -> None:
    store = RedisStore(redis_url.replace("redis://", "valkey://"))
    store.write([changes()])
    store.close()


@pytest.mark.parametrize("rest", ["h:1x/0", ":sec/ret@h"])
def test_a_url_that_cannot_be_read(rest: str) -> None:
    with pytest.raises(StoreError) as error:
        RedisStore(f"redis://{rest}")
    assert "sec" not in str(error.value)


def test_a_database_that_is_not_there() -> None:
    with pytest.raises(StoreError, match="refused"):
        RedisStore("redis://:secret@127.0.0.1:1/0")


def test_damage_is_found(redis_url: str) -> None:
    store = RedisStore(redis_url)
    store.write([changes(), changes("s_2")])
    with redis.Redis.from_url(redis_url) as db:
        db.hdel("ramify:items:s_2", "head")
    assert store.check() == ["session s_2: no head", "session s_2: 0 bytes, not 1"]
    store.close()
