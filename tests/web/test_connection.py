"""chatrt.js on connections that go: silently, in the middle of a try, or while listeners throw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support import time_scale

if TYPE_CHECKING:
    from tests.web.live import LiveServer
    from tests.web.running import Run

LONG = [f"word{index} " for index in range(200)]
SHORT_MS = int(200 * time_scale())
# How a script waits, and how it has a connection bring nothing more, as a pulled cable does.
HELPERS = f"""
    const patience = {{openMs: {10 * SHORT_MS}, quietMs: 50, replyMs: {SHORT_MS}}};
    const until = async (condition) => {{
      while (!condition()) await new Promise((resolve) => setTimeout(resolve, 1));
    }};
    const deafen = (socket) => (socket.onmessage = null);
"""


def test_drafts_that_were_dropped_keep_every_question_waiting(run: Run, server: LiveServer) -> None:
    told = run(
        server,
        HELPERS
        + """
        const client = await open();
        const { sent } = sockets[0];
        for (let index = 0; index < 20; index += 1) {
          const typist = client.typeAhead();
          typist.type({input: `dropped ${index}`});
          await until(() => sent.length === index + 1);
          typist.drop();
        }
        tell((await client.send('x')).status);
        client.close();
        """,
    )
    assert told == "completed"


def test_many_who_type_keep_every_question_waiting(run: Run, server: LiveServer) -> None:
    told = run(
        server,
        HELPERS
        + """
        const client = await open();
        const typists = Array.from({length: 20}, () => client.typeAhead());
        typists.forEach((typist, index) => typist.type({input: `typed ${index}`}));
        await until(() => sockets[0].sent.length === 16);
        const answers = Array.from({length: 20}, (_, index) => client.send(`asked ${index}`));
        const texts = (await Promise.all(answers)).map(({output}) => output[0].content[0].text);
        tell(texts);
        client.close();
        """,
    )
    assert told == [f"You said: asked {index}" for index in range(20)]


def test_questions_that_are_no_json_keep_every_other_one_waiting(
    run: Run, server: LiveServer
) -> None:
    told = run(
        server,
        """
        const client = await open();
        const faults = [];
        for (let index = 0; index < 20; index += 1) {
          faults.push((await fault(client.send({input: 'x', seed: 1n})))[0]);
        }
        tell([new Set(faults).size, faults[0], (await client.send('x')).status]);
        client.close();
        """,
    )
    assert told == [1, "TypeError", "completed"]
