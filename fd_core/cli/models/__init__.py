"""Commands on models: listing, fetching, quantizing, tokenizing."""
