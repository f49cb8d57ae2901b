"""Who is asked what, and in which order."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.bench.peers import PeersBench, PeersOptions, PeersSample
from chatrt.errors import InvalidValue, ServerUnavailable
from chatrt.launch import Endpoint
from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from tests.chatrt.bench_peers_support import install_fake_llama, loaded, write_tiny_model
from tests.chatrt.bench_support import ANSWER, tiny_server

if TYPE_CHECKING:
    from chatrt.bench.peers_process import PeerProcess

GGUF = Path("m.gguf")
QUICK = PeersOptions(
    histories=(64, 128),
    repetitions=2,
    prefill_tokens=96,
    decode_tokens=12,
    message_words=3,
    think_ms=0,
)


async def play(
    endpoint: Endpoint, peer: PeerProcess, options: PeersOptions = QUICK
) -> tuple[PeersBench, int]:
    """The bench as it was left, and how many conversations were told."""
    bench = PeersBench(options, endpoint, [peer])
    told: list[None] = []
    await asyncio.to_thread(bench.run, lambda: told.append(None))
    return bench, len(told)


def of(samples: list[PeersSample], engine: str) -> list[tuple[int, str, int | None]]:
    return [(s.round_index, s.measure, s.history) for s in samples if s.engine == engine]


async def test_everybody_has_every_measure_once_a_round_and_the_first_one_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_llama(tmp_path / "fake", monkeypatch)
    with loaded("llama_cpp", GGUF) as peer:
        async with ScriptedServer([ANSWER]) as server:
            bench, num_told = await play(Endpoint(server.url, None), peer)
    every_round = [
        ("decode", None),
        ("prefill", None),
        *((name, history) for history in (64, 128) for name in ("ttft_cold", "ttft_warm")),
    ]
    expected = [(index, *one) for index in (0, 1) for one in every_round]
    assert of(bench.samples, "llama_cpp") == expected
    ours = [one for one in of(bench.samples, "chatrt") if one[1] != "decode_speculation"]
    assert ours == expected
    assert len(bench.samples) == 2 * len(expected) + 2  # and ours with drafts, once a round
    starts = [s.engine for s in bench.samples if s.measure in ("decode", "prefill")]
    assert starts[:4] == ["chatrt", "llama_cpp", "llama_cpp", "chatrt"]
    assert starts[4:] == ["llama_cpp", "chatrt", "chatrt", "llama_cpp"]
    assert num_told == bench.num_planned
    assert bench.failures == {}


async def test_drafts_are_forbidden_where_decode_is_held_against_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_llama(tmp_path / "fake", monkeypatch)
    with loaded("llama_cpp", GGUF) as peer:
        async with ScriptedServer([ANSWER]) as server:
            await play(Endpoint(server.url, None), peer)
            creates = [one for one in server.creates() if one.get("generate") is not False]
    assert all(one["temperature"] == 0.0 for one in creates)
    plain = [one for one in creates if (one.get("chatrt") or {}).get("speculation")]
    assert [one["max_output_tokens"] for one in plain] == [QUICK.decode_tokens] * 2
    with_drafts = [one for one in creates if one["max_output_tokens"] == QUICK.decode_tokens]
    # The same question each, first without and then with them.
    assert [one["input"] for one in with_drafts] == [
        one["input"] for one in plain for _ in range(2)
    ]


async def test_a_peer_that_fails_takes_no_further_part_and_ours_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_llama(tmp_path / "fake", monkeypatch)
    monkeypatch.setenv("FAKE_LLAMA_CRASHES_AT", "0.96:")  # the prompt behind the first question
    with loaded("llama_cpp", GGUF) as peer:
        async with ScriptedServer([ANSWER]) as server:
            bench, _ = await play(Endpoint(server.url, None), peer)
    assert bench.failures == {"llama_cpp": "llama.cpp's process ended with 3: out of memory"}
    assert of(bench.samples, "llama_cpp") == [(0, "decode", None)]
    assert len(of(bench.samples, "chatrt")) == 14


async def test_a_turn_that_our_server_refuses_ends_the_run_with_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_llama(tmp_path / "fake", monkeypatch)
    asked: list[dict[str, Any]] = []

    def script(message: dict[str, Any]) -> ScriptedAnswer:
        asked.append(message)
        refusal = {"code": "kv_exhausted", "message": "need 2 pages"}
        return ScriptedAnswer(error=refusal) if len(asked) > 6 else ANSWER

    with loaded("llama_cpp", GGUF) as peer:
        async with ScriptedServer(script) as server:
            bench = PeersBench(QUICK, Endpoint(server.url, None), [peer])
            with pytest.raises(Exception, match="need 2 pages"):
                await asyncio.to_thread(bench.run, lambda: None)
    assert bench.samples


async def test_a_history_that_the_context_cannot_hold_is_refused_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_llama(tmp_path / "fake", monkeypatch)
    long = PeersOptions(histories=(8_190,))
    with loaded("llama_cpp", GGUF) as peer:
        async with ScriptedServer([ANSWER]) as server:
            with pytest.raises(InvalidValue, match=r"8190 tokens .* holds 8192"):
                await play(Endpoint(server.url, None), peer, long)
            assert server.creates() == []


async def test_no_server_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_llama(tmp_path / "fake", monkeypatch)
    async with ScriptedServer([ANSWER]) as server:
        endpoint = Endpoint(server.url, None)
    with loaded("llama_cpp", GGUF) as peer, pytest.raises(ServerUnavailable):
        await play(endpoint, peer)


async def test_a_real_server_and_transformers_compute_what_is_new_of_prompts_as_long(
    tmp_path: Path,
) -> None:
    model = write_tiny_model(tmp_path / "model")
    with loaded("transformers", model) as peer:
        async with tiny_server(tmp_path / "tokenizer", max_context=1024) as endpoint:
            bench, _ = await play(endpoint, peer)
    assert bench.failures == {}
    by_key = {(s.engine, s.measure, s.history, s.round_index): s.times for s in bench.samples}
    for (engine, measure, history, index), times in by_key.items():
        if engine == "chatrt" and measure != "decode_speculation":
            theirs = by_key["transformers", measure, history, index]
            if measure != "ttft_warm":
                assert times.prompt_tokens == theirs.prompt_tokens
            assert times.ttft_ms > 0
            assert theirs.ttft_ms > 0
            assert times.cached_tokens is not None
            assert theirs.cached_tokens is not None
            if measure == "ttft_warm":
                cold = by_key["transformers", "ttft_cold", history, index]
                assert theirs.cached_tokens >= cold.prompt_tokens
                ours_cold = by_key["chatrt", "ttft_cold", history, index]
                assert times.cached_tokens >= ours_cold.prompt_tokens


def test_comparing_with_peers_needs_no_torch() -> None:
    modules = "chatrt.bench.peers, chatrt.bench.peers_report, chatrt.bench.peers_process"
    code = f"import sys, {modules}; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
