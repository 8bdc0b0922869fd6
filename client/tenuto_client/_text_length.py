"""How many tokens a text has at least, which only a tokenizer can tell exactly."""

from __future__ import annotations

import re
from typing import Final

_NOT_COUNTED: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\U00040000-\U0010ffff]+")


def least_tokens(text: str, longest: int) -> int:
    """How many tokens a text has at least, none of which is of more than `longest` characters.

    Control characters and those above U+3FFFF do not count: there are tokenizers that drop them.
    """
    return -(-len(_NOT_COUNTED.sub("", text)) // longest)
