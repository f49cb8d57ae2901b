"""Text in, token ids out, and back: messages, templates, tokenizer, detokenizer, stop strings.

Knows: strings and token ids. Does not know: tensors, models, the wire.
Invariant: importing it reaches neither torch nor transformers.
"""
