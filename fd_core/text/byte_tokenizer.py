"""A tokenizer without a vocabulary file: one token for each byte, and one that ends a text.

It goes with the null backend, whose scripted tokens are bytes.
"""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from fd_core.text.token_bytes import Decoding, byte_level
from fd_core.text.tokenizer import Tokenizer

END_ID = 256
_END = "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer of the null model: ids 0 to 255 stand for the bytes, 256 ends a text."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(_END, special=True)])
    return Tokenizer(backend=backend, decoding=Decoding(byte_level), eos_id=END_ID, chat_template=_TEMPLATE)
