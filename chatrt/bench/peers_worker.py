"""One peer in a process of its own: llama.cpp or transformers, asked and answering line by line.

    stdin    {"do": "find", "engine": "llama_cpp", "path": "m.gguf"}
    stdout   {"missing": [], "versions": {"llama-cpp-python": "0.3.36"}}
    stdin    {"do": "load", "path": "m.gguf", "num_threads": 2, "max_context": 4608, "seed": 0}
    stdout   {}
    stdin    {"do": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16}
    stdout   {"pieces_ms": [105.1, 114.0], "ended_ms": 114.2, "text": "…", "prompt_tokens": 30, …}

Knows: the standard library, and the one peer that it is asked for.
Does not know: chatrt, and must not import it: the interpreter that runs this file may lack it.
Invariant: each request has one line of answer, `{"error": …}` where it failed; what the peer prints
itself goes to stderr. Answers are greedy. What the last turns computed stays, and a turn computes
what differs from it. The process ends when stdin does.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import warnings
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

# By engine: each module that has to be there, and the name of the package that brings it.
_LLAMA_CPP = {"llama_cpp": "llama-cpp-python"}
_TRANSFORMERS = {"transformers": "transformers", "torch": "torch"}
_FOR_GGUF = {"accelerate": "accelerate", "gguf": "gguf"}  # transformers reads the format with them


class _Engine(Protocol):
    def chat(self, messages: list[dict[str, str]], max_tokens: int) -> dict[str, Any]: ...


class _LlamaCpp:
    """llama.cpp through llama-cpp-python's own chat completion, its prefix match included."""

    def __init__(self, path: str, num_threads: int, max_context: int, seed: int) -> None:
        package: Any = importlib.import_module("llama_cpp")
        self._llama = package.Llama(
            model_path=path,
            n_ctx=max_context,
            n_threads=num_threads,
            n_threads_batch=num_threads,
            n_gpu_layers=0,
            seed=seed,
            verbose=False,
        )

    def chat(self, messages: list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
        """One answer. Tokens of the prompt are those that the context holds at the first piece."""
        pieces: list[str] = []
        pieces_ms: list[float] = []
        prompt_tokens, reason = 0, None
        started_ns = time.perf_counter_ns()
        for chunk in self._llama.create_chat_completion(
            messages=messages, max_tokens=max_tokens, temperature=0.0, stream=True
        ):
            choice = chunk["choices"][0]
            reason = choice.get("finish_reason") or reason
            text = choice["delta"].get("content")
            if text:
                pieces_ms.append((time.perf_counter_ns() - started_ns) / 1e6)
                pieces.append(text)
                prompt_tokens = prompt_tokens or int(self._llama.n_tokens)
        ended_ms = (time.perf_counter_ns() - started_ns) / 1e6
        # The last token of an answer that was cut off is not in the context yet.
        held = int(self._llama.n_tokens) + (reason == "length")
        return {
            "pieces_ms": pieces_ms,
            "ended_ms": ended_ms,
            "text": "".join(pieces),
            "prompt_tokens": prompt_tokens or held,
            "output_tokens": held - prompt_tokens if prompt_tokens else 0,
        }


class _Transformers:
    """transformers' `generate` in float32, with a streamer, and a cache that lives over turns."""

    def __init__(self, path: str, num_threads: int, seed: int) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._package: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(num_threads)
        self._torch.manual_seed(seed)
        file = Path(path)
        where: dict[str, Any] = {"pretrained_model_name_or_path": path}
        if file.is_file():
            where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        self._tokenizer = self._package.AutoTokenizer.from_pretrained(**where)
        self._model = self._package.AutoModelForCausalLM.from_pretrained(
            **where, dtype=self._torch.float32
        ).eval()
        self._cache = self._package.DynamicCache()
        self._cached_ids: list[int] = []

    def chat(self, messages: list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
        """One answer; the cache keeps what the prompt shares with the turns before it."""
        started_ns = time.perf_counter_ns()
        encoded = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        ids = list(encoded["input_ids"])
        num_cached = self._keep_shared(ids)
        prompt = self._torch.tensor([ids])
        stamps = _Stamps(self._tokenizer, started_ns)
        sequence = self._model.generate(
            prompt,
            attention_mask=self._torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            past_key_values=self._cache,
            streamer=stamps,
        )[0].tolist()
        ended_ms = (time.perf_counter_ns() - started_ns) / 1e6
        self._cached_ids = sequence[: self._cache.get_seq_length()]
        return {
            "pieces_ms": stamps.pieces_ms,
            "ended_ms": ended_ms,
            "text": self._tokenizer.decode(sequence[len(ids) :], skip_special_tokens=True),
            "prompt_tokens": len(ids),
            "output_tokens": stamps.num_tokens,
            "cached_tokens": num_cached,
        }

    def _keep_shared(self, ids: list[int]) -> int:
        """Cut the cache to the ids it shares with `ids`; at least one stays to be computed."""
        pairs = zip(self._cached_ids, ids[:-1], strict=False)
        num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if num_shared == 0:
            self._cache = self._package.DynamicCache()
        elif num_shared < len(self._cached_ids):
            self._cache.crop(num_shared - len(self._cached_ids))
        return num_shared


class _Stamps:
    """A streamer for `generate`: when each token with a text came. The prompt comes first."""

    def __init__(self, tokenizer: Any, started_ns: int) -> None:
        self.pieces_ms: list[float] = []
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._started_ns = started_ns
        self._in_prompt = True

    def put(self, ids: Any) -> None:
        """Take the prompt, then one token at a time."""
        if self._in_prompt:
            self._in_prompt = False
            return
        if self._tokenizer.decode(ids.tolist(), skip_special_tokens=True):
            self.pieces_ms.append((time.perf_counter_ns() - self._started_ns) / 1e6)
            self.num_tokens += 1

    def end(self) -> None:
        """Nothing is held back."""


class _Worker:
    """Answers requests."""

    def __init__(self) -> None:
        self._name = ""
        self._engine: _Engine | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        match request["do"]:
            case "find":
                self._name = request["engine"]
                return _find(self._name, request["path"])
            case "load":
                self._engine = self._load(**{k: v for k, v in request.items() if k != "do"})
                return {}
            case "chat" if self._engine is not None:
                return self._engine.chat(request["messages"], request["max_tokens"])
        return {"error": f"{request['do']!r} cannot be done now"}

    def _load(self, path: str, num_threads: int, max_context: int, seed: int) -> _Engine:
        if self._name == "llama_cpp":
            return _LlamaCpp(path, num_threads, max_context, seed)
        return _Transformers(path, num_threads, seed)


def _find(engine: str, path: str) -> dict[str, Any]:
    """Which packages are not there, and the versions of those that are. Imports none of them."""
    needs = dict(_LLAMA_CPP if engine == "llama_cpp" else _TRANSFORMERS)
    if engine == "transformers" and not Path(path).is_dir():
        needs |= _FOR_GGUF
    missing = [name for module, name in needs.items() if importlib.util.find_spec(module) is None]
    versions = {name: _version(name) for name in needs.values() if name not in missing}
    return {"missing": missing, "versions": versions}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Answer until stdin ends."""
    # Ctrl+C is for the process that asks; it ends this one by closing stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = _Worker()
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except Exception as error:  # whatever a peer raises is told to the one who asked
            first = (str(error).splitlines() or [""])[0]
            answer = {"error": f"{type(error).__name__}: {first}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
