"""Commands that tell in advance: `plan`, `calibrate`, `simulate`."""
