"""A model used without a server: texts, streams, and the state left by a failed call."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fd_core.engine.async_llm import AsyncLLM
from fd_core.engine.llm import LLM
from fd_core.engine.process.messages import UpdateWeights
from fd_core.errors import BadRequest, FdError
from fd_core.types import FinishReason, SamplingParams

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SHORT = SamplingParams(max_tokens=40, logit_bias=dict.fromkeys(range(128, 257), -100.0))
"""Without bytes that are not ASCII: each token of the null model is a character."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    found = LLM("null", backend="null")
    yield found
    found.close()


def test_invalid_prompt_leaves_no_request_running(llm: LLM) -> None:
    with pytest.raises(FdError, match="lone surrogate"):
        llm.generate(["one", "\ud800"], SamplingParams(max_tokens=1000))
    assert not llm._engine.has_work
    assert len(llm.generate("two", SamplingParams(max_tokens=2))[0].token_ids) == 2


def test_several_texts_of_a_prompt_differ_and_repeat(llm: LLM) -> None:
    found = llm.generate(["one", "two"], SHORT, n=3)
    assert [len(each.outputs) for each in found] == [3, 3]
    assert len({each.text for each in found[0].outputs}) == 3
    assert found[0].text == llm.generate("one", SHORT)[0].text, "the first one is that of the seed itself"
    assert [each.text for each in llm.generate("two", SHORT, n=3)[0].outputs] == [
        each.text for each in found[1].outputs
    ]


def test_stop_string_ends_the_text_and_its_request(llm: LLM) -> None:
    [whole] = llm.generate("one", SHORT)
    stop = whole.text[20:22]
    [found] = llm.generate("one", SHORT, stop=[stop, "absent"])
    assert found.text == whole.text[: whole.text.index(stop)]
    assert (found.finish_reason, found.stop_reason) == (FinishReason.STOP, stop)
    assert found.token_ids == whole.token_ids[: len(found.text) + len(stop)]
    assert llm.generate("one", SHORT)[0].text == whole.text


def test_schema_determines_the_form_of_the_text(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    [found] = llm.generate("one", SHORT, schema=schema)
    assert json.loads(found.text)["a"] in (1, 2)


def test_chat_renders_conversations(llm: LLM) -> None:
    one, two = ([{"role": "user", "content": text}] for text in ("Hi", "Hello"))
    expected = llm.generate(["user: Hi\n", "user: Hello\n"], SHORT)
    assert [each.text for each in llm.chat([one, two], SHORT, chat_template=TEMPLATE)] == [
        each.text for each in expected
    ]
    assert llm.chat(one, SHORT, chat_template=TEMPLATE)[0].text == expected[0].text


def test_iterators_of_prompts_are_completed_like_lists(llm: LLM) -> None:
    expected = [each.text for each in llm.generate(["user: a\n", "user: b\n"], SHORT)]
    prompts = (f"user: {name}\n" for name in "ab")
    chats = ([{"role": "user", "content": name}] for name in "ab")
    assert [each.text for each in llm.generate(prompts, SHORT)] == expected
    assert [each.text for each in llm.chat(chats, SHORT, chat_template=TEMPLATE)] == expected
    assert len(llm.embed(iter(["a", "b"]))) == 2
    with pytest.raises(BadRequest, match="expected text or token ids, got bytes"):
        llm.generate(b"a", SHORT)


def test_closed_model_fails_immediately() -> None:
    closed = LLM("null", backend="null")
    stream = closed.stream("one", SHORT)
    next(stream)
    closed.close()
    for use in (lambda: next(stream), lambda: closed.generate("two", SHORT), closed.pause):
        with pytest.raises(BadRequest, match="the model was closed; load it again"):
            use()
    closed.close()


def test_model_may_be_a_path(tmp_path: Path) -> None:
    with pytest.raises(FdError, match=r"no such file: '.*no\.gguf'"):
        LLM(tmp_path / "no.gguf")


def test_engine_ends_with_its_block_and_with_its_object() -> None:
    before = threading.active_count()
    with LLM("null", backend="null") as in_block:
        assert in_block.generate("one", SHORT)[0].token_ids
        assert threading.active_count() > before
    assert threading.active_count() == before
    with pytest.raises(BadRequest, match="was closed"), in_block:
        pass
    forgotten = LLM("null", backend="null")
    assert threading.active_count() > before
    del forgotten
    gc.collect()
    assert threading.active_count() == before


def test_next_text_is_whole_after_an_interrupt_at_any_time(llm: LLM) -> None:
    """If SIGINT ended a step early, its output would stay unread, and the next step would fail after a minute."""
    expected = llm.generate("one", SHORT)[0].token_ids
    for attempt in range(20):
        timer = threading.Timer(0.005 + attempt / 1000, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                llm.generate(["one"] * 8, msgspec.structs.replace(SHORT, max_tokens=1000))
        assert llm.generate("one", SHORT)[0].token_ids == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_of_several_threads_generates_and_the_others_are_refused(llm: LLM) -> None:
    outcomes: list[str] = []
    start = threading.Barrier(8)

    def use() -> None:
        start.wait()
        try:
            outcomes.append(llm.generate(["one"] * 20, SHORT)[0].text)
        except BadRequest as error:
            outcomes.append(str(error)[:12])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    text = llm.generate("one", SHORT)[0].text
    assert text in outcomes and set(outcomes) <= {text, "another text"}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_process_is_told_to_load_its_own_model(llm: LLM) -> None:
    """The engine's threads are not in a forked process: a call would never return."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def use() -> None:
        try:
            llm.generate("one", SHORT)
        except BadRequest as error:
            sender.send(str(error))
        llm.close()

    child = multiprocessing.get_context("fork").Process(target=use)
    child.start()
    child.join(30)
    child.kill()
    assert child.exitcode == 0 and receiver.poll()
    assert f"the model was loaded in process {os.getpid()}" in receiver.recv()
    assert llm.generate("one", SHORT)
    with pytest.raises(TypeError, match="load the model there"):
        pickle.dumps(llm)


def test_seed_of_another_type_is_named(llm: LLM) -> None:
    for seed in (None, "1", 1.5):
        with pytest.raises(BadRequest, match="seed: expected `int`, got"):
            llm.generate("one", SamplingParams(max_tokens=1, seed=seed))  # type: ignore[arg-type]


def test_stream_yields_the_text_and_can_be_left(llm: LLM) -> None:
    [whole] = llm.generate("one", SHORT)
    assert "".join(llm.stream("one", SHORT)) == whole.text
    stream = llm.stream("one", SHORT)
    assert next(stream) == whole.text[0]
    with pytest.raises(BadRequest, match="another text is being streamed"):
        llm.generate("two", SHORT)
    stream.close()
    assert llm.generate("one", SHORT)[0].text == whole.text


def test_scores_pair_one_text_with_each_of_the_others(llm: LLM) -> None:
    same, other = llm.score("one", ["one", "quite another"])
    assert same == pytest.approx(1)
    assert -1 <= other <= 1
    with pytest.raises(BadRequest, match="got 2 and 3 texts"):
        llm.score(["a", "b"], ["a", "b", "c"])


@pytest.mark.parametrize("options, field", [({"n": 0}, "n"), ({"stop": ""}, "stop")])
def test_invalid_option_is_named(llm: LLM, options: dict[str, object], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        llm.generate("one", SHORT, **options)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_awaited_texts_equal_those_of_the_blocking_class(llm: LLM) -> None:
    [whole] = llm.generate("one", SHORT)
    stop = whole.text[20:22]

    async def use() -> list[str]:
        async with AsyncLLM("null", backend="null") as other:
            texts = []
            for options in ({}, {"stop": stop}):
                async for found in other.generate("one", SHORT, **options):
                    text = found.text
                texts.append(text)
            async for _ in other.chat([{"role": "user", "content": "Hi"}], SHORT, chat_template=TEMPLATE):
                break  # the request is aborted
            with pytest.raises(BadRequest, match="tokens"):
                async for _ in other.generate("x" * 100_000, SHORT):
                    pass
            return texts

    assert asyncio.run(use()) == [whole.text, whole.text[: whole.text.index(stop)]]


def test_model_that_is_not_loaded_yet_explains_how_to_load_it() -> None:
    with pytest.raises(BadRequest, match="use `async with AsyncLLM"):
        AsyncLLM("null", backend="null").info  # noqa: B018


def test_paused_model_refuses_requests_until_it_resumes() -> None:
    llm = LLM("null", backend="null")
    for stop, start in ((llm.pause, llm.resume), (llm.sleep, llm.wake_up)):
        stop()
        with pytest.raises(BadRequest, match=r"resume\(\) or wake_up\(\)"):
            llm.generate("Hello")
        start()
        assert llm.generate("Hello")[0].token_ids
    llm.reset_prefix_cache()
    llm.update_weights("/any", "second")
    assert llm.info.weight_version == "second"
    stream = llm.stream("Hello")
    next(stream)
    with pytest.raises(BadRequest, match="being streamed"):
        llm.pause()


def test_text_continues_after_a_pause_in_its_middle() -> None:
    async def main() -> None:
        async with AsyncLLM("null", backend="null") as llm:
            params = SamplingParams(max_tokens=300, ignore_eos=True, seed=1)
            async for answer in llm.generate("Hello", params):
                expected = answer.token_ids
            stopped = 0
            async for answer in llm.generate("Hello", params):
                if not stopped:
                    await llm.pause()
                    stopped = len(answer.token_ids)
                    await llm.resume()
            assert answer.token_ids == expected and stopped
            await llm.control(UpdateWeights("/any"))
            assert llm.info.weight_version == "1"

    asyncio.run(main())
