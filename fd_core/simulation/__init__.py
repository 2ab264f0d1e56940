"""The production scheduler without a device: workloads that are answered with made-up tokens."""
