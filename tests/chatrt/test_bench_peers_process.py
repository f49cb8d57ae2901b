"""A peer's process answers, or one sentence says why it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chatrt.bench import peers_worker
from chatrt.bench.peers_process import PEERS, PeerProcess, default_peer_python
from chatrt.errors import InvalidValue, PeerFailed
from tests.chatrt.bench_peers_support import (
    install_fake_llama,
    loaded,
    process,
    user,
    write_tiny_model,
)

GGUF = Path("m.gguf")


def test_a_peer_that_lacks_packages_names_them() -> None:
    with process("llama_cpp") as peer:
        found = peer.find(GGUF)
    assert found.missing in ([], ["llama-cpp-python"])
    with process("transformers") as peer:
        found = peer.find(GGUF)
    # What the environment has of them depends on who set it up; nothing is both.
    names = {"transformers", "torch", "accelerate", "gguf"}
    assert set(found.missing) | set(found.versions) == names
    assert not set(found.missing) & set(found.versions)


def test_what_a_peer_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_llama(tmp_path / "fake", monkeypatch)
    with loaded("llama_cpp", GGUF) as peer:
        answer = peer.chat([user("hi")], max_tokens=3)
    assert answer.text == "abc"
    assert (answer.prompt_tokens, answer.output_tokens) == (10, 3)
    assert len(answer.pieces_ms) == 3
    assert answer.pieces_ms == sorted(answer.pieces_ms)
    assert answer.cached_tokens is None


def test_an_answer_without_text_has_an_end_and_no_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_llama(tmp_path / "fake", monkeypatch)
    with loaded("llama_cpp", GGUF) as peer:
        answer = peer.chat([user("silence")], max_tokens=3)
    assert (answer.text, answer.pieces_ms) == ("", [])
    assert (answer.prompt_tokens, answer.output_tokens) == (10, 0)
    assert answer.ttft_ms == answer.ended_ms > 0


def test_a_peer_that_refuses_a_turn_answers_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_llama(tmp_path / "fake", monkeypatch)
    with loaded("llama_cpp", GGUF) as peer:
        with pytest.raises(
            PeerFailed, match=r"^llama\.cpp failed: ValueError: Requested tokens exceed the context"
        ):
            peer.chat([user("refuse")], max_tokens=3)
        assert peer.chat([user("hi")], max_tokens=3).text == "abc"


def test_a_file_that_a_peer_cannot_load_is_the_first_line_of_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_llama(tmp_path / "fake", monkeypatch)
    with process("llama_cpp") as peer:
        peer.find(GGUF)
        with pytest.raises(PeerFailed, match=r"ValueError: no tensors in this file$"):
            peer.load(Path("broken.gguf"), max_context=64, seed=0)


def test_a_crash_is_told_with_its_last_words_however_often_one_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_llama(tmp_path / "fake", monkeypatch)
    with loaded("llama_cpp", GGUF) as peer:
        for text in ("crash", "hi"):
            with pytest.raises(
                PeerFailed, match=r"^llama\.cpp's process ended with 3: out of memory$"
            ):
                peer.chat([user(text)], max_tokens=3)


def test_a_peer_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_llama(tmp_path / "fake", monkeypatch)
    with loaded("llama_cpp", GGUF, timeout_s=3) as peer:
        with pytest.raises(PeerFailed, match=r"did not answer within \d+ s and was ended"):
            peer.chat([user("hang")], max_tokens=3)
        with pytest.raises(PeerFailed, match=r"process ended with -?\d+"):
            peer.chat([user("hi")], max_tokens=3)


def test_a_program_that_is_no_python_makes_no_sense() -> None:
    with (
        process("llama_cpp", python=Path("/bin/echo")) as peer,
        pytest.raises(PeerFailed, match=r"answered '.*peers_worker\.py', which makes no sense"),
    ):
        peer.find(GGUF)


def test_an_interpreter_that_is_not_there_is_said_before_anything_is_measured() -> None:
    with pytest.raises(InvalidValue, match=r"--peer-python is /nowhere/python, which cannot be"):
        PeerProcess("llama_cpp", Path("/nowhere/python"), num_threads=1)


def test_the_environment_beside_this_one_comes_first(tmp_path: Path) -> None:
    prefix = tmp_path / ".venv"
    assert default_peer_python(prefix) == Path(sys.executable)
    theirs = tmp_path / ".venv-peers" / "bin" / "python"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    assert default_peer_python(prefix) == theirs


def test_the_process_ends_when_nobody_can_ask_it_any_more() -> None:
    done = subprocess.run(
        [sys.executable, str(peers_worker.__file__)], stdin=subprocess.DEVNULL, check=True
    )
    assert done.returncode == 0


def test_the_worker_needs_nothing_but_the_standard_library() -> None:
    script = str(peers_worker.__file__)
    request = b'{"do": "chat"}\n{"do": "find", "engine": "llama_cpp", "path": "m.gguf"}\n'
    # -I -S: no site-packages, no folder of ours, no variables.
    done = subprocess.run(
        [sys.executable, "-I", "-S", script], input=request, capture_output=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert first == b'{"error": "\'chat\' cannot be done now"}'
    assert second == b'{"missing": ["llama-cpp-python"], "versions": {}}'


def test_transformers_computes_only_what_a_follow_up_adds(tmp_path: Path) -> None:
    with loaded("transformers", write_tiny_model(tmp_path / "model")) as peer:
        messages = [user("hello world")]
        first = peer.chat(messages, max_tokens=6)
        assert 1 <= first.output_tokens <= 6
        assert len(first.pieces_ms) == first.output_tokens
        assert first.cached_tokens == 0
        messages += [{"role": "assistant", "content": first.text}, user("and the rest")]
        second = peer.chat(messages, max_tokens=6)
        assert second.prompt_tokens > first.prompt_tokens
        assert second.cached_tokens is not None
        assert first.prompt_tokens <= second.cached_tokens < second.prompt_tokens
        # The cache changes no text: asked again, all but one token is there.
        again = peer.chat(messages, max_tokens=6)
        assert again.text == second.text
        assert again.cached_tokens == again.prompt_tokens - 1
        # Another conversation begins with what the template puts first, and the text is the same
        # behind a cache that was cut.
        other = peer.chat([user("hello world")], max_tokens=6)
        assert other.text == first.text
        assert other.cached_tokens == first.prompt_tokens - 1


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", PEERS)
def test_both_peers_make_the_same_tokens_of_a_conversation(engine: str, default_gguf: Path) -> None:
    with process(engine, timeout_s=250) as peer:
        missing = peer.find(default_gguf).missing
        if missing:
            pytest.skip(f"needs {' and '.join(missing)}")
        peer.load(default_gguf, max_context=512, seed=0)
        answer = peer.chat([user("What is the capital of France?")], max_tokens=4)
    assert answer.prompt_tokens == 37
    assert answer.output_tokens == len(answer.pieces_ms) == 4
    assert answer.text
    assert answer.ended_ms >= answer.pieces_ms[-1]
