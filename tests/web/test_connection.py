"""chatrt.js on connections that go: silently, in the middle of a try, or while listeners throw."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support import time_scale

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.web.live import LiveServer, LoopThread
    from tests.web.running import InNode, Run

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


@pytest.fixture
def silent_port(loop: LoopThread) -> Iterator[int]:
    """A port where connections are taken and nothing is ever said."""
    ended = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.transport.abort()

    listening = loop.call(asyncio.start_server(serve, "127.0.0.1", 0))
    yield listening.sockets[0].getsockname()[1]
    loop.run(ended.set)
    loop.run(listening.close)


def test_an_answer_on_a_connection_that_carries_nothing_more_runs_for_ever(
    run: Run, server: LiveServer
) -> None:
    server.script.answers["a"] = LONG
    told = run(
        server,
        HELPERS
        + """
        const client = await open({patience});
        const answer = client.stream('a');
        for await (const event of answer) {
          if (sockets.length === 1 && answer.text.length > 100) deafen(sockets[0]);
        }
        tell({text: answer.text, states: states.slice(0, 3)});
        client.close();
        """,
    )
    assert told == {"text": "".join(LONG), "states": ["open", "reconnecting", "open"]}


def test_a_request_on_a_connection_that_carries_nothing_more_is_never_settled(
    run: Run, server: LiveServer
) -> None:
    told = run(
        server,
        HELPERS
        + """
        const client = await open({patience});
        deafen(sockets[0]);
        const faults = [fault(client.createConversation('x')), fault(client.send('y'))];
        tell(await Promise.all(faults));
        client.close();
        """,
    )
    assert told == [["ChatrtError", "connection_lost", 0]] * 2


def test_a_server_that_is_only_slow_is_asked_and_not_left(run: Run, server: LiveServer) -> None:
    server.script.answers["a"] = LONG
    server.script.holds["a"] = 3
    told = run(
        server,
        HELPERS
        + """
        const client = await open({patience: {...patience, replyMs: 20 * patience.replyMs}});
        const answer = client.stream('a');
        const isProbe = ({stream_id: lane}) => lane === 'probe';
        await until(() => sockets[0].sent.some(isProbe));
        answer.cancel();
        tell([(await answer.finished).status, sockets.length]);
        client.close();
        """,
    )
    assert told == ["cancelled", 1]


def test_a_connection_that_slept_with_its_machine_is_tried_at_once(
    run: Run, server: LiveServer
) -> None:
    told = run(
        server,
        HELPERS
        + """
        const client = await open({patience: {quietMs: 1e6, replyMs: 5 * patience.replyMs}});
        deafen(sockets[0]);
        client.retryNow();
        await until(() => sockets.length === 2 && client.state === 'open');
        client.retryNow(); // it is one
        tell(await client.send('hi').then(({status}) => [status, states, sockets.length]));
        client.close();
        """,
    )
    assert told == ["completed", ["open", "reconnecting", "open"], 2]


def test_a_socket_that_never_opens_is_waited_for_for_ever(
    in_node: InNode, server: LiveServer, silent_port: int
) -> None:
    told = in_node(
        server,
        HELPERS
        + f"const nowhere = 'ws://127.0.0.1:{silent_port}/v1/responses';"
        + """
        const never = await fault(open({url: nowhere, patience: {openMs: 200}}));
        let lost = false;
        class Astray extends Spied {
          constructor(address, offered) {
            super(lost ? nowhere : address, offered);
            lost = false;
          }
        }
        states.length = 0;
        const client = await open({WebSocket: Astray, patience});
        lost = true;
        sockets.at(-1).close();
        await until(() => states.length >= 4);
        tell([never, states]);
        client.close();
        """,
    )
    assert told == [
        ["ChatrtError", "server_unavailable", 0],
        ["open", "reconnecting", "reconnecting", "open"],
    ]


def test_try_now_while_the_client_asks_why_opens_two_sockets(run: Run, server: LiveServer) -> None:
    told = run(
        server,
        HELPERS
        + """
        let isDown = false, go;
        const gate = new Promise((resolve) => (go = resolve));
        const asks = [];
        class Falling extends Spied {
          constructor(address, offered) {
            super(isDown ? 'ws://127.0.0.1:9' : address, offered);
          }
        }
        const client = await open({WebSocket: Falling, fetch: async (...given) => {
          const asked = gate.then(() => fetch(...given));
          asks.push(asked);
          return asked;
        }});
        isDown = true;
        sockets[0].close();
        await until(() => asks.length === 1);
        isDown = false;
        client.retryNow();
        client.retryNow();
        await until(() => client.state === 'open');
        go();
        await asks[0];
        const { status } = await client.send('hi');
        tell({status, states, open: sockets.filter((one) => one.readyState === 1).length});
        client.close();
        """,
    )
    assert told == {"status": "completed", "states": ["open", "reconnecting", "open"], "open": 1}


def test_a_resume_on_a_closed_client_never_settles(run: Run, server: LiveServer) -> None:
    told = run(
        server,
        """
        const client = await open();
        client.close();
        const answer = client.resume('resp_x');
        const asked = await fault(client.createConversation());
        tell([await fault(answer.finished), answer.ended, asked]);
        """,
    )
    assert told == [["ChatrtError", "closed", 0], True, ["ChatrtError", "closed", 0]]


def test_connect_never_settles_where_a_listener_throws(run: Run, server: LiveServer) -> None:
    told = run(
        server,
        HELPERS
        + """
        const thrown = [];
        const mine = (error) => thrown.push(error.message);
        if (globalThis.process) process.on('uncaughtException', mine);
        else addEventListener('error', ({error}) => mine(error));
        const client = await open({onState: (state) => { throw new Error(state); }});
        const { status } = await client.send('hi');
        await until(() => thrown.length > 0);
        tell([status, thrown]);
        client.close();
        """,
    )
    assert told == ["completed", ["open"]]


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


def test_a_long_upload_that_goes_on_is_taken_for_a_dead_connection(
    run: Run, server: LiveServer
) -> None:
    told = run(
        server,
        HELPERS
        + """
        const client = await open({patience});
        const [socket] = sockets;
        deafen(socket);
        let waits = 6; // bytes; fewer at each look, as when they go out slowly
        Object.defineProperty(socket, 'bufferedAmount', {get: () => (waits > 0 ? waits-- : 0)});
        client.retryNow();
        await until(() => sockets.length === 2 && client.state === 'open');
        tell(socket.sent.length);
        client.close();
        """,
    )
    assert told == 4  # three looks at an upload that goes on, and one behind it
