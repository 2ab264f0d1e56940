"""Parsers of model output: reasoning, content and tool calls, as streaming state machines without I/O.

`contract` defines parsers, `events` their output; `answer` chains a reasoning parser and a tool parser, and selects
parsers for a chat template. Plugins add others through hooks.
"""
