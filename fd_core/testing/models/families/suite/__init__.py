"""The suite of `fdcore conformance --model-family`."""
