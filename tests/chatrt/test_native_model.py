"""Whole models on the native kernels: logits that depend on a row's own history, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt.batch import BatchBuilder, BatchRows
from chatrt.bench.quality import bundled_text
from chatrt.engine import Target
from chatrt.kvcache import KVCache
from chatrt.models.decoder import Decoder
from chatrt.models.loader import load_model, load_weights
from chatrt.models.quantize import UNQUANTIZED, LoadQuantization
from chatrt.native_sampling import NativeSampler
from chatrt.params import SamplingParams
from chatrt.session import PageCopy
from chatrt.testing.engine import engine_over, run_outcome, tiny_engine, turn_request
from chatrt.testing.models import tiny_config
from chatrt.testing.tokenizer import tiny_tokenizer
from chatrt.text.messages import Message
from chatrt.text.prompt import PromptBuilder
from chatrt.text.tokenizer import Tokenizer
from chatrt_drafts.ngram import NgramDrafter
from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.cpu.sampling import NativeSampling
from chatrt_kernels.formats import QuantFormat, QuantizedTensor
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt.k_quants_support import random_k_quant
from tests.chatrt.models_support import CPU, random_state
from tests.chatrt_kernels.cpu_support import NATIVE_PATH, compiled
from tests.chatrt_kernels.weights_support import same_bits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from chatrt.engine import Engine
    from chatrt.models.config import ModelConfig
    from chatrt.models.files import ModelFiles
    from chatrt.models.weights import DecoderWeights
    from chatrt.testing.engine import Outcome
    from chatrt_kernels.ops import Ops

PAGE_SIZE = 16
MAX_ROWS = 512
MAX_POSITIONS = 576
VOCAB = 50
TOKENS = [(5 * i * i + 3 * i + i // 7) % VOCAB for i in range(550)]
CHUNKS = (1, 7, 16, 64, 512)
Q8 = LoadQuantization(layers=QuantFormat.Q8_0, ends=QuantFormat.Q8_0)
Q4 = LoadQuantization(layers=QuantFormat.Q4_1, ends=QuantFormat.Q8_0)
LLAMA = replace(tiny_config(vocab_size=VOCAB), tie_word_embeddings=False)
BIASED = replace(LLAMA, attention_bias=True, attention_out_bias=True, mlp_bias=True)
QWEN2 = replace(LLAMA, architecture="qwen2", attention_bias=True, tie_word_embeddings=True)
QWEN3 = replace(LLAMA, architecture="qwen3", qk_norm=True, head_dim=32)
NO_ROPE = replace(LLAMA, no_rope_layers=frozenset({1}))
WIDE = replace(LLAMA, hidden_size=256, intermediate_size=512, head_dim=64)
# configuration, what its matrices are quantised to (None: each its own K-quant)
MODELS: dict[str, tuple[ModelConfig, LoadQuantization | None]] = {
    "llama q8": (LLAMA, Q8),
    "llama q4": (LLAMA, Q4),
    "llama unquantised": (LLAMA, UNQUANTIZED),
    "llama biased q8": (BIASED, Q8),
    "qwen2 q4": (QWEN2, Q4),
    "qwen3 q8": (QWEN3, Q8),
    "partly without rotation q8": (NO_ROPE, Q8),
    "k-quants": (WIDE, None),
    "k-quants with head norms": (replace(WIDE, architecture="qwen3", qk_norm=True), None),
}


class State:
    """Tensors by name, as a file gives them; matrices as K-quants where that is asked for."""

    def __init__(self, config: ModelConfig, *, k_quants: bool) -> None:
        self._state = random_state(config)
        self._k_quants = k_quants

    def matrix(self, name: str) -> QuantizedTensor | torch.Tensor:
        dense = self._state[name]
        if not self._k_quants:
            return dense
        # as in files of mixed quality: values, down and the ends have more bits than the rest
        fine = ("embed_tokens.weight", "lm_head.weight", "v_proj.weight", "down_proj.weight")
        quantization = "Q6_K" if name.endswith(fine) else "Q4_K"
        if name.endswith("gate_proj.weight"):
            quantization = "Q5_K"
        rows, columns = dense.shape
        packed = random_k_quant(quantization, rows, columns, seed=len(name) + rows)
        return QuantizedTensor(QuantFormat[quantization], packed.data, (rows, columns))

    def vector(self, name: str) -> torch.Tensor:
        return self._state[name]


def weights_of(name: str, ops: Ops) -> DecoderWeights:
    config, quantize = MODELS[name]
    state = State(config, k_quants=quantize is None)
    return load_weights(
        state, config, ops, device=CPU, dtype=torch.float32, quantize=quantize or UNQUANTIZED
    )


class Bench:
    """A decoder with pages for three sequences; sequence s owns pages from `s * PAGES` on."""

    PAGES = MAX_POSITIONS // PAGE_SIZE

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, ops: Ops, max_rows: int = MAX_ROWS
    ) -> None:
        self.decoder = Decoder(
            config,
            weights,
            ops,
            max_rows=max_rows,
            max_positions=MAX_POSITIONS,
            device=CPU,
            dtype=torch.float32,
        )
        self.builder = BatchBuilder(max_rows, 3, self.PAGES, PAGE_SIZE, CPU)
        self.kv = KVCache.allocate(
            num_layers=config.num_layers,
            num_pages=3 * self.PAGES,
            page_size=PAGE_SIZE,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float16,
            device=CPU,
            layout=ops.kv_layout,
        )
        self.kv.data.fill_(torch.nan)

    def rows(self, ids: Sequence[int], start: int, sequence: int = 0) -> BatchRows:
        first = sequence * self.PAGES
        return BatchRows(ids, start, range(first, first + self.PAGES), range(len(ids)))

    def run(self, rows: Sequence[BatchRows]) -> list[torch.Tensor]:
        """Logits of each sequence's rows."""
        batch = self.builder.build(rows)
        values = self.decoder.forward(batch, self.kv).values.clone()
        return [values[found.start : found.stop] for found in batch.logit_ranges]

    def logits(self, token_ids: Sequence[int], *, chunk: int) -> torch.Tensor:
        """Logits of every position of sequence 0, computed in chunks from position 0."""
        starts = range(0, len(token_ids), chunk)
        parts = [self.run([self.rows(token_ids[s : s + chunk], s)])[0] for s in starts]
        return torch.cat(parts)


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    return NativeLibrary(compiled(NATIVE_PATH))


@pytest.fixture(scope="module", params=MODELS)
def benches(request: pytest.FixtureRequest, library: NativeLibrary) -> list[Bench]:
    """One model on one thread, and on two; the weights are the same memory."""
    executors = [NativeOps(library, num_threads) for num_threads in (1, 2)]
    weights = weights_of(request.param, executors[0])
    return [Bench(MODELS[request.param][0], weights, ops) for ops in executors]


@pytest.fixture(scope="module")
def whole(benches: list[Bench]) -> torch.Tensor:
    """The logits of all tokens, computed in the largest chunks."""
    logits = benches[0].logits(TOKENS, chunk=MAX_ROWS)
    assert not logits.isnan().any()
    return logits


@pytest.mark.parametrize("chunk", CHUNKS)
def test_any_chunks_on_any_threads_give_the_same_bits(
    benches: list[Bench], whole: torch.Tensor, chunk: int
) -> None:
    tokens = TOKENS[: 150 if chunk == 1 else len(TOKENS)]
    for bench in benches:
        bench.kv.data.fill_(torch.nan)
        assert same_bits(bench.logits(tokens, chunk=chunk), whole[: len(tokens)])


def test_any_number_of_rows_gives_the_same_bits(benches: list[Bench], whole: torch.Tensor) -> None:
    for bench in benches:
        for num_rows in range(1, 18):
            # a verify behind 200 tokens, overwritten by the next one
            found = bench.run([bench.rows(TOKENS[200 : 200 + num_rows], 200)])[0]
            assert same_bits(found, whole[200 : 200 + num_rows]), num_rows


def test_a_sequence_beside_others_has_the_bits_that_it_has_alone(
    benches: list[Bench], whole: torch.Tensor
) -> None:
    for bench in benches:
        bench.kv.data.fill_(torch.nan)
        bench.run([bench.rows(TOKENS[:300], 0, 0), bench.rows(TOKENS[:19], 0, 2)])
        mixed = [
            bench.rows(TOKENS[300:305], 300, 0),  # a verify
            bench.rows(TOKENS[:40], 0, 1),  # a prefill
            bench.rows(TOKENS[19:20], 19, 2),  # a decode
        ]
        for found, positions in zip(
            bench.run(mixed), (slice(300, 305), slice(40), slice(19, 20)), strict=True
        ):
            assert same_bits(found, whole[positions])


def test_a_prefix_that_was_copied_gives_the_bits_of_one_that_was_computed(
    benches: list[Bench], whole: torch.Tensor
) -> None:
    for bench in benches:
        bench.kv.data.fill_(torch.nan)
        bench.logits(TOKENS[:200], chunk=64)
        for num_shared in (16, 30, 129, 199):
            num_pages = -(-num_shared // PAGE_SIZE)
            bench.kv.copy_rows(
                PageCopy(page, bench.PAGES + page, min(PAGE_SIZE, num_shared - PAGE_SIZE * page))
                for page in range(num_pages)
            )
            found = bench.run([bench.rows(TOKENS[num_shared:260], num_shared, 1)])[0]
            assert same_bits(found, whole[num_shared:260]), num_shared


def test_rejected_rows_leave_no_trace(benches: list[Bench], whole: torch.Tensor) -> None:
    for bench in benches:
        bench.logits(TOKENS[:130], chunk=64)
        bench.run([bench.rows([1, 2, 3, 4, 5], 130)])
        assert same_bits(bench.run([bench.rows(TOKENS[130:133], 130)])[0], whole[130:133])


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_references_but_for_activations_in_8_bits(
    library: NativeLibrary, name: str
) -> None:
    config, reference = MODELS[name][0], ReferenceOps()
    ops = NativeOps(library, 2)
    found = Bench(config, weights_of(name, ops), ops).logits(TOKENS, chunk=64)
    expected = Bench(config, weights_of(name, reference), reference).logits(TOKENS, chunk=512)
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    # Rounding to 8 bits costs 0.5 % of a row's deviation, 1 % where it has outliers; the noise of
    # nine products in a row adds up to three times that. Pages in half precision cost 0.05 %.
    plain = name == "llama unquantised"
    assert error < (1e-3 if plain else 0.03), float(error)
    assert (error > 1e-3) or plain


def test_a_tiny_engine_answers_the_same_with_drafts_and_without(
    library: NativeLibrary, tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    ops = NativeOps(library, 2)
    sampling = SamplingParams(
        temperature=0.0, max_output_tokens=100, logit_bias=dict.fromkeys((97, 98), 30.0)
    )
    outcomes = []
    for drafter, num_drafts in ((None, 0), (NgramDrafter(), 4)):
        engine = tiny_engine(tokenizer, ops=ops, drafter=drafter, num_drafts=num_drafts)
        request = turn_request("a", tokenizer.encode("the sea of salt"), sampling=sampling)
        outcomes.append(run_outcome(engine, replace(request, speculation_tokens=num_drafts)))
    plain, drafted = outcomes
    assert drafted.token_ids == plain.token_ids
    assert drafted.end.speculation.accepted > 0


@dataclass(frozen=True)
class DefaultModel:
    """The model that people run, on two threads."""

    config: ModelConfig
    weights: DecoderWeights
    tokenizer: Tokenizer
    ops: NativeOps


@pytest.fixture(scope="module")
def default_model(library: NativeLibrary, default_model_files: ModelFiles) -> DefaultModel:
    ops = NativeOps(library, 2)
    model = load_model(default_model_files, ops, device=CPU, dtype=torch.float32)
    folder, eos = default_model_files.tokenizer_dir, model.config.eos_token_ids
    tokenizer = Tokenizer.load(folder, eos_token_ids=eos)
    return DefaultModel(model.config, model.weights, tokenizer, ops)


@pytest.mark.model
def test_rows_chunks_and_threads_do_not_change_a_bit_of_the_default_models_logits(
    default_model: DefaultModel,
) -> None:
    config, weights, ops = default_model.config, default_model.weights, default_model.ops
    tokens = default_model.tokenizer.encode(bundled_text()[:2000])[:160]
    two = Bench(config, weights, ops, max_rows=160)
    one = Bench(config, weights, NativeOps(ops.kernels, 1), max_rows=160)
    whole = two.logits(tokens, chunk=160)
    assert not whole.isnan().any()
    for bench, chunk in ((one, 160), (two, 64), (one, 7), (two, 1)):
        some = tokens[: 40 if chunk == 1 else 160]
        assert same_bits(bench.logits(some, chunk=chunk), whole[: len(some)]), chunk
    two.logits(tokens, chunk=160)
    for num_rows in (1, 2, 5, 8, 9, 17):
        behind = two.rows(tokens[140 : 140 + num_rows], 140, 0)
        found = two.run([two.rows(tokens[:num_rows], 0, 1), behind])
        assert same_bits(found[0], whole[:num_rows])
        assert same_bits(found[1], whole[140 : 140 + num_rows])


def default_engine(model: DefaultModel, drafter: NgramDrafter | None, num_drafts: int) -> Engine:
    bench = Bench(model.config, model.weights, model.ops, max_rows=64)
    kernel = NativeSampling(model.ops.kernels.functions, model.config.vocab_size)
    sampler = partial(NativeSampler, kernel=kernel)
    target = Target(bench.decoder, bench.kv, bench.builder, model.tokenizer, sampler)
    return engine_over(target, max_context=400, drafter=drafter, num_drafts=num_drafts)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafter_changes_no_token_of_the_default_models_answer(
    default_model: DefaultModel, temperature: float
) -> None:
    message = Message("user", "Repeat five times: The cat sat on the mat, and the dog ran.")
    prompt = PromptBuilder(default_model.tokenizer).first_prompt([message])
    sampling = SamplingParams(
        temperature=temperature, seed=7, ignore_eos=True, max_output_tokens=200
    )
    found: list[Outcome] = []
    for drafter, num_drafts in ((None, 0), (NgramDrafter(), 4)):
        engine = default_engine(default_model, drafter, num_drafts)
        request = turn_request("a", prompt, sampling=sampling)
        found.append(run_outcome(engine, replace(request, speculation_tokens=num_drafts)))
    plain, drafted = found
    assert len(plain.token_ids) == 200
    assert drafted.token_ids == plain.token_ids
    assert drafted.end.speculation.accepted > 0
