import os
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import fd_core
from fd_core.cli.app import app
from fd_core.cli.report import describe
from fd_core.cli.settings.other_servers import REASONS
from fd_core.errors import ModelError
from tests.server.processes import free_port
from tests.speed import slowdown

COMMANDS = [
    *(["serve"], ["chat"], ["complete"], ["models"], ["models", "list"], ["models", "pull"], ["plugins"], ["env"]),
    *(["plugins", "list"], ["install"], ["bench"], ["bench", "latency"], ["bench", "throughput"], ["bench", "serve"]),
]
HEAVY = {"torch", "transformers", "fastapi", "starlette", "uvicorn", "aiohttp", "tokenizers", "huggingface_hub", "gguf"}


def run(*arguments, **more):
    command = [sys.executable, "-m", "fd_core.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **more)


def packages_after(*statements):
    each = "\n".join(f"try:\n    {statement}\nexcept SystemExit:\n    pass" for statement in statements)
    code = f"import sys\n{each}\nprint(*sys.modules, file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return {name.partition(".")[0] for name in ended.stderr.split()}


def test_nothing_heavy_is_imported():
    """One process runs them all: whatever one of them imports stays."""
    loaded = packages_after(
        "import fd_core",
        "import fd_core.types, fd_core.config, fd_core.hookspecs, fd_core.signals",
        "import fd_core.scheduling.scheduler, fd_core.kv.blocks, fd_core.scheduling.running.output_processor",
        "from fd_core.plugins import installed_plugins; installed_plugins()",
        "import fd_core.backends.null, fd_core.backends.cpu, fd_core.runner.runner",
        "sys.argv = ['fdcore', '--help']; from fd_core.cli.main import main; main()",
        "sys.argv = ['fdcore', 'bench', 'serve', '--help']; from fd_core.cli.main import main; main()",
        "sys.argv = ['fdcore', 'plugins', 'list']; from fd_core.cli.main import main; main()",
    )
    assert not loaded & HEAVY


def test_help_is_shown_without_numpy():
    statement = "sys.argv = ['fdcore', 'serve', '--help']; from fd_core.cli.main import main; main()"
    assert "numpy" not in packages_after(statement)


@pytest.mark.timing
def test_help_answers_in_under_half_a_second():
    """In CPU time on a typical machine; the command waits for nothing else."""

    def seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5 * slowdown()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(command):
    result = CliRunner().invoke(app, [*command, "--help"], terminal_width=200)
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: fdcore {' '.join(command)}")


def test_version():
    for words in (["--version"], ["-V"], ["version"]):
        assert CliRunner().invoke(app, words).output == f"fdcore {fd_core.__version__}\n"
    shown = subprocess.run([sys.executable, "-m", "fd_core", "-V"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"fdcore {fd_core.__version__}\n"


@pytest.mark.parametrize(
    "alias, words",
    [("run", ["chat"]), ("pull", ["models", "pull"]), ("list", ["models", "list"]), ("collect-env", ["env"])],
)
def test_alias_is_the_same_command(alias, words):
    root = found = typer.main.get_command(app)
    for word in words:
        found = found.commands[word]
    same = root.commands[alias]
    assert (same.help, [each.opts for each in same.params]) == (found.help, [each.opts for each in found.params])


@pytest.mark.parametrize(
    "arguments, code, words",
    [
        (["serve", "smollm2", "--no-such-flag"], 2, "fdcore: no such option: --no-such-flag"),
        (["serve", "smollm2", "--prot", "1"], 2, "no such option: --prot; did you mean --port or "),
        (["complete"], 2, "fdcore: missing argument 'prompt' (run `fdcore complete --help`)"),
        (["complete", "x", "--temperature", "hot"], 2, "fdcore: --temperature: "),
        (["plugins", "new", "x", "--kind", "y"], 2, "fdcore: --kind: 'y' is not one of 'backend', "),
        (["serv"], 2, "fdcore: no such command 'serv'; did you mean 'serve'? (run `fdcore --help`)"),
        (
            ["serve", "smollm2", "--disable-uvicorn-access-log"],
            2,
            "not a flag of fdcore: requests are only logged with",
        ),
        (
            ["route", "--uvicorn-log-level", "debug"],
            2,
            "fdcore: --uvicorn-log-level: not a flag of fdcore: use --log",
        ),
        (["serve", "--model", "smollm2"], 2, "fdcore: --model: not a flag of fdcore: the model is an argument"),
        (["serve", "smollm2", "-c=4096"], 2, "fdcore: -c: not a flag of fdcore: use --max-model-len"),
        (["no-such-command"], 2, "fdcore: no such command 'no-such-command' (run `fdcore --help`)"),
        (["serve"], 2, "fdcore: MODEL: no model was specified"),
        (["serve", "smollm2", "--port", "x"], 2, "fdcore: --port: expected an integer, got 'x'"),
        (
            ["serve", "smollm2", "--num-kv-blocks", "1", "--kv-cache-memory", "1M"],
            2,
            "--num-kv-blocks and --kv-cache-memory exclude each other",
        ),
        (["complete", "x", "--url", "127.0.0.1:9", "--dtype", "float32"], 2, "--url cannot be combined with --dtype"),
        (["complete", "x", "--url", "ftp://host"], 2, "'ftp://host' is not the URL of a server"),
        (["complete", "x", "-m", "no-such-model"], 3, "no such model: 'no-such-model'"),
        (["complete", "x", "-m", "/nowhere/x.gguf"], 3, "/nowhere/x.gguf"),
        (["complete", "x", "--backend", "warp"], 4, "unknown backend 'warp'"),
        (["serve", "/nowhere", "--router", "http://r"], 2, "requires its secret (use the same file as the router)"),
        (
            ["serve", "/nowhere", "--port", "8001", "--health-port", "8001"],
            2,
            "health_port=8001 is the port of the server",
        ),
        (["serve", "/nowhere", "--tool-call-parser", "best"], 4, "unknown tool parser 'best'"),
        (["serve", "/nowhere", "--reasoning-parser", "best"], 4, "unknown reasoning parser 'best'"),
        (["serve", "/nowhere", "--lora-folder", "/none"], 2, "--lora-folder: there is no folder /none"),
        (["serve", "/nowhere", "--weights-folder", "/none"], 2, "--weights-folder: there is no folder /none"),
        (["serve", "/nowhere", "--allowed-local-media-path", __file__], 2, "test_main.py is not a folder"),
        (["serve", "/nowhere", "--batch-store", __file__], 2, "test_main.py is not a folder"),
        (["serve", "/nowhere", "--kv-store", "disk:/x", "--kv-store-secret-file", "/none"], 2, "--kv-store-secret"),
        (["serve", "/nowhere", "--role", "decode", "--transfer-secret-file", "/none"], 2, "--transfer-secret-file"),
        (["complete", "x", "--scheduling-policy", "lifo"], 4, "unknown scheduling policy 'lifo'"),
        (["complete", "x", "--url", "127.0.0.1:9"], 1, "cannot connect to the server"),
        (["install", "--index-url=http://evil"], 2, "--index-url"),
        (["install", "--", "--index-url=http://evil"], 2, "is not a valid distribution name"),
        (["bench", "serve", "--goodput", "speed:3"], 2, "--goodput: expected one of ttft, tpot, e2e"),
        (["bench", "latency", "--json", "/nowhere/x.json"], 2, "--json: cannot write /nowhere/x.json"),
    ],
)
def test_exit_codes_and_one_clear_line(run_cli, arguments, code, words):
    ended = run_cli(*arguments)
    assert ended.returncode == code
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    if ended.stderr.startswith("fdcore: "):
        assert len(ended.stderr.splitlines()) == 1


def test_ctrl_c_during_start_exits_130_without_traceback():
    slow = "import time, fd_core.cli.report as r\nwith r.interrupts_end_it():\n    print(flush=True); time.sleep(30)"
    process = subprocess.Popen(
        [sys.executable, "-c", slow],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "\nfdcore: interrupted\n")


def test_ctrl_c_while_commands_are_assembled_exits_130():
    slow = """
import os, signal, typer.main
from fd_core.cli.main import main

def assembled(app):
    os.kill(os.getpid(), signal.SIGINT)

typer.main.get_command = assembled
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""
    ended = subprocess.run([sys.executable, "-c", slow], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (130, "\nfdcore: interrupted\n")


def test_little_is_imported_before_ctrl_c_is_handled():
    """Before that, Ctrl-C shows a traceback: only modules that Python itself needs may be imported earlier."""
    seen = (
        "import sys, fd_core.cli.main; print(sorted(name for name in sys.modules if 'typer' in name or 'data' in name))"
    )
    ended = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "[]\n"


def test_ctrl_c_in_a_command_exits_130(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("fd_core.cli.env._machine", interrupted)
    assert CliRunner().invoke(app, ["env"]).exit_code == 130


def test_closed_output_pipe_causes_no_traceback():
    ended = subprocess.run(
        f"{sys.executable} -m fd_core.cli serve --help | true", shell=True, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("words", [["models", "list"], ["--version"]])
def test_output_to_a_full_disk_is_a_one_line_error(words):
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "fd_core.cli", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr == "fdcore: cannot write the output: No space left on device\n"


@pytest.mark.parametrize(
    "redirection",
    ["2>/dev/full", pytest.param("2>&-", marks=pytest.mark.soak), "<&- >&- 2>&-", "2>&1 | exec true"],
)
def test_server_runs_although_its_messages_are_lost(redirection):
    port = free_port()
    server = f"{sys.executable} -m fd_core.cli serve null --backend null --port {port}"
    with subprocess.Popen(["/bin/sh", "-c", f"{server} {redirection}"], start_new_session=True) as shell:
        try:
            deadline = time.monotonic() + 60
            while not answers(f"http://127.0.0.1:{port}/health"):
                assert time.monotonic() < deadline and shell.poll() is None
                time.sleep(0.1)
        finally:
            os.killpg(shell.pid, signal.SIGTERM)


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def test_error_is_one_printable_line():
    error = ModelError("bad\nname \x1b[31mred", field="model", hint="try\tagain")
    assert describe(error) == "model: bad name ?[31mred (try again)"


def test_env_and_plugins_list_show_what_is_installed():
    wide = {**os.environ, "COLUMNS": "200"}
    shown = run("env", env=wide).stdout
    assert "Python" in shown
    for name in ("cpu", "reference", "null", "numpy is always there"):
        assert name in shown
    listed = run("plugins", "list", env=wide).stdout
    assert "fcfs" in listed
    assert f"fd-core {fd_core.__version__}" in listed


def test_models_list_needs_no_network(tmp_path):
    listed = run("models", "list", env={**os.environ, "FD_CACHE": str(tmp_path), "COLUMNS": "200"}).stdout
    assert "smollm2" in listed


def test_suggested_flags_exist_and_foreign_flags_do_not():
    commands = typer.main.get_command(app).commands
    here = {name: {word for each in commands[name].params for word in each.opts} for name in ("serve", "route")}
    here["route"].remove("--tokenizer")  # that of the workers; a server uses its model's
    off = {word for each in commands["serve"].params for word in each.secondary_opts}
    for flag, reason in REASONS.items():
        assert flag not in here["serve"] | here["route"]
        assert set(re.findall(r"--[a-z-]+", reason)) <= here["serve"] | here["route"] | off
