"""Flags of vLLM and variables of FastDeploy: each has an equivalent here, or an explanation."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from fd_core.cli.app import app
from fd_core.cli.settings.flags import USER_VARIABLES
from fd_core.cli.settings.other_servers import OLDER_VARIABLES, REASONS, VARIABLES, report_variables
from fd_core.cli.settings.settings import merge, merge_route
from fd_core.errors import ConfigError
from tests.reference import page

RunCli = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).parents[3]
MOST_USED_BY_VLLM = """
    --model --tokenizer --tokenizer-mode --trust-remote-code --dtype --quantization --max-model-len --seed --revision
    --served-model-name --enforce-eager --device --gpu-memory-utilization --kv-cache-dtype --block-size --swap-space
    --cpu-offload-gb --max-num-seqs --max-num-batched-tokens --enable-prefix-caching --enable-chunked-prefill
    --tensor-parallel-size --pipeline-parallel-size --data-parallel-size --distributed-executor-backend
    --enable-expert-parallel --disable-custom-all-reduce --load-format --download-dir --hf-overrides --rope-scaling
    --chat-template --chat-template-content-format --tool-call-parser --enable-auto-tool-choice --reasoning-parser
    --enable-lora --lora-modules --max-loras --max-lora-rank --speculative-config --guided-decoding-backend --host
    --port --api-key --uvicorn-log-level --disable-log-requests --disable-log-stats --limit-mm-per-prompt
    --compilation-config --kv-transfer-config --generation-config --override-generation-config --task --runner
    --num-gpu-blocks-override --scheduling-policy --async-scheduling --root-path --ssl-keyfile --ssl-certfile
    --max-logprobs --allowed-origins --disable-frontend-multiprocessing --attention-backend --kv-cache-memory-bytes
    --api-server-count --response-role --allowed-media-domains --allowed-local-media-path --mm-processor-kwargs
    """.split()


def flags_of(command: str) -> set[str]:
    params = typer.main.get_command(app).commands[command].params
    return {name for each in params for name in (*each.opts, *each.secondary_opts)}


def test_most_used_flags_of_vllm_exist_or_are_explained() -> None:
    assert len(set(MOST_USED_BY_VLLM)) >= 50
    here = flags_of("serve")
    assert [flag for flag in MOST_USED_BY_VLLM if flag not in here and flag not in REASONS] == []


@pytest.mark.parametrize("flag", [flag for flag in MOST_USED_BY_VLLM if flag in REASONS])
def test_flag_of_vllm_is_answered_with_its_equivalent(run_cli: RunCli, flag: str) -> None:
    ended = run_cli("serve", "smollm2", flag.replace("-", "_").replace("__", "--", 1), "1")
    assert (ended.returncode, ended.stderr) == (2, f"fdcore: {flag}: not a flag of fdcore: {REASONS[flag]}\n")


def test_settings_page_lists_every_flag_and_variable_of_other_servers() -> None:
    text = page("settings.md")
    variables = [*(name for names in VARIABLES for name in names), *(each.variable for each in OLDER_VARIABLES)]
    assert [name for name in (*REASONS, *variables) if f"`{name}`" not in text] == []


def test_own_flags_are_not_taken_for_those_of_other_servers(run_cli: RunCli) -> None:
    ended = run_cli("complete", "x", "-m", "no-such-model")
    assert "no such model: 'no-such-model'" in ended.stderr


def test_misspelled_variable_is_reported_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    report_variables({"FD_MAX_NUM_SEQ": "3", "FD_MAX_NUM_SEQS": "3", "FD_UNRELATED": "x", "HOME": "/"}, USER_VARIABLES)
    expected = "fdcore: FD_MAX_NUM_SEQ is not a setting and is ignored; did you mean FD_MAX_NUM_SEQS?\n"
    assert capsys.readouterr().err == expected


def test_variable_of_fastdeploy_is_reported_at_start(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_LOG_DIR", "log")
    ended = run_cli("serve", "smollm2", "--port", "x")
    assert ended.stderr.splitlines() == [
        "fdcore: FD_LOG_DIR of FastDeploy is ignored: log lines are written to standard error; redirect it to a file",
        "fdcore: --port: expected an integer, got 'x'",
    ]


def test_variables_of_fastdeploy_set_their_equivalents() -> None:
    environment = {"FD_DEBUG": "1", "FD_SUPPORT_MAX_CONNECTIONS": "512"}
    server = merge("smollm2", {}, environment).server
    assert (server.log_level, server.limit_concurrency) == ("debug", 512)
    gateway = merge_route({"workers": ["http://127.0.0.1:8001"]}, environment).gateway
    assert (gateway.log_level, gateway.limit_concurrency) == ("debug", 512)
    with pytest.raises(ConfigError, match="FD_SUPPORT_MAX_CONNECTIONS: expected an integer, got 'x'"):
        merge("smollm2", {}, {"FD_SUPPORT_MAX_CONNECTIONS": "x"})


def test_suggested_variables_exist() -> None:
    suggested = {name for reason in VARIABLES.values() for name in re.findall(r"FD_[A-Z_]+", reason)}
    assert suggested <= set(USER_VARIABLES)
    assert not set(USER_VARIABLES) & {name for names in VARIABLES for name in names}


def test_every_variable_that_the_code_reads_is_known() -> None:
    read = re.compile(r"""environ(?:\.get\(|\[)["'](FD_[A-Z_]+)["']""")
    found = {name for path in (ROOT / "fd_core").rglob("*.py") for name in read.findall(path.read_text())}
    assert found <= set(USER_VARIABLES), "a misspelling of it would not be reported"
