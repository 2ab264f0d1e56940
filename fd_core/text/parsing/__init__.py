"""Parsers of what a model writes: reasoning, content and tool calls, as streaming state machines without I/O.

`contract` is what a parser is, `events` what it yields, `answer` puts a reasoning parser before a tool parser,
and takes parsers for a chat template. A plugin adds others by hook.
"""
