"""chatrt.js in Node and in a browser, against a real server around scripted answers."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from chatrt.errors import NotFound, ServerUnavailable
from tests.web.conftest import KEY
from tests.web.running import MODULE, ROOT

if TYPE_CHECKING:
    from tests.web.live import LiveServer
    from tests.web.running import InNode, Run

LONG = [f"word{index} " for index in range(200)]


def readme_lines() -> str:
    """The ten lines of README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^## chatrt\.js in ten lines$.*?^```js\n(.*?)^```$", readme, re.M | re.S)
    assert found is not None
    return found[1]


def test_the_ten_lines_of_readme_work(in_node: InNode, keyed_server: LiveServer) -> None:
    keyed_server.script.answers["Why?"] = ["Be", "cause."]
    assert len(readme_lines().splitlines()) == 10
    told = in_node.output(readme_lines(), keyed_server.url, KEY, "Why?")
    first, figures, second = told.splitlines()
    assert first == "Because."
    assert re.fullmatch(r"TTFT [\d.]+ ms", figures)
    assert second == "You said: And then?"
    assert keyed_server.asked("And then?").parent_id is not None


def test_an_answer_is_an_iterator_of_its_events(run: Run, server: LiveServer) -> None:
    server.script.answers["hi"] = ["a", "b", "c"]
    told = run(
        server,
        """
        const client = await open();
        const answer = client.stream('hi');
        const types = [], deltas = [];
        for await (const event of answer) {
          types.push(event.type);
          if (event.delta) deltas.push(event.delta);
        }
        tell({types, deltas, text: answer.text, ended: answer.ended, status: answer.response.status,
          timed: answer.ttftMs > 0, same: (await answer.finished) === answer.response});
        client.close();
        """,
    )
    assert told["types"][0] == "response.created"
    assert told["types"][-1] == "response.completed"
    assert "".join(told["deltas"]) == told["text"] == "abc"
    assert [told[name] for name in ("ended", "timed", "same")] == [True] * 3
    assert told["status"] == "completed"


def test_many_answers_run_side_by_side_and_the_rest_in_turn(run: Run, server: LiveServer) -> None:
    told = run(
        server,
        """
        const client = await open();
        const answers = Array.from({length: 40}, (_, index) => client.stream(`question ${index}`));
        await Promise.all(answers.map((answer) => answer.finished));
        tell({texts: answers.map((answer) => answer.text),
          lanes: new Set(sockets[0].sent.map((message) => message.stream_id)).size});
        client.close();
        """,
    )
    assert told["texts"] == [f"You said: question {index}" for index in range(40)]
    assert told["lanes"] == 16


def test_a_lost_socket_is_reopened_and_each_answer_goes_on_where_it_was(
    run: Run, server: LiveServer
) -> None:
    server.script.answers["a"] = LONG
    server.script.answers["b"] = LONG[::-1]
    told = run(
        server,
        """
        const client = await open();
        const answers = ['a', 'b'].map((text) => client.stream(text));
        const deltas = ['', ''];
        const read = async (index) => {
          for await (const event of answers[index]) {
            if (!event.delta) continue;
            deltas[index] += event.delta;
            if (index === 0 && sockets.length < 4 && deltas[0].length > 200 * sockets.length) {
              sockets.at(-1).close();
            }
          }
        };
        await Promise.all([read(0), read(1)]);
        const after = await client.send('still there?');
        tell({deltas, texts: answers.map((answer) => answer.text), num: sockets.length, states,
          after: after.output[0].content[0].text});
        client.close();
        """,
    )
    expected = ["".join(LONG), "".join(LONG[::-1])]
    assert told["deltas"] == told["texts"] == expected
    assert told["num"] == 4
    assert told["states"] == ["open", *["reconnecting", "open"] * 3]
    assert told["after"] == "You said: still there?"


def test_an_answer_that_the_server_cannot_resume_ends_with_what_it_stored(
    run: Run, server: LiveServer
) -> None:
    server.script.answers["a"] = LONG

    def forget(response_id: str, key_id: str) -> Any:
        log = server.service.responses[response_id].log
        assert log.key_id == key_id
        raise NotFound("its events are gone", code="response_not_found")

    server.service.find_log = forget  # type: ignore[method-assign]  # as a restart would
    told = run(
        server,
        """
        const client = await open({fetch: async (...given) => {
          // What is stored is whole once the answer has ended.
          let reply = await fetch(...given);
          const isRunning = async () => (await reply.clone().json()).status === 'in_progress';
          while (await isRunning()) reply = await fetch(...given);
          return reply;
        }});
        const answer = client.stream('a');
        let text = '', last;
        for await (const event of answer) {
          text += event.delta ?? '';
          last = event.type;
          if (sockets.length === 1 && text.length > 100) sockets[0].close();
        }
        tell({text, last, status: answer.response.status});
        client.close();
        """,
    )
    assert told == {"text": "".join(LONG), "last": "response.completed", "status": "completed"}


def test_an_answer_that_the_server_lost_fails_and_keeps_its_part(
    run: Run, server: LiveServer
) -> None:
    server.script.answers["a"] = LONG
    server.script.holds["a"] = 20

    def gone(response_id: str, key_id: str) -> Any:
        raise NotFound(f"no response {response_id} of {key_id}", code="response_not_found")

    server.service.find_log = gone  # type: ignore[method-assign]  # as a kill would
    server.service.response = gone  # type: ignore[method-assign]
    told = run(
        server,
        """
        const client = await open();
        const answer = client.stream('a');
        while (!answer.text.includes('word19')) await new Promise((r) => setTimeout(r, 1));
        sockets[0].close();
        tell({fault: await fault(answer.finished), text: answer.text, state: client.state});
        client.close();
        """,
    )
    assert told == {
        "fault": ["ChatrtError", "response_lost", 0],
        "text": "".join(LONG[:20]),
        "state": "open",
    }


def test_a_server_that_is_still_loading_is_asked_again(run: Run, server: LiveServer) -> None:
    server.script.answers["a"] = LONG
    find_log = server.service.find_log
    asked: list[str] = []

    def loading(response_id: str, key_id: str) -> Any:
        asked.append(response_id)
        if len(asked) < 3:
            raise ServerUnavailable("the model is still loading; try again in a few seconds")
        return find_log(response_id, key_id)

    server.service.find_log = loading  # type: ignore[method-assign]
    told = run(
        server,
        """
        const client = await open();
        const answer = client.stream('a');
        for await (const event of answer) {
          if (sockets.length === 1 && answer.text.length > 100) sockets[0].close();
        }
        tell(answer.text);
        client.close();
        """,
    )
    assert told == "".join(LONG)
    assert len(asked) == 3


def test_a_running_answer_is_resumed_by_another_client(run: Run, server: LiveServer) -> None:
    server.script.answers["a"] = LONG
    told = run(
        server,
        """
        const first = await open();
        const begun = first.stream('a');
        for await (const event of begun) if (begun.text.length > 100) break;
        first.close();
        const second = await open();
        const whole = second.resume(begun.id);
        const twice = second.resume(begun.id);
        const third = await open();
        const rest = third.resume(begun.id, begun.lastSequenceNumber);
        await Promise.all([whole.finished, rest.finished]);
        tell({whole: whole.text, both: begun.text + rest.text, twice: await fault(twice.finished),
          closed: await fault(begun.finished)});
        second.close();
        third.close();
        """,
    )
    assert told["whole"] == told["both"] == "".join(LONG)
    assert told["twice"] == ["ChatrtError", "response_already_in_flight", 409]
    assert told["closed"] == ["ChatrtError", "closed", 0]


def test_stopping_keeps_the_part_and_what_waits_is_never_sent(run: Run, server: LiveServer) -> None:
    server.script.answers["a"] = LONG
    told = run(
        server,
        """
        const client = await open();
        const answer = client.stream('a');
        for await (const event of answer) if (event.delta) break;
        answer.cancel();
        const response = await answer.finished;
        sockets[0].close();
        while (client.state === 'open') await new Promise((resolve) => setTimeout(resolve, 1));
        const waiting = client.stream('never sent');
        waiting.cancel();
        tell({status: response.status, text: answer.text, waiting: await fault(waiting.finished)});
        client.close();
        """,
    )
    assert told["status"] == "cancelled"
    assert "".join(LONG).startswith(told["text"])
    assert told["waiting"] == ["ChatrtError", "cancelled", 0]
    texts = [r.message.input[-1].content for r in server.service.responses.values()]
    assert texts == ["a"]


def test_refusals_have_the_codes_of_the_wire(run: Run, keyed_server: LiveServer) -> None:
    body = """
        const client = await open();
        tell({
          parent: await fault(client.send({input: 'x', previous_response_id: 'resp_none'})),
          field: await fault(client.send({input: 'x', temperature: 'hot'})),
          turns: await fault(client.turns('conv_none')),
          key: await fault(open({apiKey: 'wrong'})),
          none: await fault(open({apiKey: undefined})),
          nobody: await fault(open({url: 'ws://127.0.0.1:9'})),
          address: await fault(open({url: 'ftp://x'})),
          unsendable: await fault(open({apiKey: 'a b'})),
        });
        client.close();
    """
    told = run(keyed_server, body, KEY)
    assert told == {
        "parent": ["ChatrtError", "previous_response_not_found", 404],
        "field": ["ChatrtError", "invalid_value", 400],
        "turns": ["ChatrtError", "not_found", 404],
        "key": ["ChatrtError", "invalid_api_key", 401],
        "none": ["ChatrtError", "invalid_api_key", 401],
        "nobody": ["ChatrtError", "server_unavailable", 0],
        "address": ["ChatrtError", "invalid_value", 0],
        "unsendable": ["ChatrtError", "invalid_api_key", 0],
    }


def test_a_valid_key_is_not_blamed_where_there_is_no_websocket(
    in_node: InNode, keyed_server: LiveServer
) -> None:
    told = in_node(
        keyed_server,
        """
        const keys = { valid: apiKey, none: undefined, unsendable: 'a b' };
        const told = {};
        for (const has of [true, false]) {
          if (!has) delete globalThis.WebSocket; // as in Node 20 without its flag
          for (const [name, key] of Object.entries(keys)) {
            told[`${name} ${has}`] = await connect({ url, apiKey: key })
              .then((client) => client.close(), ({ code, message }) => [code, message]);
          }
        }
        tell(told);
        """,
        KEY,
    )
    absent = (
        "this JavaScript has no WebSocket: Node 22 has one, Node 20 with --experimental-websocket; "
        "or name one in the option WebSocket"
    )
    assert told.pop("none true")[0] == "invalid_api_key"
    assert told == {
        "unsendable true": ["invalid_api_key", "this cannot be an API key"],
        **{f"{name} false": ["no_websocket", absent] for name in ("valid", "none", "unsendable")},
    }


def test_conversations_are_made_listed_renamed_and_deleted(run: Run, server: LiveServer) -> None:
    told = run(
        server,
        """
        const client = await open();
        const made = await client.createConversation('first');
        await client.send({input: 'hello', conversation: made.id});
        const renamed = await client.renameConversation(made.id, 'second');
        const [turn] = await client.turns(made.id);
        const found = await client.conversations('sec');
        const items = await client.items(made.id);
        const response = await client.response(turn.id);
        await client.deleteConversation(made.id);
        tell({titles: [made.title, renamed.title], found: found.length,
          roles: items.map((item) => item.role), status: response.status,
          left: await client.conversations(),
          models: (await client.models()).map((model) => model.id)});
        client.close();
        """,
    )
    assert told == {
        "titles": ["first", "second"],
        "found": 1,
        "roles": ["user", "assistant"],
        "status": "completed",
        "left": [],
        "models": ["scripted"],
    }


def test_what_is_typed_goes_out_once_it_rests_and_its_lane_becomes_the_questions(
    run: Run, server: LiveServer
) -> None:
    told = run(
        server,
        """
        const client = await open();
        const typed = client.typeAhead();
        for (const text of ['W', 'Wh', 'Why', 'Why not']) typed.type({input: text});
        while (sockets[0].sent.length === 0) await new Promise((resolve) => setTimeout(resolve, 5));
        typed.type({input: 'Why not?'});
        const answer = client.stream({input: 'Why not?'}, {typed});
        await answer.finished;
        const other = client.stream('another');
        await other.finished;
        const { sent } = sockets[0];
        tell({sent: sent.map((m) => [m.input, m.generate ?? true, m.chatrt?.partial ?? false]),
          lanes: new Set(sent.map((m) => m.stream_id)).size, text: answer.text});
        client.close();
        """,
    )
    assert told["sent"] == [
        ["Why not", False, True],
        ["Why not?", True, False],
        ["another", True, False],
    ]
    assert told["lanes"] == 1
    assert told["text"] == "You said: Why not?"


def test_the_types_name_what_the_module_has() -> None:
    types = (files("chatrt") / "web" / "chatrt.d.ts").read_text(encoding="utf-8")
    source = MODULE.read_text(encoding="utf-8")
    client = types.partition("export class Client {")[2].partition("\n}")[0]
    declared = set(re.findall(r"^  (?:readonly )?(\w+)[(:]", client, re.M)) - {"constructor"}
    body = source.partition("export class Client {")[2]
    defined = set(re.findall(r"^  (?:async |get )?(\w+)\(.*\) \{$", body, re.M)) - {"constructor"}
    assert declared - {"ready"} == defined
    assert "this.ready = " in body
    exported = set(re.findall(r"export (?:async )?(?:class|function) (\w+)", types))
    assert exported == {"ChatrtError", "Client", "connect"}
