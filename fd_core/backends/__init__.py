"""Built-in backends: null (scripted tokens, no framework), reference (numpy) and cpu (torch and native kernels)."""
