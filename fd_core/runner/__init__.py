"""The runner: turns plans into outputs on a device. One template for every backend."""
