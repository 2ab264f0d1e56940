"""Work outside a step: its operations and completions, and the ports and threads that perform it."""
