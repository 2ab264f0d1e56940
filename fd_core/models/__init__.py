"""Model architectures, each written once over `fd_core.ops.contract.Ops`, and the reading of checkpoints."""
