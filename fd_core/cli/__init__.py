"""The command `fdcore`: what people type, and how settings reach the engine."""
