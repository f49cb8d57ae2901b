"""Stores, windows, acceptance and training, over conversations of a tiny target."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from chatrt.errors import Conflict, InvalidValue, ModelFileError
from chatrt.testing.models import tiny_config
from chatrt_drafts.head_file import HeadFile
from chatrt_drafts.training.acceptance import Acceptance, measure_acceptance
from chatrt_drafts.training.fit import chain_loss
from chatrt_drafts.training.store import ANSWER, GREEDY, NUM_TOP, RowStore, allocate_rows
from chatrt_drafts.training.train import TrainingPlan, TrainingTarget, split_minutes, train_draft
from chatrt_drafts.training.windows import KeptTokens, WindowReader, count_tokens
from tests.chatrt_drafts.test_training_module import random_head
from tests.chatrt_drafts.training_support import CPU, FewTurns, tiny_target

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from chatrt_drafts.training.module import DraftHead
    from chatrt_drafts.training.store import Rows

WIDTH = 3 * tiny_config().hidden_size
VOCAB = 50


def random_rows(num_rows: int, seed: int, *, width: int = WIDTH, greedy: bool = True) -> Rows:
    """A conversation whose second half is an answer; its tokens are the labels' likeliest."""
    generator = torch.Generator().manual_seed(seed)
    rows = allocate_rows(num_rows, width, CPU)
    top = torch.rand(num_rows, VOCAB, generator=generator).mul(4).log_softmax(-1).topk(NUM_TOP)
    rows.top_ids[:] = top.indices
    rows.top_logprobs[:] = top.values
    rows.features[:] = torch.randn(num_rows, width, generator=generator)
    rows.ids[:, 1] = rows.top_ids[:, 0]
    rows.ids[0, 0] = 1
    rows.ids[1:, 0] = rows.ids[:-1, 1]
    rows.ids[:, 2] = torch.arange(num_rows)
    flags = ANSWER | (GREEDY if greedy else 0)
    rows.ids[:, 3] = (torch.arange(num_rows) >= num_rows // 2) * flags
    return rows


def filled_store(folder: Path | None, lengths: tuple[int, ...] = (12, 7, 20)) -> RowStore:
    store = RowStore(folder, 100, WIDTH, CPU)
    for index, length in enumerate(lengths):
        store.append(random_rows(length, index, greedy=index != 1))
        store.num_answer_tokens += length - length // 2
    return store


def kept_tokens(ids: list[int]) -> KeptTokens:
    index_of = torch.full((VOCAB,), -1, dtype=torch.int64)
    index_of[ids] = torch.arange(len(ids))
    generator = torch.Generator().manual_seed(9)
    hidden = tiny_config().hidden_size
    return KeptTokens(
        torch.tensor(ids),
        index_of,
        torch.randn(len(ids), hidden, generator=generator),
        torch.randn(VOCAB, hidden, generator=generator),
    )


def reader_of(store: RowStore, ids: list[int] | None = None) -> WindowReader:
    kept = kept_tokens(list(range(VOCAB)) if ids is None else ids)
    return WindowReader(store.rows, kept, device=CPU, dtype=torch.float32)


def test_a_store_in_a_folder_goes_on_where_it_was_checkpointed(tmp_path: Path) -> None:
    store = filled_store(tmp_path / "data")
    store.checkpoint()
    expected = store.rows.map(torch.clone)
    store.append(random_rows(9, 77))  # lost: no checkpoint behind it
    again = RowStore(tmp_path / "data", 200, WIDTH, CPU)
    assert (again.num_rows, again.num_conversations) == (39, 3)
    assert again.num_answer_tokens == 20
    for name in ("ids", "top_ids", "top_logprobs", "features"):
        assert torch.equal(getattr(again.rows, name), getattr(expected, name))
    again.append(random_rows(9, 5))
    assert again.num_rows == 48
    assert again.has_room(152)
    assert not again.has_room(153)


def test_a_store_without_a_mapping_writes_the_same_files(tmp_path: Path) -> None:
    filled_store(tmp_path / "mapped").checkpoint()
    store = filled_store(tmp_path / "written")
    store._mapped = False
    store.checkpoint()
    for path in (tmp_path / "written").glob("*.bin"):
        data = (tmp_path / "mapped" / path.name).read_bytes()
        assert path.read_bytes() == data


def test_a_full_disk_leaves_no_room_in_a_mapped_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped, own = filled_store(tmp_path), filled_store(None)
    assert mapped.has_room(1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1 << 20))
    assert not mapped.has_room(1)
    assert own.has_room(1)


def test_a_store_of_other_features_is_refused_with_both_widths(tmp_path: Path) -> None:
    filled_store(tmp_path).checkpoint()
    with pytest.raises(ModelFileError, match=f"features of {WIDTH} numbers, expected 7"):
        RowStore(tmp_path, 10, 7, CPU)


def test_a_window_has_the_features_of_the_row_before_and_labels_of_kept_tokens() -> None:
    store = filled_store(None)
    ids = list(range(0, VOCAB, 2))
    reader = reader_of(store, ids)
    window, labels = reader.read(torch.tensor([0, 15]), 16)
    rows = store.rows
    assert window.positions[0].tolist() == [*range(12), *range(4)]
    assert window.known[0].tolist() == [False, *[True] * 11, False, True, True, True]
    assert torch.equal(window.features[1, 0], rows.features[14].float())
    assert torch.equal(window.features[0, 3], rows.features[2].float())
    assert torch.equal(window.embedded[0, 5], reader.kept.embeddings[rows.ids[5, 0]])
    # conversations of 12, 7 and 20 rows: answers at [6, 12), [15, 19), [29, 39)
    assert labels.places.tolist() == [*range(6, 12), 15, *range(16, 20), *range(30, 32)]
    assert labels.depth.tolist() == [*range(6, 12), 3, *range(4), 10, 11]
    for index, place in enumerate(labels.places.tolist()):
        row = place if place < 16 else place - 16 + 15
        expected = {
            ids.index(token): logprob.exp()
            for token, logprob in zip(
                rows.top_ids[row].tolist(), rows.top_logprobs[row].float(), strict=True
            )
            if token in ids
        }
        total = sum(expected.values())
        assert float(labels.probs[index].sum()) == pytest.approx(1.0)
        for at, prob in zip(labels.indexes[index].tolist(), labels.probs[index], strict=True):
            if prob:
                assert float(prob) == pytest.approx(float(expected[at] / total), rel=1e-5)


def test_rows_whose_label_has_no_kept_token_teach_nothing() -> None:
    store = filled_store(None)
    rarest = set(range(VOCAB)) - set(store.rows.top_ids[6].tolist())
    window, labels = reader_of(store, sorted(rarest)[:1]).read(torch.tensor([0]), 12)
    assert labels.probs[0].sum() == 0
    assert window.positions.shape == (1, 12)


def test_tokens_are_counted_in_answers_only() -> None:
    store = filled_store(None)
    counts = count_tokens(store.rows, VOCAB)
    is_answer = (store.rows.ids[:, 3] & ANSWER) != 0
    mass = store.rows.top_logprobs[is_answer].double().exp().sum()
    assert float(counts.sum()) == pytest.approx(float(is_answer.sum() + mass))
    written = np.bincount(store.rows.ids[is_answer, 1].numpy(), minlength=VOCAB)
    assert bool((counts.numpy() >= written).all())


class _Oracle:
    """Stands where a head is measured: right wherever `right(step, row)` says so."""

    def __init__(self, reader: WindowReader, right: Any) -> None:
        self._reader, self._right = reader, right

    def steps(self, window: Any, num_steps: int) -> Any:
        rows, kept = self._reader.rows, self._reader.kept
        for step in range(1, num_steps + 1):
            states = torch.zeros(*window.positions.shape, kept.head_rows.shape[1])
            for place in itertools.product(*map(range, window.positions.shape)):
                row = self._row(window, place)
                token = int(rows.ids[row, 1])
                drafted = token if self._right(step, row) else (token + 1) % VOCAB
                states[place] = kept.head_rows[drafted]
            yield states

    def _row(self, window: Any, place: tuple[int, ...]) -> int:
        """The stored row at a place, found by the features in front of it."""
        rows = self._reader.rows
        if not window.known[place]:
            return int((rows.ids[:, 2] == 0).nonzero()[0])
        same = (rows.features.float() == window.features[place]).all(-1)
        return int(same.nonzero()[0]) + 1


def measured(reader: WindowReader, right: Any) -> Acceptance:
    # rows of the head that no other is as near to as itself
    reader.kept.head_rows[:] = torch.nn.functional.one_hot(
        torch.arange(VOCAB), reader.kept.head_rows.shape[1]
    ).float()
    head: Any = _Oracle(reader, right)
    return measure_acceptance(head, reader, max_drafts=3, max_rows=1000, rows_per_batch=24)


def test_a_head_that_is_always_right_is_accepted_to_the_end_of_every_answer() -> None:
    figures = measured(reader_of(filled_store(None)), lambda step, row: True)
    # greedy answers of 6 and 10 tokens, their first ones given: 5 = 4 + 1, 9 = 4 + 4 + 1
    assert figures.greedy.num_tokens == 14
    assert figures.greedy.mean_length[2] == pytest.approx(14 / 5)
    assert figures.greedy.mean_length[0] == pytest.approx(14 / 8)
    assert figures.sampled.num_answers == 1
    assert figures.sampled.mean_length[2] == pytest.approx(3 / 1)


def test_a_wrong_draft_ends_its_chain_and_costs_what_is_behind_it() -> None:
    figures = measured(reader_of(filled_store(None)), lambda step, row: step != 2)
    assert figures.greedy.mean_length == pytest.approx([14 / 8, 14 / 8, 14 / 8])
    assert figures.greedy.by_position[1:] == [0.0, 0.0]
    figures = measured(reader_of(filled_store(None)), lambda step, row: False)
    assert figures.greedy.mean_length == [1.0, 1.0, 1.0]


def loss_of(head: DraftHead, reader: WindowReader, *, alive: bool, steps: int = 3) -> Tensor:
    window, labels = reader.read(torch.tensor([0, 19]), 20)
    return chain_loss(head, window, labels, reader.kept, num_steps=steps, alive_weighting=alive)


@pytest.mark.parametrize("alive", [False, True])
def test_a_few_steps_lower_the_loss(alive: bool) -> None:
    head, reader = random_head(), reader_of(filled_store(None))
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = loss_of(head, reader, alive=alive)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]  # labels are broad: most of the rest is entropy


def test_weighing_by_survival_leaves_the_first_step_alone() -> None:
    head, reader = random_head(), reader_of(filled_store(None))
    with torch.no_grad():
        once = [loss_of(head, reader, alive=alive, steps=1) for alive in (False, True)]
        twice = [loss_of(head, reader, alive=alive, steps=2) for alive in (False, True)]
    assert torch.equal(*once)
    assert not torch.equal(*twice)


# the whole


def tiny_training(folder: Path) -> TrainingTarget:
    model, tokenizer, ops = tiny_target(folder)
    return TrainingTarget(
        "tiny", "f" * 32, model, ops, tokenizer, torch.float32, train_threads=1, bf16=False
    )


def plan(out: Path, **changes: Any) -> TrainingPlan:
    values = {
        "num_tokens": 1500,
        "synthesis_s": 600.0,
        "training_s": 600.0,
        "vocab": 64,
        "num_slots": 8,
        "max_steps": 6,
    }
    return TrainingPlan(out, **{**values, **changes})


def ticking() -> Any:
    """A clock on which each look takes a hundredth of a second."""
    ticks = itertools.count()
    return lambda: next(ticks) / 100


def train(target: TrainingTarget, one: TrainingPlan) -> tuple[dict[str, Any], list[str]]:
    phases: list[str] = []
    card = train_draft(
        target,
        one,
        FewTurns(),
        report=lambda phase, share, words: phases.append(phase),
        clock=ticking(),
    )
    return card, phases


def test_a_training_leaves_a_head_that_loads_and_a_card_of_what_was_done(tmp_path: Path) -> None:
    target = tiny_training(tmp_path)
    card, phases = train(target, plan(tmp_path / "out"))
    head = HeadFile.load(tmp_path / "out" / "head.safetensors")
    assert (head.target, head.fingerprint) == ("tiny", "f" * 32)
    assert head.feature_layers == (0, 1, 2, 3)
    assert len(head.token_ids) == 64
    assert {"synthesis", "training"} == set(phases)
    assert card["data"]["train"]["answer_tokens"] >= 1500
    assert card["data"]["held_out"]["conversations"] > 0
    assert card["training_steps"] == 6
    assert 0 < card["kept_coverage"] <= 1
    assert set(card["acceptance"]) == {"greedy", "greedy_without_loops", "sampled"}
    assert json.loads((tmp_path / "out" / "card.json").read_text()) == card


def test_a_folder_in_use_is_refused_and_resumed_on_request(tmp_path: Path) -> None:
    target, out = tiny_training(tmp_path), tmp_path / "out"
    first, _ = train(target, plan(out, max_steps=3))
    with pytest.raises(Conflict, match="--resume"):
        train(target, plan(out))
    second, phases = train(target, plan(out, resume=True, max_steps=5))
    assert set(phases) == {"training"}
    assert second["data"] == first["data"]
    assert second["training_steps"] == 5
    assert second["evaluations"][: len(first["evaluations"])] == first["evaluations"]


def test_a_folder_of_another_target_is_refused_with_both_names(tmp_path: Path) -> None:
    target, out = tiny_training(tmp_path), tmp_path / "out"
    train(target, plan(out))
    state = json.loads((out / "state.json").read_text())
    (out / "state.json").write_text(json.dumps({**state, "fingerprint": "e", "target": "large"}))
    with pytest.raises(Conflict, match=r"a training of 'large'.*not of 'tiny'"):
        train(target, plan(out, resume=True))


def test_an_interrupted_synthesis_goes_on(tmp_path: Path) -> None:
    target, out = tiny_training(tmp_path), tmp_path / "out"

    class Interrupted(Exception):
        pass

    def stop(phase: str, share: float, words: str) -> None:
        if phase == "training" or share > 0.5:
            raise Interrupted

    with pytest.raises(Interrupted):
        train_draft(
            target,
            plan(out, num_tokens=400_000, synthesis_s=600.0),
            FewTurns(),
            report=stop,
            clock=ticking_fast(),
        )
    rows = json.loads((out / "data" / "train" / "rows.json").read_text())["rows"]
    assert rows > 0
    card, _ = train(target, plan(out, num_tokens=4000, resume=True))
    assert card["data"]["train"]["rows"] > rows


def ticking_fast() -> Any:
    """A clock on which each look takes half a second, so that checkpoints come soon."""
    ticks = itertools.count()
    return lambda: next(ticks) / 2


def test_too_little_data_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="synthesise longer"):
        train(tiny_training(tmp_path), plan(tmp_path / "out", synthesis_s=0.05))


def test_a_total_time_is_split_between_synthesis_and_training() -> None:
    assert split_minutes(10) == pytest.approx((240, 360))


def test_a_head_is_trained_further_from_where_another_training_left_it(tmp_path: Path) -> None:
    target = tiny_training(tmp_path)
    train(target, plan(tmp_path / "first"))
    first = HeadFile.load(tmp_path / "first" / "head.safetensors")
    card, _ = train(
        target, plan(tmp_path / "second", start_from=first, learning_rate=1e-9, max_steps=1)
    )
    second = HeadFile.load(tmp_path / "second" / "head.safetensors")
    assert card["trained_further"]
    assert card["training"]["one_step_share"] == 0
    for name, tensor in first.tensors.items():
        torch.testing.assert_close(second.tensors[name], tensor, atol=1e-3, rtol=1e-2)


def test_a_head_of_other_weights_is_not_trained_further(tmp_path: Path) -> None:
    target = tiny_training(tmp_path)
    train(target, plan(tmp_path / "first"))
    first = HeadFile.load(tmp_path / "first" / "head.safetensors")
    other = replace(target, name="other", fingerprint="0" * 32)
    with pytest.raises(ModelFileError, match=r"trained for tiny .* the model is other"):
        train(other, plan(tmp_path / "second", start_from=first))
