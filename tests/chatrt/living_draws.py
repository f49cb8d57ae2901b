"""What operations on a living server are drawn from: texts, options of a turn, paces.

Knows: hypothesis' strategies, the tiny tokenizer. Does not know: the operations.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import strategies as st

from chatrt.testing.tokenizer import IM_END, tiny_tokenizer

MAX_CONTEXT = 256
TEXTS = (
    "hello world",
    "the moon is made of cheese, the sea of salt",
    "why?",
    "and what if all of this were told at some length, once and then once more",
)
UNKNOWN_RESPONSE = "resp_" + "0" * 32
UNKNOWN_CONVERSATION = "conv_" + "0" * 32

with tempfile.TemporaryDirectory() as _folder:
    TOKENIZER = tiny_tokenizer(Path(_folder))

texts = st.builds(
    lambda marker, text, times: f"{marker} {text * times}",
    st.sampled_from(("amber", "birch", "coral", "delta")),
    st.sampled_from(TEXTS),
    st.sampled_from([1, 1, 1, 2]),
)
end_id = TOKENIZER.encode(IM_END)[0]
options = st.fixed_dictionaries(
    {"max_output_tokens": st.sampled_from([16, 60, 1, 40, 5])},
    optional={
        "temperature": st.sampled_from([0.7, 1.2]),
        "include": st.just(["message.output_text.logprobs"]),
        "top_logprobs": st.sampled_from([0, 2]),
        "store": st.sampled_from([True, True, False]),
        "chatrt": st.fixed_dictionaries(
            {},
            optional={
                "seed": st.integers(0, 3),
                "stop": st.sampled_from([["e"], ["ld", "t"]]),
                "logit_bias": st.sampled_from([{str(end_id): 6.0}, {"97": 8.0, "98": 8.0}]),
                "speculation": st.sampled_from([{"enabled": False}, {"k": 2}]),
                "priority": st.sampled_from([-5, 5]),
                "pin_s": st.sampled_from([0.01, 60.0]),
                "frequency_penalty": st.just(1.5),
            },
        ),
    },
)
# Which of those that there are, from the newest on: what there is depends on time, draws must not.
picks = st.integers(0, 5)
lanes = st.sampled_from(("one", "two"))
# Steps of the engine behind an operation; None lets it run.
paces = st.sampled_from([3, 1, 0, None, 12, 30])
