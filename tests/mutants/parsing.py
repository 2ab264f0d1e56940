"""Faults of the parsers of tool calls and reasoning: invariants 8.1 to 8.6."""

from __future__ import annotations

from tests.mutants.mutant import mutant

READER = "text/parsing/reader.py"
JSON = "text/parsing/formats/json_calls.py"
THINKING = "text/parsing/thinking.py"
ANSWER = "text/parsing/answer.py"
TAGGED = "text/parsing/formats/tagged.py"
PYTHONIC = "text/parsing/formats/pythonic.py"

_SAME = "8.1: the output does not depend on how the text is cut"
_PROMPT = "8.2: text is held back only where it may be the prefix of a marker"
_ALL = "8.3: no character is lost or repeated, and each call begins once"
_MARKUP = "8.5: markup, whole or cut off, is never content"
_TIME = "8.6: time is linear in the text"
_ENDS = "8.4: a text may end anywhere and hold anything"

MUTANTS = (
    mutant(
        "marker-prefix-in-a-piece-is-content",
        _SAME,
        (READER, "begun = beginning.search(", "begun = None and beginning.search("),
    ),
    mutant(
        "short-marker-does-not-wait-for-a-longer-one",
        _SAME,
        (READER, "begun.start() > found.start()", "begun.start() >= found.start()"),
    ),
    mutant(
        "marker-within-another-matches-at-once",
        _SAME,
        (READER, "begun.start() > found.start()", "begun.start() != found.start()"),
    ),
    mutant(
        "literal-is-compared-with-the-available-text",
        _SAME,
        (READER, "if self._ended or not open_ones:", "if True:"),
    ),
    mutant(
        "whitespace-before-a-marker-is-emitted-at-a-cut",
        _SAME,
        (
            READER,
            "words = text.rstrip(SPACE) if space else text",
            "words = text.rstrip(SPACE) if space and found else text",
        ),
    ),
    mutant(
        "kept-position-is-dropped-with-the-piece",
        _SAME,
        (READER, "            self._kept_before.append(self._text[self._kept : self._at])\n", ""),
    ),
    mutant(
        "text-after-an-angle-bracket-is-held-back",
        _PROMPT,
        (
            READER,
            "begin = first.start() if first else len(self._text)",
            'begin = first.start() if first else (self._text + "<").index("<", self._at)',
        ),
    ),
    mutant(
        "call-name-waits-for-its-arguments",
        _PROMPT,
        (
            JSON,
            "if name is not None and not begun and (early is not None or not known):",
            "if name is not None and not begun and early is not None:",
        ),
    ),
    mutant(
        "arguments-are-emitted-only-when-complete",
        _PROMPT,
        (
            JSON,
            "value = yield from self._value(self.emit_arguments if begun else self.drop, unquote=begun)",
            "value = yield from self._value(self.drop)\n                self.emit_arguments(value.text)",
        ),
    ),
    mutant(
        "held-back-text-is-lost-at-the-end",
        _ALL,
        (READER, "                if rest:\n                    emit(rest)\n", ""),
    ),
    mutant(
        "every-call-has-index-zero",
        _ALL,
        (READER, "        self._calls += 1\n", ""),
    ),
    mutant(
        "missing-arguments-are-not-empty-json",
        _ALL,
        (READER, "        if not self._arguments:\n", "        if False:\n"),
    ),
    mutant(
        "escaped-quote-ends-a-string",
        _ALL,
        (JSON, '            if character == "\\\\":\n', "            if False:\n"),
    ),
    mutant(
        "text-that-is-no-call-is-lost",
        _ALL,
        (JSON, "                self.emit_read(cut=opened or not known)\n", ""),
    ),
    mutant(
        "whitespace-after-a-call-is-content",
        _ALL,
        (READER, "            if not text.strip(SPACE):\n                return\n", ""),
    ),
    mutant(
        "content-after-reasoning-skips-the-tool-parser",
        _ALL,
        (ANSWER, "                read += tools.push(event.text)\n", "                read.append(event)\n"),
    ),
    mutant(
        "value-text-is-not-escaped",
        _ALL,
        (TAGGED, "emit=lambda text: self.emit_arguments(escaped(text))", "emit=self.emit_arguments"),
    ),
    mutant(
        "reasoning-closed-by-the-prompt-continues",
        _ALL,
        (THINKING, "return begun > ended or (begun == ended and cls.unasked)", "return begun > -1 or cls.unasked"),
    ),
    mutant(
        "end-of-text-ends-a-call",
        _ENDS,
        (
            JSON,
            "            self.end_call()\n            self.skip(-len(end))\n",
            "            self.skip(-len(end))\n        self.end_call()\n",
        ),
    ),
    mutant(
        "partial-word-is-emitted-as-a-value",
        _ENDS,
        (PYTHONIC, 'self.emit_arguments(word if word[:1] in "-0123456789" else "")', "self.emit_arguments(word)"),
    ),
    mutant(
        "text-held-back-by-the-tool-parser-is-lost",
        _ENDS,
        (ANSWER, "[*self._read(events, self._second), *self._second.flush()]", "self._read(events, self._second)"),
    ),
    mutant(
        "call-that-never-starts-is-ended",
        _ENDS,
        (JSON, "        if not self.call_open:\n            return\n", ""),
    ),
    mutant(
        "partial-marker-at-the-end-is-content",
        _MARKUP,
        (
            READER,
            "cut = begun is not None and (self._after_call or (self._cut_off and self._drops(begun[0], emit)))",
            "cut = False",
        ),
    ),
    mutant(
        "marker-without-a-call-is-content",
        _MARKUP,
        (
            READER,
            "marker = yield from self.until(*begins, *self.markers, emit",
            "marker = yield from self.until(*begins, emit",
        ),
    ),
    mutant(
        "partial-closing-marker-after-a-call-is-content",
        _MARKUP,
        (READER, 'text = _remains(self.markers).sub("", text, count=1)', "pass"),
    ),
    mutant(
        "parser-never-discards-consumed-text",
        _TIME,
        (
            READER,
            "        self._text = self._text[self._at :] + text\n        self._at = 0\n",
            "        self._text += text\n",
        ),
    ),
)
