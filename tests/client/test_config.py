"""Settings: flags, then the environment, then defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenuto_client import Client, InvalidRequest, Settings

ENV = {
    "TENUTO_REDIS_URL": "redis://from-env",
    "TENUTO_DATA_DIR": "/from/env",
    "TENUTO_NAMESPACE": "env",
}


def test_flags_win_over_the_environment() -> None:
    settings = Settings.load(
        redis_url="redis://flag", namespace="flag:", data_dir="/flag", environ=ENV
    )
    assert settings == Settings("redis://flag", "flag:", Path("/flag"))


def test_the_environment_wins_over_defaults() -> None:
    assert Settings.load(environ=ENV) == Settings("redis://from-env", "env:", Path("/from/env"))


def test_a_data_dir_does_not_change_the_server() -> None:
    assert Settings.load(data_dir="/flag", environ=ENV).redis_url == "redis://from-env"


def test_without_anything_it_is_the_embedded_server_of_the_users_data_folder() -> None:
    settings = Settings.load(environ={"XDG_DATA_HOME": "/data"})
    assert settings.redis_url is None
    assert settings.namespace == "tenuto:"
    assert settings.data_dir.is_absolute()
    assert settings.data_dir.name == "tenuto"
    assert Settings.load(environ={"TENUTO_REDIS_URL": ""}).redis_url is None


@pytest.mark.parametrize("namespace", ["a b", "x{y}", "*", ":", "a::b", "ü"])
def test_a_namespace_that_is_no_key_prefix_is_refused(namespace: str) -> None:
    with pytest.raises(InvalidRequest, match="namespace"):
        Settings.load(namespace=namespace, environ={})


@pytest.mark.parametrize(
    "url",
    ["http://x", "localhost", "redis://[::1", "redis://x:port", "redis://x?no_such_option=1"],
)
async def test_what_is_no_redis_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="redis"):
        Client(url)
    with pytest.raises(InvalidRequest, match="redis"):
        Settings.load(environ={"TENUTO_REDIS_URL": url})


@pytest.mark.parametrize("sign", ["/", "#", "?"])
@pytest.mark.parametrize("before", ["sesame", "12"])
def test_a_password_with_a_sign_that_splits_the_url_is_refused_and_not_shown(
    before: str, sign: str
) -> None:
    with pytest.raises(InvalidRequest, match="%2F") as refused:
        Settings.load(redis_url=f"redis://:{before}{sign}sesame@h:6379", environ={})
    assert "sesame" not in str(refused.value)
