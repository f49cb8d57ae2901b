"""Unmodified SDKs in processes of their own, each through the same turns, stops and mistakes."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.clients.program import NAMES, Said, environment, node, running
from tests.e2e.process import wait_until
from tests.support import time_scale

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.clients.program import Program
    from tests.e2e.process import ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]
FRANCE, ITALY = "What is the capital of France?", "And what is the capital of Italy?"


@pytest.fixture(scope="module", params=NAMES)
def program(
    request: pytest.FixtureRequest,
    server: ServerProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Program]:
    """One connection for all tests of a client: each leaves it usable."""
    log = tmp_path_factory.mktemp("program") / "log"
    with running(request.param, server.base_url, server.api_key, log) as program:
        yield program


def test_a_follow_up_knows_what_was_said_and_computes_only_what_is_new(program: Program) -> None:
    first = program.ask(FRANCE)
    second = program.ask(ITALY, after=first)
    third = program.ask("Name a river there.", after=second)
    assert "Paris" in first.text
    assert "Rome" in second.text
    assert third.text
    assert not first.error + second.error + third.error
    for turn, following in ((first, second), (second, third)):
        assert following.cached_tokens >= turn.total_tokens - 1


def test_a_stopped_answer_ends_at_once_and_can_be_followed(
    program: Program, server: ServerProcess
) -> None:
    endless = {"ignore_eos": True}
    stopped = program.ask("Count from one to fifty.", max_tokens=700, options=endless, stop=True)
    assert stopped.text
    assert not stopped.error
    if program.name == "openai-agents":  # it hangs up, which might be a lost connection
        path = f"/v1/responses/{stopped.id}"
        assert server.get(path).body["status"] == "in_progress"
        assert server.get(f"{path}/cancel", method="POST").body["status"] == "cancelled"
    wait_until(lambda: not server.get("/v1/chatrt/live").body["turns"], "the answer goes on")
    assert server.get("/v1/chatrt/live").body["recent"][-1]["status"] == "cancelled"
    after = program.ask("Go on.", after=stopped)
    assert after.text
    assert after.cached_tokens >= stopped.total_tokens - 1
    assert "Paris" in program.ask(FRANCE).text


def test_a_mistake_is_told_in_words_and_the_next_turn_is_answered(program: Program) -> None:
    unknown = program.ask("Hi.", model="gpt-0")
    assert "model gpt-0 is not served here" in unknown.error
    too_long = program.ask("word " * 2000)
    assert "1024" in too_long.error.replace(",", "")
    for said in (unknown, too_long):
        assert not said.text
    assert "Paris" in program.ask(FRANCE).text
    if program.name != "openai-agents":  # it closes its connection at every error
        assert "reconnecting" not in program.told()


def test_an_answer_that_its_limit_cuts_short_arrives_and_is_called_what_the_sdk_calls_it(
    program: Program,
) -> None:
    cut = program.ask("Tell me about the sea.", max_tokens=5)
    assert cut.text
    if program.name == "pipecat":
        assert cut.error == "LLM response error: max_output_tokens"
    else:
        assert cut.status == "incomplete"
        assert ("ModelBehaviorError" in cut.error) == (program.name == "openai-agents")
    assert "Paris" in program.ask(FRANCE).text


def test_an_option_of_ours_reaches_the_server_unchanged(program: Program) -> None:
    cut = program.ask(FRANCE, options={"stop": [" Paris"]})
    assert cut.text == "The capital of France is"
    assert "Paris" in program.ask(FRANCE).text


@pytest.mark.parametrize("program", ["openai-node", "openai-agents"], indirect=True)
def test_an_unknown_parent_is_an_error_code_and_the_next_turn_is_answered(program: Program) -> None:
    unknown = program.ask(ITALY, after=Said(id="resp_nowhere"))
    assert unknown.code == "previous_response_not_found"
    assert "resp_nowhere" in unknown.error
    assert "Paris" in program.ask(FRANCE).text


@pytest.mark.parametrize("program", ["pipecat"], indirect=True)
def test_pipecat_sends_everything_anew_when_its_parent_was_deleted(
    program: Program, server: ServerProcess
) -> None:
    first = program.ask(FRANCE)
    newest = server.get("/v1/chatrt/live").body["recent"][-1]["response_id"]
    assert server.delete(f"/v1/responses/{newest}").status == 200
    second = program.ask(ITALY, after=first)
    assert "Rome" in second.text
    assert not second.error
    assert "previous_response_not_found" in program.told()


def test_lanes_of_openai_node_interleave_and_fork_one_tip(server: ServerProcess) -> None:
    done = subprocess.run(
        [*node("lanes.mjs"), server.base_url],
        env=environment(server.api_key),
        capture_output=True,
        text=True,
        timeout=60 * time_scale(),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["a"]["text"] == told["b"]["text"] != ""
    assert told["switches"] > 4
    assert told["stopped"]["status"] == "cancelled"
    assert "Paris" in told["meanwhile"]["text"]
    assert told["refused"] == "previous_response_not_found"
    for fork in (told["a"], told["b"]):
        assert fork["cached"] >= told["root"]["total"] - 1
