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


def test_the_first_of_two_watches_of_one_conversation_hears_nothing(
    run: Run, server: LiveServer
) -> None:
    server.script.answers["a"] = LONG
    told = run(
        server,
        PAIR
        + """
        const heard = [[], [], []];
        const listen = (index) => client.watch(id, (answer) => heard[index].push(drain(answer)));
        const stops = [await listen(0), await listen(1)];
        const asked = ask('a');
        await until(() => heard[0].length > 0);
        await listen(2); // in the middle of the answer, and told all of it
        await asked;
        const both = [await heard[0][0], await heard[1][0], await heard[2][0]];
        stops[1]();
        await ask('again');
        await until(() => heard[0].length > 1);
        tell({both, again: await heard[0][1], num: heard.map((answers) => answers.length),
          subscribed: told('.subscribe')});
        client.close();
        other.close();
        """,
    )
    assert told["both"] == [TEXT] * 3
    assert told["again"] == "You said: again"
    assert told["num"] == [2, 1, 2]
    assert told["subscribed"] == 1


def test_a_conversation_watched_while_the_socket_is_away_is_never_watched(
    run: Run, server: LiveServer
) -> None:
    told = run(
        server,
        PAIR
        + """
        const heard = [];
        const listen = () => client.watch(id, (answer) => heard.push(drain(answer)));
        const cut = listen();
        sockets[0].close(); // before the server can have agreed
        await until(() => client.state !== 'open');
        const { id: another } = await other.createConversation('another');
        const away = client.watch(another, (answer) => heard.push(drain(answer)));
        await Promise.all([cut, away]);
        await ask('one');
        await other.send({input: 'two', conversation: another});
        await until(() => heard.length === 2);
        tell(await Promise.all(heard));
        client.close();
        other.close();
        """,
    )
    assert told == ["You said: one", "You said: two"]


def test_a_watched_answer_goes_on_over_a_lost_socket_and_the_watch_does(
    run: Run, server: LiveServer
) -> None:
    server.script.answers["a"] = LONG
    told = run(
        server,
        PAIR
        + """
        const heard = [];
        await client.watch(id, (answer) => heard.push(answer));
        const asked = ask('a');
        await until(() => heard[0]?.text.length > 100);
        sockets[0].close();
        await until(() => sockets.length === 3);
        const late = [];
        await client.watch(id, (answer) => late.push(answer));
        await Promise.all([asked, heard[0].finished]);
        await ask('again');
        await until(() => heard.length === 2 && late.length === 2);
        tell({text: heard[0].text, same: heard.map((answer, index) => answer === late[index])});
        client.close();
        other.close();
        """,
    )
    assert told == {"text": TEXT, "same": [True, True]}


def test_a_refused_watch_rejects_and_a_closed_client_watches_nothing(
    run: Run, server: LiveServer
) -> None:
    told = run(
        server,
        PAIR
        + """
        const refused = await fault(client.watch('conv_none', () => {}));
        client.close();
        tell([refused, await fault(client.watch(id, () => {}))]);
        other.close();
        """,
    )
    assert told == [["ChatrtError", "not_found", 404], ["ChatrtError", "closed", 0]]


def test_conversations_that_were_left_are_watched_until_the_server_refuses_more(
    run: Run, server: LiveServer
) -> None:
    """The last listener's leaving is told to the server, once what it was told of has ended."""
    server.script.answers["a"] = LONG
    told = run(
        server,
        PAIR
        + """
        const heard = [];
        const listen = () => client.watch(id, (answer) => heard.push(answer));
        const stops = [await listen(), await listen()];
        const asked = ask('a');
        await until(() => heard.length === 2 && heard[0].text);
        const left = [];
        for (const stop of [...stops, stops[1]]) {
          stop();
          left.push(told('.unsubscribe'));
        }
        await asked;
        await until(() => told('.unsubscribe') > 0);
        const [sent] = sockets[0].sent.filter(({type}) => type.endsWith('.unsubscribe'));
        const after = await client.send("it goes on"); // whether it knows the message or not
        tell({left, text: heard[0].text, sent: [sent.type, sent.id === id],
          num: told('.unsubscribe'), after: after.status});
        client.close();
        other.close();
        """,
    )
    assert told == {
        "left": [0, 0, 0],
        "text": TEXT,
        "sent": ["chatrt.conversation.unsubscribe", True],
        "num": 1,
        "after": "completed",
    }


def test_a_listener_that_throws_takes_no_event_from_its_answer(
    run: Run, server: LiveServer
) -> None:
    told = run(
        server,
        PAIR
        + """
        const thrown = [];
        const mine = (error) => thrown.push(error.message);
        if (globalThis.process) process.on('uncaughtException', mine);
        else addEventListener('error', ({error}) => mine(error));
        let answer;
        await client.watch(id, (begun) => { answer = begun; throw new Error('mine'); });
        await ask('one');
        await until(() => answer?.ended && thrown.length > 0);
        const types = [];
        for await (const { type } of answer) types.push(type);
        tell([answer.text, types[0], thrown]);
        client.close();
        other.close();
        """,
    )
    assert told == ["You said: one", "response.created", ["mine"]]
