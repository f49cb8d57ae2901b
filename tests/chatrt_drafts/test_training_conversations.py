from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from chatrt.batch import BatchBuilder, BatchRows
from chatrt.kvcache import KVCache
from chatrt.models.decoder import Decoder
from chatrt.testing.models import tiny_model
from chatrt.testing.tokenizer import tiny_tokenizer
from chatrt_drafts.training.slot_ops import SlotOps
from chatrt_drafts.training.store import ANSWER, GREEDY, NUM_TOP
from chatrt_kernels.ops import KVLayer, RowMeta
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt_drafts.training_support import CPU, FEATURE_LAYERS, tiny_loop

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.models.loader import Model
    from chatrt.text.tokenizer import Tokenizer
    from chatrt_drafts.training.store import Rows

_NUM_STEPS = 220


@pytest.fixture(scope="module")
def talked(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[Rows], list[int], Model, Tokenizer]:
    """Conversations of a loop that ran for a while, copied, and their answer tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    conversations: list[Rows] = []
    counts: list[int] = []

    def keep(rows: Rows, num_answer_tokens: int) -> None:
        conversations.append(rows.map(torch.clone))
        counts.append(num_answer_tokens)

    loop, model = tiny_loop(folder, keep)
    num_rows = sum(loop.step() for _ in range(_NUM_STEPS))
    assert num_rows == 6 * _NUM_STEPS
    loop.finish()
    return conversations, counts, model, tiny_tokenizer(folder)


def logits_and_features(model: Model, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a decoder on the reference gives for all positions in one forward."""
    ops = ReferenceOps()
    again = tiny_model(ops, model.config)
    decoder = Decoder(
        model.config,
        again.weights,
        ops,
        max_rows=len(token_ids),
        max_positions=256,
        device=CPU,
        dtype=torch.float32,
        feature_layers=FEATURE_LAYERS,
    )
    config = model.config
    kv = KVCache.allocate(
        num_layers=config.num_layers,
        num_pages=16,
        page_size=16,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    batch = BatchBuilder(len(token_ids), 1, 16, 16, CPU).build(
        [BatchRows(token_ids, 0, range(16), range(len(token_ids)))]
    )
    output = decoder.forward(batch, kv)
    assert output.features is not None
    return output.values, output.features


def test_recorded_features_and_logits_are_those_of_a_forward_over_the_same_tokens(
    talked: tuple[list[Rows], list[int], Model, Tokenizer],
) -> None:
    conversations, _, model, _ = talked
    for rows in (conversations[0], conversations[-1], max(conversations, key=len)):
        logits, features = logits_and_features(model, rows.ids[:, 0].tolist())
        rms = (features.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
        torch.testing.assert_close(
            rows.features.float(), (features / rms).flatten(1), rtol=2e-3, atol=2e-3
        )
        top = logits.log_softmax(-1).topk(NUM_TOP)
        torch.testing.assert_close(rows.top_logprobs.float(), top.values, rtol=2e-3, atol=2e-3)
        same = (rows.top_ids == top.indices).float().mean()
        assert same > 0.99  # neighbours within rounding may swap


def test_rows_follow_each_other_and_flags_mark_what_the_model_wrote(
    talked: tuple[list[Rows], list[int], Model, Tokenizer],
) -> None:
    conversations, counts, _, tokenizer = talked
    opening = tokenizer.encode("<|im_start|>assistant\n")
    for rows, count in zip(conversations, counts, strict=True):
        token_ids, next_ids, positions, flags = rows.ids.T.tolist()
        assert positions == list(range(len(rows)))
        assert token_ids[1:] == next_ids[:-1]
        answer = [row for row, flag in enumerate(flags) if flag & ANSWER]
        assert len(answer) == count > 0
        first = answer[0]
        # the first answer row is the last of the opening that the template wrote
        assert token_ids[first + 1 - len(opening) : first + 1] == opening
        greedy = {bool(flags[row] & GREEDY) for row in answer}
        assert len(greedy) == 1


def test_a_greedy_answer_is_the_likeliest_token_every_time(
    talked: tuple[list[Rows], list[int], Model, Tokenizer],
) -> None:
    num_greedy = num_sampled = 0
    for rows in talked[0]:
        best = rows.top_ids[:, 0] == rows.ids[:, 1]
        greedy = (rows.ids[:, 3] & GREEDY) != 0
        assert bool(best[greedy].all())
        sampled = ((rows.ids[:, 3] & ANSWER) != 0) & ~greedy
        num_greedy += int(greedy.sum())
        num_sampled += int((~best[sampled]).sum())
    assert num_greedy > 100
    assert num_sampled > 10


def test_some_conversations_have_two_answers_and_some_users_are_the_model(
    talked: tuple[list[Rows], list[int], Model, Tokenizer],
) -> None:
    conversations, _, _, tokenizer = talked
    texts = [
        tokenizer.decode(rows.ids[:, 0].tolist(), skip_special=False) for rows in conversations
    ]
    assert any(text.count("<|im_start|>assistant") == 2 for text in texts)
    assert any("<|im_start|>system\nbe " in text for text in texts)
    told = ("hello world", "the sum?", "why")
    users = [text.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0] for text in texts]
    assert any(user in told for user in users)
    assert any(user not in told for user in users)
    # an answer that was cut is closed all the same before the user goes on
    assert all(
        "<|im_end|>\n<|im_start|>user" in text for text in texts if text.count("user\n") == 2
    )


def test_answers_that_loop_are_cut_soon(tmp_path: Path) -> None:
    lengths: list[int] = []
    loop, _ = tiny_loop(
        tmp_path, lambda rows, count: lengths.append(count), num_slots=2, answer_tokens=400
    )
    written, limit = loop._written, loop._limit
    positions = loop._inputs.positions
    written[:], limit[:], positions[:] = 120, 500, 130
    loop._stage_flags[:] = ANSWER
    loop._tokens[0, :131] = [i % 7 for i in range(131)]
    loop._tokens[1, :131] = range(131)
    loop._shorten_loops()
    assert limit.tolist() == [168, 500]


def test_slot_attention_equals_the_reference_and_copies_no_pages() -> None:
    generator = torch.Generator().manual_seed(0)
    slots, run, page, kv_heads, heads, dim = 5, 4, 16, 2, 6, 16
    keys, values = torch.randn(2, slots * run, page, kv_heads, dim, generator=generator)
    lengths = torch.tensor([1, 16, 17, 40, 48], dtype=torch.int32)
    table = torch.arange(slots * run, dtype=torch.int32).view(slots, run)[:, :3]
    nothing = torch.zeros(slots, dtype=torch.int64)
    starts = torch.arange(slots + 1, dtype=torch.int32)
    meta = RowMeta(nothing, nothing, nothing, table, starts, lengths)
    q = torch.randn(slots, heads * dim, generator=generator)
    outs = []
    for ops in (SlotOps(), ReferenceOps()):
        out = torch.full_like(q, torch.nan)
        ops.paged_attention(q, meta, KVLayer(keys, values), dim**-0.5, out=out)
        outs.append(out)
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
