"""Where Redis is: what a URL says, and what of it is shown."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from servers import RealServer
from tenuto_client import Client, InvalidRequest, Keys, ServerUnavailable
from tenuto_client._endpoint import Endpoint, close_client

GROUP = "redis+sentinel://me:sesame@a:1,[::1]:2,c/jobs/3?sentinel_password=open"


def test_a_url_of_sentinels_names_hosts_group_database_and_both_passwords() -> None:
    pool: Any = Endpoint.parse(GROUP).blocking(socket_timeout=5).connection_pool
    assert pool.service_name == "jobs"
    options = pool.connection_kwargs
    assert (options["username"], options["password"], options["db"]) == ("me", "sesame", 3)
    assert options["socket_timeout"] == 5
    sentinels = [each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in sentinels] == [
        ("a", 1),
        ("::1", 2),
        ("c", 26379),
    ]
    # The server's password is none of the sentinels' business.
    assert {each.get("password") for each in sentinels} == {"open"}
    assert {each.get("username") for each in sentinels} == {None}


async def test_tls_holds_for_the_sentinels_too() -> None:
    endpoint = Endpoint.parse("rediss+sentinel://a/jobs?ssl_ca_certs=/ca.pem")
    client = endpoint.asynchronous()
    (sentinel,) = client.connection_pool.sentinel_manager.sentinels
    for pool in (client.connection_pool, sentinel.connection_pool):
        assert pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"
        assert any("SSL" in kind.__name__ for kind in pool.connection_class.__mro__)
    await close_client(client)


@pytest.mark.parametrize("url", [GROUP, "redis://me:sesame@a:1/3", "unix://me:sesame@/run/s?db=3"])
def test_nothing_that_is_shown_of_an_endpoint_has_a_password(url: str) -> None:
    endpoint = Endpoint.parse(url)
    for shown in (endpoint.address, endpoint.place, *endpoint.flags(), repr(endpoint)):
        assert "sesame" not in shown
        assert "open" not in shown


def test_what_is_looked_at_when_sentinels_do_not_answer_is_the_first_of_them() -> None:
    endpoint = Endpoint.parse(GROUP)
    assert endpoint.flags()[:4] == ["-h", "a", "-p", "1"]
    assert endpoint.probe == ("sentinel", "master", "jobs")


@pytest.mark.parametrize(
    ("url", "flags"),
    [
        ("redis://host", "-h host -p 6379"),
        ("redis://:sesame@host:1/3", "-h host -p 1 -n 3"),
        ("redis://me:sesame@host:1", "-h host -p 1 --user me"),
        # A password in the wrong place.
        ("redis://sesame@host:1", "-h host -p 1"),
        ("unix:///run/s?db=2", "-s /run/s -n 2"),
        ("rediss://host:1?ssl_ca_certs=/ca.pem", "-h host -p 1 --tls --cacert /ca.pem"),
        ("rediss://host:1?ssl_cert_reqs=none", "-h host -p 1 --tls --insecure"),
    ],
)
def test_redis_cli_is_told_where_the_server_is(url: str, flags: str) -> None:
    assert Endpoint.parse(url).flags() == flags.split()


def test_behind_sentinels_redis_cli_is_told_where_the_master_is() -> None:
    flags = Endpoint.parse(GROUP).flags(("10.0.0.7", 6380))
    assert flags == ["-h", "10.0.0.7", "-p", "6380", "-n", "3", "--user", "me"]


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("redis://localhost", "redis://:pw@127.0.0.1:6379/0", True),
        ("redis://localhost", "redis://localhost/1", False),
        ("redis://localhost", "redis://localhost:6380", False),
        ("unix:///run/s", "unix:///run/s?db=0", True),
        ("unix:///run/s", "unix:///run/s?db=1", False),
        (GROUP, GROUP.replace("sesame", "open"), True),
    ],
)
def test_a_place_is_the_same_however_it_is_written(one: str, other: str, is_same: bool) -> None:
    assert (Endpoint.parse(one).place == Endpoint.parse(other).place) is is_same


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://a",
        "redis+sentinel:///jobs",
        "redis+sentinel://a,/jobs",
        "redis+sentinel://a:port/jobs",
        "redis+sentinel://a/jobs/x",
        "redis+sentinel://a/jo bs",
        "redis+sentinel://a/jobs?no_such_option=1",
        "redis+sentinel://me:12/sesame@a/jobs",
        "redis+sentinel://me:12#sesame@a/jobs",
        "redis+sentinel://me:12?sesame@a/jobs",
        "sentinel://a/jobs",
    ],
)
async def test_what_is_no_url_of_sentinels_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(InvalidRequest, match="redis") as refused:
        Client(url)
    assert "sesame" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+sentinel://a", "the sentinels' name of the master is missing: /service"),
        ("redis+sentinel://a:1,b:2/", "the sentinels' name of the master is missing: /service"),
        ("redis+sentinel://a:port/jobs", "each sentinel is host or host:port"),
        ("redis+sentinel://a/jobs/x", "no number of a database"),
        ("redis+sentinel://me:12/sesame@a/jobs", "a sign in its password splits it"),
        ("redis://me:12/sesame@a", "a sign in its password splits it"),
        ("sentinel://a/jobs", "its scheme is sentinel"),
    ],
)
def test_the_fault_of_a_url_is_named(url: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Endpoint.parse(url)


@pytest.fixture
def nobody() -> Iterator[str]:
    """Host and port where nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


async def test_sentinels_that_are_not_there_are_named_each_with_its_reason(nobody: str) -> None:
    url = f"redis+sentinel://{nobody},no.such.host.invalid:5/jobs"
    async with Client(url) as client:
        with pytest.raises(ServerUnavailable) as asked:
            await client.models()
    with pytest.raises(redis.ConnectionError) as blocked:
        Endpoint.parse(url).blocking().ping()
    for error in (asked, blocked):
        said = str(error.value)
        assert f"no sentinel names a master 'jobs': {nobody} (Connection refused)" in said
        assert "no.such.host.invalid:5 (" in said
        assert "object" not in said
        assert "<" not in said


async def test_a_server_that_is_not_there_is_named_with_host_port_and_reason(nobody: str) -> None:
    async with Client(f"redis://{nobody}") as client:
        with pytest.raises(ServerUnavailable) as refused:
            await client.models()
    assert refused.value.message == f"no answer from redis://{nobody}: Connection refused"


@pytest.fixture
def moved(tmp_path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A URL that first leads to one server and, once the function was called, to another.

    The first is a replica from then on, and goes on answering. The function returns a client of
    the second.
    """
    link = tmp_path / "s"
    with RealServer() as old, RealServer() as new, new.client() as there:
        link.symlink_to(old.socket)

        def move() -> Any:
            with old.client() as here:
                here.execute_command("REPLICAOF", "127.0.0.1", "1")
            link.unlink()
            link.symlink_to(new.socket)
            return there

        yield f"unix://{link}", move


def test_a_name_that_was_pointed_to_a_new_master_is_followed(
    moved: tuple[str, Callable[[], Any]],
) -> None:
    url, move = moved
    client: Any = Endpoint.parse(url).blocking()
    client.set("a", 1)
    there = move()
    with pytest.raises(redis.ConnectionError, match="no master"):
        client.eval("return redis.call('SET', 'a', '2')", 0)
    client.set("a", 3)
    assert there.get("a") == b"3"
    client.close()


async def test_a_client_that_was_connected_follows_it_without_an_error(
    moved: tuple[str, Callable[[], Any]],
) -> None:
    url, move = moved
    async with Client(url, retry_for=20) as client:
        await client.set_limits({"max_queued": 5})
        there = move()
        await client.set_limits({"max_queued": 6})
    assert b"6" in there.hgetall(Keys().limits()).values()


@pytest.mark.parametrize("url", ["redis://a?decode_responses=yes", GROUP + "&decode_responses=yes"])
async def test_answers_are_bytes_whatever_the_url_asks_for(url: str) -> None:
    endpoint = Endpoint.parse(url)
    assert endpoint.blocking().connection_pool.connection_kwargs["decode_responses"] is False
    client = endpoint.asynchronous()
    assert client.connection_pool.connection_kwargs["decode_responses"] is False
    await close_client(client)
