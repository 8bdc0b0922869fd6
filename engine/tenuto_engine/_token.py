"""``Token``: one generated token, as it is handed out and as a checkpoint keeps it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        token: its id.
        index: which token of the generation it is, from 1.
        text: the text that became certain with it; may be empty.
        logprob: natural log of its probability, after bias and penalties.
        top_logprobs: the likeliest ids with their logprobs, likeliest first.
        jumped: whether the grammar forced it and it went through the model in the same forward
            as the token before it. It was not drawn: its logprob is 0.0, as it was certain.
    """

    token: int
    index: int
    text: str
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()
    jumped: bool = False
