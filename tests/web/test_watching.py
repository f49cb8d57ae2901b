"""Watches of conversations and readers of answers in chatrt.js: any number of both."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.web.live import LiveServer
    from tests.web.running import Run

LONG = [f"word{index} " for index in range(200)]
TEXT = "".join(LONG)
# Two clients, a conversation, and how a script waits: for a condition.
PAIR = """
    const until = async (condition) => {
      while (!condition()) await new Promise((resolve) => setTimeout(resolve, 1));
    };
    const told = (type) => sockets[0].sent.filter((message) => message.type.endsWith(type)).length;
    const drain = async (answer) => {
      let text = '';
      for await (const { delta } of answer) text += delta ?? '';
      return text;
    };
    const [client, other] = [await open(), await open({onState: null})];
    const { id } = await other.createConversation('shared');
    const ask = (input) => other.send({input, conversation: id});
"""


def test_two_readers_of_one_answer_hang(run: Run, server: LiveServer) -> None:
    server.script.answers["a"] = LONG
    told = run(
        server,
        PAIR
        + """
        const answer = client.stream('a');
        const texts = await Promise.all([drain(answer), drain(answer)]);
        for await (const event of answer) break;
        tell([...texts, await drain(answer)]);
        client.close();
        other.close();
        """,
    )
    assert told == [TEXT] * 3
