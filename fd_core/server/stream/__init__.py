"""From the engine's deltas to an answer, in pieces or whole."""
