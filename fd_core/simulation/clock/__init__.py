"""Virtual time: the loop, the waits and the timeline."""
