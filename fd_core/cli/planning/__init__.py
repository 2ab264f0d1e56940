"""Commands that predict performance: `plan`, `calibrate`, `simulate`."""
