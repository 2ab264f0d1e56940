"""How long things take: fitted to what was measured on a device, or calculated from a device's numbers."""
