"""What a reader heard of a job, and whether two readers heard the same."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenuto_client import EndEvent, JobState, Token


@dataclass(slots=True)
class Heard:
    """All that one reader got of one job, in the order in which it came."""

    tokens: list[Token] = field(default_factory=list)
    end: EndEvent | None = None

    @property
    def text(self) -> str:
        """The job's text."""
        rest = self.end.text if self.end else ""
        return "".join(token.text for token in self.tokens) + rest


@dataclass(frozen=True, slots=True)
class Kill:
    """What a kill interrupted.

    Attributes:
        published: tokens that stood in the stream after it.
        wanted: tokens that the job is to have.
        signal: the number of the signal that ended the worker, or 0.
        at: when, by the monotonic clock.
    """

    published: int
    wanted: int
    signal: int
    at: float


def problems(killed: Heard, whole: Heard, kill: Kill) -> list[str]:
    """Why the demo has not proved its point; the first one is the most telling. Empty if it has."""
    return [
        *_problems_of("killed", killed),
        *_problems_of("uninterrupted", whole),
        *_problems_of_kill(kill, killed),
        *differences(killed, whole),
    ]


def differences(killed: Heard, whole: Heard) -> list[str]:
    """Where the killed job's stream is not, bit for bit, that of the uninterrupted one."""
    found = []
    for ours, theirs in zip(killed.tokens, whole.tokens, strict=False):
        if ours != theirs:
            found.append(
                f"token {theirs.index} differs: {_show(ours)}, uninterrupted: {_show(theirs)}"
            )
    if len(killed.tokens) != len(whole.tokens):
        found.append(f"{len(killed.tokens)} tokens, uninterrupted: {len(whole.tokens)}")
    if killed.text != whole.text:
        at = _first_difference(killed.text, whole.text)
        found.append(f"the texts differ from character {at + 1} on")
    reasons = [heard.end.finish_reason if heard.end else None for heard in (killed, whole)]
    if reasons[0] != reasons[1]:
        found.append(f"finish reason {reasons[0]}, uninterrupted: {reasons[1]}")
    return found


def _problems_of(name: str, heard: Heard) -> list[str]:
    found = []
    if [token.index for token in heard.tokens] != list(range(1, len(heard.tokens) + 1)):
        found.append(f"the reader of the {name} job did not get every token once, in order")
    if heard.end is None or heard.end.state is not JobState.COMPLETED:
        state = heard.end.state if heard.end else "not over"
        why = heard.end.error if heard.end and heard.end.error else "no reason given"
        found.append(f"the {name} job is {state}: {why}")
    elif heard.end.exactness != "exact":
        why = heard.end.exactness_reason or "no reason given"
        found.append(f"the {name} job says {heard.end.exactness}: {why}")
    return found


def _problems_of_kill(kill: Kill, killed: Heard) -> list[str]:
    found = []
    if kill.signal != 9:
        found.append("the worker did not die of SIGKILL")
    if not 0 < kill.published < kill.wanted:
        found.append(f"the kill came too late or too early, after {kill.published} tokens")
    elif killed.end is not None and killed.end.epoch < 2:
        found.append("no second attempt was made")
    return found


def _show(token: Token) -> str:
    return f"{token.token} {token.text!r} with logprob {token.logprob!r}"


def _first_difference(left: str, right: str) -> int:
    for at, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if ours != theirs:
            return at
    return min(len(left), len(right))
