"""The command `fdcore`: the command line, and how settings reach the engine."""
