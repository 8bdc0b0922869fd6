"""The bytes of payload version 1, as released: a later client must read these, and write them.

What stands here is never changed. A new version gets a file of its own beside it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenuto_client import (
    EndEvent,
    JobSpec,
    JobState,
    Message,
    ModelInfo,
    StateEvent,
    Token,
    Usage,
    WorkerInfo,
    pack_announcement,
    pack_spec,
    pack_tokens,
    ticket_payload,
    unpack_entry,
    unpack_model,
    unpack_spec,
    unpack_tokens,
    unpack_worker,
)

# A float32 that no short decimal names.
THIRD = -0.10000000149011612
WITH_TOPS = [
    Token(1, 1, " a", -0.5, ((1, -0.5), (2, -1.25))),
    Token(300, 2, "", THIRD, ((300, THIRD), (2, -9.5))),
]
WITH_TOPS_BYTES = (
    "86a17601a16101a1699201cd012ca17892a22061a0a16c92cabf000000cabdcccccda16b92929201"
    "cabf0000009202cabfa000009292cd012ccabdcccccd9202cac1180000"
)
PLAIN = [Token(7, 3, "ü", -0.25)]
PLAIN_BYTES = "85a17601a16103a1699107a17891a2c3bca16c91cabe800000"
# Added later; no other entry changed by it.
JUMPED = [*PLAIN, Token(8, 4, "a", 0.0, jumped=True), Token(9, 5, "b", 0.0, jumped=True)]
JUMPED_BYTES = (
    "86a17601a16103a16993070809a17893a2c3bca161a162a16c93cabe800000ca00000000ca00000000a16a920102"
)
SPEC = JobSpec(
    "org/m",
    (Message(role="user", content="hi"),),
    max_tokens=9,
    temperature=0.5,
    seed=2**63 - 1,
    stop=("x", "ü"),
    stop_token_ids=(5,),
    logit_bias={7: -1.5},
    deadline=1e9,
    idempotency_key="k",
    metadata={"a": [1, None]},
    retention="forever",
    recovery="fast",
    tenant="t",
    priority=-3,
    logprobs=2,
)
SPEC_BYTES = (
    "de001ca17601a56d6f64656ca56f72672f6da670726f6d70749182a4726f6c65a475736572a7636f"
    "6e74656e74a26869a3726177c2aa6d61785f746f6b656e7309ab74656d7065726174757265cb3fe0"
    "000000000000a5746f705f70cb3ff0000000000000a5746f705f6b00a56d696e5f70cb0000000000"
    "000000a473656564cf7fffffffffffffffa473746f7092a178a2c3bcae73746f705f746f6b656e5f"
    "6964739105aa69676e6f72655f656f73c2a86c6f6770726f627302aa6c6f6769745f626961739192"
    "07cbbff8000000000000b272657065746974696f6e5f70656e616c7479cb3ff0000000000000b772"
    "657065746974696f6e5f636f6e746578745f73697a6514b070726573656e63655f70656e616c7479"
    "cb0000000000000000b570726573656e63655f636f6e746578745f73697a6514b16672657175656e"
    "63795f70656e616c7479cb0000000000000000b66672657175656e63795f636f6e746578745f7369"
    "7a6514a87072696f72697479fda8646561646c696e65cb41cdcd6500000000a674656e616e74a174"
    "af6964656d706f74656e63795f6b6579a16ba86d65746164617461ae7b2261223a5b312c6e756c6c"
    "5d7da9726574656e74696f6ea7666f7265766572a87265636f76657279a466617374"
)
TICKET_BYTES = "85a174c0a166aa72756e5f7469636b6574a16190a16b80a26574cf0000018bcfe56800"
MODEL = ModelInfo("m", 4096, 49152, "f" * 8, 1.5, {"chat_template": True})
MODEL_BYTES = (
    "86a17601ae636f6e746578745f6c656e677468cd1000aa766f6361625f73697a65cdc000ab66696e"
    "6765727072696e74a86666666666666666ac616e6e6f756e6365645f6174cb3ff8000000000000a8"
    "666561747572657381ad636861745f74656d706c617465c3"
)
WORKER = WorkerInfo("w", ("m", "n"), 4, 1, 1.0, 2.5, "h", 7, "cpu", "d", "0.1.0")
WORKER_BYTES = (
    "8ba17601a66d6f64656c7392a16da16ea5736c6f747304a772756e6e696e6701aa73746172746564"
    "5f6174cb3ff0000000000000a77365656e5f6174cb4004000000000000a4686f7374a168a3706964"
    "07a6646576696365a3637075a8646174615f646972a164a776657273696f6ea5302e312e30"
)
# Written by Redis's own msgpack, which packs a float in single precision where that loses nothing.
END = EndEvent(2, JobState.FAILED, 3, None, "!", Usage(3, 2), "recomputed", "moved", error="broken")
END_BYTES = (
    "8aa474797065a3656e64a965786163746e657373aa7265636f6d7075746564a26174ca3fc00000a5"
    "6572726f72a662726f6b656ea5757361676582ad70726f6d70745f746f6b656e7303b1636f6d706c"
    "6574696f6e5f746f6b656e7302b065786163746e6573735f726561736f6ea56d6f766564a5737461"
    "7465a66661696c6564a565706f636803a474657874a121a17601"
)
STATE = StateEvent(JobState.RUNNING, 2, 2, worker="w")
STATE_BYTES = (
    "86a474797065a57374617465a57374617465a772756e6e696e67a6776f726b6572a177a565706f63"
    "6802a26174ca3fc00000a17601"
)


@pytest.mark.parametrize(
    ("tokens", "packed"),
    [(WITH_TOPS, WITH_TOPS_BYTES), (PLAIN, PLAIN_BYTES), (JUMPED, JUMPED_BYTES)],
)
def test_tokens(tokens: list[Token], packed: str) -> None:
    assert pack_tokens(tokens).hex() == packed
    assert unpack_tokens(bytes.fromhex(packed)) == tokens
    assert unpack_entry("2-0", {b"t": bytes.fromhex(packed)}) == tokens


def test_spec() -> None:
    assert pack_spec(SPEC).hex() == SPEC_BYTES
    assert unpack_spec(bytes.fromhex(SPEC_BYTES)) == SPEC


def test_ticket() -> None:
    assert ticket_payload(1_700_000_000_000).hex() == TICKET_BYTES


def test_announcements() -> None:
    assert pack_announcement(MODEL).hex() == MODEL_BYTES
    assert unpack_model("m", bytes.fromhex(MODEL_BYTES)) == MODEL
    assert pack_announcement(WORKER).hex() == WORKER_BYTES
    assert unpack_worker("w", bytes.fromhex(WORKER_BYTES)) == WORKER


def test_an_announcement_may_say_more_than_the_first_ones_did() -> None:
    limits = {"m": {"max_prompt": 9}}
    more = replace(
        WORKER, tokens_at_risk=12, checkpoint_bytes=5, checkpoint_budget=2**40, limits=limits
    )
    assert unpack_worker("w", pack_announcement(more)) == more
    wider = replace(MODEL, max_prompt=1, max_tokens=2, max_context=3, longest_token=4)
    assert unpack_model("m", pack_announcement(wider)) == wider
    old = unpack_worker("w", bytes.fromhex(WORKER_BYTES))
    assert (old.tokens_at_risk, old.checkpoint_bytes, old.checkpoint_budget) == (None,) * 3


def test_events() -> None:
    assert unpack_entry("2-4", {b"e": bytes.fromhex(END_BYTES)}) == END
    assert unpack_entry("2-1", {b"e": bytes.fromhex(STATE_BYTES)}) == STATE
