"""Commands on models: which there are, fetching, quantizing, tokenizing."""
