"""The running batch: plans, slots, tokens and the processing of outputs."""
