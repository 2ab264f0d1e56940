"""An engine in a separate process, and the messages to and from it."""
