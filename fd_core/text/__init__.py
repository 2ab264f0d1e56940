"""Text in and out: tokenizer, streaming detokenizer with stop strings, sandboxed chat templates."""
