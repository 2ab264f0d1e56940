"""Models that `transformers` computes with the pack's attention over paged KV."""
