"""From a body to the engine's request: prompt, sampling, structured output, tools."""
