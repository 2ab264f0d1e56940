"""Chat templates that would take hours or exhaust memory are stopped by their budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest

from fd_core.errors import BadRequest, FdError, ModelError
from fd_core.server.preprocess.jobs import chat_prompt
from fd_core.server.schemas.requests import ChatRequest
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.prompt_reader import PromptReader
from fd_core.text.sandbox import Sandbox
from fd_core.text.template_budget import MAX_BYTES, MAX_STEPS, TemplateBudget
from fd_core.text.tokenizer import byte_tokenizer
from tests.hostile.limits import MEGABYTE, at_length, tried
from tests.speed import slowdown

BIG = "{% set s = 'ab c' * 4000000 %}"
MIDDLE = "{% set s = 'ab c' * 25000 %}"
DEEP = "{% set ns = namespace(a=[1], b=[1], t=(1,)) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
DEEP += "{% set ns.b = [ns.b, ns.b] %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
OFTEN = "{% for i in range(99999) %}{% for j in range(99) %}"
END = "{% endfor %}{% endfor %}"


def often(what: str, before: str = BIG) -> str:
    return f"{before}{OFTEN}{{% set x = {what} %}}{END}"


TEMPLATES: dict[str, str] = {
    **{f"filter {name}": often(f"s|{name}") for name in ("upper", "lower", "capitalize", "trim", "e", "safe")},
    **{f"filter {name}": often(f"s|{name}", MIDDLE) for name in ("title", "wordcount", "urlencode", "striptags")},
    **{f"big filter {name}": BIG + f"{{{{ s|{name} }}}}" for name in ("title", "wordcount", "list", "sort")},
    "kept": BIG + "{% set ns = namespace(l=[]) %}" + OFTEN + "{% set ns.l = ns.l + [s|upper] %}" + END,
    "kept by a macro": BIG + "{% macro f(n, v) %}{{ f(n + 1, s|upper) }}{% endmacro %}{{ f(0, s) }}",
    "filter truncate": often("s|truncate(90000)", MIDDLE),
    "filter replace": often("s|replace('a', 'b')"),
    "filter indent": often("s|indent(2)"),
    "filter list": often("range(99999)|list", ""),
    "filter sort": often("range(99999)|sort", ""),
    "filter sort by long keys": BIG + "{% set l = [s] * 100000 %}{{ l|sort|length }}",
    "filter unique": often("([1] * 99999)|unique|list", ""),
    "filter groupby": often("([{'a': 1}] * 99999)|groupby('a')", ""),
    "filter min": often("s|min"),
    "filter reverse": often("s|reverse"),
    "filter join": often("([s] * 3)|join"),
    "filter tojson": often("s|tojson"),
    "filter map": often("range(99999)|map('string')|list", ""),
    "filter select": often("range(99999)|select('odd')|list", ""),
    "filter round of an integer": "{{ 5|round(-1000000000) }}",
    "filter round up": "{{ 5|round(1000000000, 'ceil') }}",
    "filter int": "{{ ('f' * 9000000)|int(0, 16) // ('f' * 4000000)|int(1, 16) }}",
    "test in": often("'zz' in s"),
    "test eq": often("s ~ '' == s ~ ''"),
    "test lower": often("s is lower"),
    "test in by name": often("'zz' is in s"),
    "slice": often("s[1:]"),
    "slice of a list": "{% set l = [1] * 1000000 %}" + OFTEN + "{% set x = l[1:] %}" + END,
    "addition": often("s + ''"),
    "addition of lists": often("l + l", "{% set l = [1] * 500000 %}"),
    "concatenation": often("s ~ i"),
    "multiplication": often("s * 1"),
    "multiplication of lists": often("[0] * 1000000", ""),
    "method upper": often("s.upper()"),
    "method replace": often("s.replace('a', 'b')"),
    "method split": often("s.split()"),
    "method split at": often("s.split('b')"),
    "method splitlines": often("s.splitlines()"),
    "method strip": often("s.strip('q')"),
    "method count": often("s.count('zz')"),
    "method find": often("s.find('zz')"),
    "method join": often("''.join([s])"),
    "method translate": BIG + "{{ s.translate({97: s}) }}",
    "method encode": BIG + "{{ s.encode().center(999999999999) }}",
    "method to_bytes": "{{ (1).to_bytes(99999999999, 'big') }}",
    "method fromkeys": often("dict.fromkeys(range(99999))", ""),
    "method copy": often("d.copy()", "{% set d = dict(a=1) %}"),
    "method index": often("l.index(2)", "{% set l = [1] * 999999 + [2] %}"),
    "method format": BIG + "{{ ('{0}' * 1000).format(s) }}",
    "method format with widths": "{{ ('{0:9999}' * 90000).format(1) }}",
    "method expandtabs": "{{ ('\t' * 9999999).expandtabs(9999) }}",
    "text of a list": BIG + "{{ [s] * 1000000 }}",
    "text of a list in a concatenation": BIG + "{{ ([s] * 1000000) ~ '' }}",
    "text of a list by a filter": BIG + "{{ ([s] * 1000000)|string|length }}",
    "text of a list by upper": BIG + "{{ ([s] * 1000000)|upper|length }}",
    "text of a list in a format": BIG + "{{ '{}'.format([s] * 1000000)|length }}",
    "text of a list in an error": BIG + "{{ raise_exception([s] * 1000000) }}",
    "text of a dictionary's values": BIG + "{{ dict(a=[s] * 1000000).values() }}",
    "deep text": DEEP + "{{ ns.a }}",
    "deep json": DEEP + "{{ ns.a|tojson }}",
    "deep equality": DEEP + "{{ ns.a == ns.b }}",
    "deep membership": DEEP + "{{ ns.a in [ns.b] }}",
    "deep membership in an iterator": DEEP + "{{ ns.a in ([ns.b]|reverse) }}",
    "deep test": DEEP + "{{ ns.a is eq ns.b }}",
    "deep key": DEEP + "{{ {1: 2}[ns.t] }}",
    "deep key of a literal": DEEP + "{{ {ns.t: 2} }}",
    "deep order": DEEP + "{{ [ns.a, ns.b]|sort }}",
    "deep unique": DEEP + "{{ [ns.t]|unique|list }}",
    "deep count": DEEP + "{{ [ns.a].count(ns.b) }}",
    "deep change": DEEP + "{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}",
    "deep namespace": "{% set ns = namespace() %}{% set ns.n = ns %}{% set ns.m = [ns, ns] %}{{ ns.m }}",
    "text in a set block": "{% set x %}" + OFTEN + "x" * 60_000 + END + "{% endset %}",
    "text in a macro": "{% macro f() %}" + OFTEN + "x" * 60_000 + END + "{% endmacro %}{{ f()|length }}",
    "text in a filter block": "{% filter upper %}" + OFTEN + "x" * 60_000 + END + "{% endfilter %}",
    "text in a block": "{% block b %}" + OFTEN + "x" * 60_000 + END + "{% endblock %}{{ self.b()|length }}",
    "wide body": OFTEN + "{% if i %}{% endif %}" * 3000 + END,
    "wide literal": OFTEN + "{% set x = [" + "0," * 30_000 + "] %}" + END,
    "wide macro": "{% macro f() %}" + "{% if i %}{% endif %}" * 3000 + "{% endmacro %}" + OFTEN + "{{ f() }}" + END,
    "wide call block": "{% macro m() %}{{ caller() }}{% endmacro %}" + OFTEN + "{% call m() %}"
    + "{% if i %}{% endif %}" * 3000 + "{% endcall %}" + END,
    "many arguments": "{% macro f() %}{{ varargs|length }}{% endmacro %}" + OFTEN + "{{ f(*([0] * 999999)) }}" + END,
    "recursive loop": "{% for a in [1] recursive %}{% if a is number %}{{ loop([[]] * 999999) }}{{ loop([1]) }}"
    "{% endif %}{% endfor %}",
    "recursive loop that shows nothing": "{% for a in [1] if a recursive %}{{ loop([0] * 999999) }}{{ loop([1]) }}"
    "{% endfor %}",
    "division": "{% set n = 0x" + "f" * 3_000 + " %}" + OFTEN + "{% set x = n // 3 %}" + END,
    "long number": "{{ " + "9" * 100_000 + " }}",
    "dates": OFTEN + "{{ strftime_now('%c' * 100) }}" + END,
    "long dates": "{{ strftime_now('%c' * 4000000) }}",
    "escaping": BIG + "{% autoescape true %}" + OFTEN + "{{ s }}" + END + "{% endautoescape %}",
}  # fmt: skip


def rendered(source: str) -> int:
    """Render in the child."""
    template = ChatTemplate(source, "<s>", "</s>")
    return len(template.render([{"role": "user", "content": "hello"}]))


@pytest.mark.timeout(at_length(500, 2500))
def test_every_template_operation_is_charged(record_property: Callable[[str, object], None]) -> None:
    names = list(TEMPLATES)[:: at_length(18, 1)]
    record_property("inputs", len(names))
    outcomes = tried(
        f"{__name__}:rendered",
        [TEMPLATES[name] for name in names],
        memory=1400 * MEGABYTE,
        seconds=at_length(400, 2400),
    )
    for name, outcome in zip(names, outcomes, strict=True):
        assert outcome.error in ("ModelError", "BadRequest"), (name, outcome)
        assert len(outcome.message) < 1000, name
        # Text is charged before it is built, which may take twice that: once in pieces, once joined.
        assert outcome.held < 2 * MAX_BYTES, (name, outcome.held / MEGABYTE)
        assert outcome.seconds < 20, (name, outcome.seconds)


def test_number_without_a_value_is_an_error_of_the_template() -> None:
    with pytest.raises(BadRequest, match="name 'inf' is not defined"):
        ChatTemplate("{{ 1e999 }}").render([{"role": "user", "content": "hello"}])


def test_template_over_budget_is_rejected_at_model_load() -> None:
    with pytest.raises(ModelError, match="was stopped") as caught:
        ChatTemplate.of(byte_tokenizer(), often("s|upper"))
    assert caught.value.exit_code == 3
    ChatTemplate.of(byte_tokenizer(), "{{ raise_exception('other turns, please') }}")


@pytest.mark.timing
def test_large_template_is_rejected_before_compilation() -> None:
    with pytest.raises(ModelError, match="characters; at most"):
        ChatTemplate("{{ a }}" * 40_000).render([{"role": "user", "content": "hello"}])
    for source in ("{{ a }}" * 30_000, f"{{{{ a{' < b' * 50_000} }}}}", "{% macro m() %}{% endmacro %}" * 3_000):
        began = time.perf_counter()
        with pytest.raises(ModelError, match="more than 10000 expressions and statements"):
            ChatTemplate(source).render([{"role": "user", "content": "hello"}])
        assert time.perf_counter() - began < 20
    with pytest.raises(FdError):
        ChatTemplate("{% if a %}" * 20_000).render([{"role": "user", "content": "hello"}])


@pytest.mark.timing
def test_template_of_many_statements_is_compiled_within_a_second() -> None:
    """Python compiles a template in one operation, during which no other thread runs."""
    code = Sandbox().compile("{{ a < b < c }}{% if d %}{{ e | trim }}{% endif %}" * 800, raw=True)
    began = time.thread_time()
    compile(code, "<template>", "exec")
    assert time.thread_time() - began < 1


@pytest.mark.parametrize("where", ["of the model", "of the request"])
@pytest.mark.timing
def test_slow_template_does_not_block_the_loop(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop keeps running while the template uses up its budget, here a quarter of the server's."""
    monkeypatch.setattr(TemplateBudget.__init__, "__defaults__", (MAX_STEPS // 4, MAX_BYTES))
    slow = often("i ~ j", "")
    given = slow if where == "of the request" else None

    async def longest_pause() -> float:
        reader = PromptReader(byte_tokenizer(), ChatTemplate("{{ messages }}" if given else slow))
        body = msgspec.convert(
            {"messages": [{"role": "user", "content": "hello"}], "chat_template": given}, ChatRequest
        )
        reading = asyncio.ensure_future(chat_prompt(SimpleNamespace(prompt_reader=reader, trusts_templates=True), body))
        pauses, last = [], time.perf_counter()
        while not reading.done():
            await asyncio.sleep(0.001)
            pauses.append(time.perf_counter() - last)
            last = time.perf_counter()
        with pytest.raises((ModelError, BadRequest)):
            await reading
        reader.close()
        assert len(pauses) > 5
        return max(pauses)

    # One short try of several is enough: the machine has other load.
    assert any(asyncio.run(longest_pause()) < 0.25 * slowdown() for _ in range(3))
