"""``keeps_text``: whether a chat template puts a user's text into the prompt whole.

That is proved for templates in which a message's content is printed and nothing else: it is in no
condition, and nothing is made of it. Then every text takes the way that one takes, and one that is
rendered shows it. Spaces around the text may be stripped. Other templates may do with it whatever
they like.
"""

from __future__ import annotations

from typing import Any, Final

from jinja2 import Environment, TemplateError, nodes

_PROBES: Final = ("<&\"'{{ probe }}\n\n  ok?>", "another  \t probe")
_LOOP: Final = ("first", "last", "index", "index0", "revindex", "revindex0", "length")
_MESSAGES: Final = "messages"


def keeps_text(tokenizer: Any) -> bool:
    """Whether the prompt of one user message has its text in it, for any text.

    Args:
        tokenizer: mlx-lm's wrapper. Without a chat template the text itself is the prompt.
    """
    if not tokenizer.has_chat_template:
        return True
    try:
        # mlx-lm has code of its own for the chats of some models.
        has_own = tokenizer._chat_template is not None
        if has_own or not _is_plain(tokenizer.get_chat_template()):
            return False
        return all(probe in render(tokenizer, _user(probe)) for probe in _PROBES)
    except Exception:  # noqa: BLE001 - whatever a template does: then nothing is proved
        return False


def render(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """The text that the chat template makes of messages, before it is tokenized."""
    rendered: str = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    return rendered


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _is_plain(template: str) -> bool:
    try:
        body = Environment(autoescape=False).parse(template).body  # noqa: S701 - never rendered
    except TemplateError:
        return False
    return _Reader().are_plain(body)


class _Reader:
    """Knows the names that messages have in the part of a template that it reads."""

    def __init__(self) -> None:
        self._carriers = {_MESSAGES}

    def are_plain(self, statements: list[nodes.Node]) -> bool:
        """Whether no content is in a condition, and nothing is made of any."""
        return all(map(self._is_plain, statements))

    def _is_plain(self, statement: nodes.Node) -> bool:
        match statement:
            case nodes.Output():
                return all(map(self._is_printed, statement.nodes))
            case nodes.If():
                bodies = [*statement.body, *statement.elif_, *statement.else_]
                return self._is_blind(statement.test) and self.are_plain(bodies)
            case nodes.For(
                target=nodes.Name(name=target),
                iter=nodes.Name(name=source),
                else_=[],
                test=None,
                recursive=False,
            ) if source == _MESSAGES and target != _MESSAGES:
                self._carriers.add(target)
                return self.are_plain(statement.body)
        return False

    def _is_printed(self, expression: nodes.Node) -> bool:
        """Whether what is printed is contents, stripped perhaps, and what has to do with none."""
        match expression:
            case nodes.TemplateData():
                return True
            case nodes.Add():
                return self._is_printed(expression.left) and self._is_printed(expression.right)
            case nodes.Filter(name="trim", args=[], kwargs=[], dyn_args=None, dyn_kwargs=None):
                return expression.node is not None and self._is_printed(expression.node)
        return self._key(expression) == "content" or self._is_blind(expression)

    def _is_blind(self, expression: nodes.Node | None) -> bool:
        """Whether an expression has to do with no content."""
        match expression:
            case nodes.Const():
                return True
            case nodes.Name():
                return expression.name not in self._carriers and expression.name != "loop"
            case nodes.Getattr(node=nodes.Name(name="loop")):
                return expression.attr in _LOOP
            case nodes.Compare():
                operands = (each.expr for each in expression.ops)
                return self._is_blind(expression.expr) and all(map(self._is_blind, operands))
            case nodes.And() | nodes.Or():
                return self._is_blind(expression.left) and self._is_blind(expression.right)
            case nodes.Not():
                return self._is_blind(expression.node)
            case nodes.Test(name="defined" | "none" | "undefined", args=[]):
                return self._is_blind(expression.node)
            case nodes.Add():
                return self._is_blind(expression.left) and self._is_blind(expression.right)
        return self._key(expression) == "role"

    def _key(self, expression: nodes.Node | None) -> str | None:
        """Of `message.key`, `message['key']` and `messages[0]['key']` the key."""
        match expression:
            case nodes.Getattr(node=node, attr=str(key)):
                pass
            case nodes.Getitem(node=node, arg=nodes.Const(value=str(key))):
                pass
            case _:
                return None
        match node:
            case nodes.Getitem(node=nodes.Name(name="messages"), arg=nodes.Const(value=int())):
                return key
            case nodes.Name(name=name) if name in self._carriers and name != _MESSAGES:
                return key
        return None
