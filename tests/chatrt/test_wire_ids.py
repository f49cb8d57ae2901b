from __future__ import annotations

from chatrt.wire.ids import message_id, new_conversation_id, new_response_id


def test_ids_have_a_prefix_and_128_random_bits() -> None:
    for made, prefix in ((new_response_id(), "resp_"), (new_conversation_id(), "conv_")):
        assert made.startswith(prefix)
        assert len(bytes.fromhex(made.removeprefix(prefix))) == 16


def test_no_two_ids_are_alike() -> None:
    assert len({new_response_id() for _ in range(1000)}) == 1000


def test_the_messages_id_follows_from_the_responses() -> None:
    assert message_id("resp_abc") == "msg_abc"
