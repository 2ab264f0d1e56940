"""Cost models: fitted to measurements of a device, or calculated from its data sheet."""
