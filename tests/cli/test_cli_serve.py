"""`vq serve`: mlx_lm's server in a process of its own, asked over HTTP; and what ends it before it serves."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import interrupts
import pytest
from mlx_lm import server
from models import tokens

from vq_adapters.cli import main

COUNT = 8
PROMPTS = [" ".join(f"t{token}" for token in tokens(5 + 9 * i, i)) for i in range(8)]
METHODS = {
    "plain": [],
    "kivi": ["--bits", "4"],
    "turboquant_mse": [],
    "h2o": ["--budget", "16", "--option", "n_sink=2", "--option", "grace=4"],
    "xquant": ["--option", "xquant_residual_length=8"],
}
# The generating thread ends by SystemExit, which pytest takes for an error.
ENDED_THREAD = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
Ask = Callable[..., str]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Ask]:
    """The command in a process; the block gets a function that asks it. It ends by an interrupt, quietly."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "vq_adapters.cli", "serve", "--port", str(port), *arguments]
    command += ["--log-level", "CRITICAL"]
    process = subprocess.Popen(command, text=True, stderr=subprocess.PIPE, preexec_fn=interrupts.heeded)
    assert process.stderr is not None
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield lambda prompt, **more: ask(port, prompt, **more)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        lines = process.stderr.read().splitlines()
        told = ("127.0.0.1 - - ", "vq: warning: a request of more than ")
        assert [line for line in lines if not line.startswith(told)] == []
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def wait_for(url: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.05)
    raise AssertionError(f"the server didn't start: {process.returncode}")


def ask(port: int, prompt: str, **more: Any) -> str:
    body = json.dumps({"prompt": prompt, "max_tokens": COUNT, "temperature": 0, **more}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]["text"]


def one_by_one(folder: str, method: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Answers of `vq generate`."""
    answers = []
    for prompt in PROMPTS:
        arguments = ["--model", folder, "--method", method, "-p", prompt, "-m", str(COUNT), *METHODS[method]]
        assert main(["generate", *arguments]) == 0
        answers.append(capsys.readouterr().out.strip())
    return answers


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that is no warning of mlx_lm's about its server."""
    (line,) = (line for line in capsys.readouterr().err.splitlines() if not line.startswith("vq: warning: mlx_lm"))
    return line


@pytest.mark.parametrize("method", ["plain", "kivi", "h2o", "xquant"])
def test_eight_at_once_get_the_answers_of_one_by_one(
    method: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = one_by_one(folder, method, capsys)
    with serving("--model", folder, "--method", method, *METHODS[method]) as client, ThreadPoolExecutor(8) as pool:
        assert [text.strip() for text in pool.map(client, PROMPTS)] == expected
    assert len(set(expected)) > 4


def test_a_draft_and_a_model_that_a_request_names(folder: str, draft: str, capsys: pytest.CaptureFixture[str]) -> None:

    expected, other = (one_by_one(path, "turboquant_mse", capsys) for path in (folder, draft))
    with serving("--model", folder, "--method", "turboquant_mse", "--draft-model", draft) as client:
        assert client(PROMPTS[3]).strip() == expected[3]
        assert client(PROMPTS[3], model=draft).strip() == other[3]


def test_a_method_that_evicts_refuses_the_draft_of_a_request(folder: str, draft: str) -> None:
    with serving("--model", folder, "--method", "h2o", *METHODS["h2o"]) as client:
        with pytest.raises(urllib.error.HTTPError) as error:
            client(PROMPTS[3], draft_model=draft)
        assert "a draft model needs caches that take tokens back" in error.value.read().decode()
        assert len(client(PROMPTS[3]).split()) == COUNT


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--draft-model", "no-such/draft"],
            "a draft model needs caches that take tokens back, which those of h2o can't",
        ),
        (["--kv-bits", "4"], "--kv-bits is for --method plain: h2o makes its own caches"),
        (["--prot", "1"], "unrecognized arguments: --prot 1"),
        (["--port", "x"], "argument --port: invalid int value: 'x'"),
        (
            ["--option", "capacity=64"],
            "`capacity` would end the server at the first request past it; bound answers by --max-tokens",
        ),
        (
            ["--no-hook", "--budget", "40,50"],
            "--no-hook can't serve batches of h2o: its layers hold different numbers of rows",
        ),
        (
            ["--method", "qfilters", "--option", "on_low_retention=raise"],
            "`qfilters_on_low_retention=raise` would end the server; leave it at warn",
        ),
        (
            ["--method", "pyramidkv", "--no-hook", "--budget", "48MB"],
            "--no-hook can't serve batches of pyramidkv: its layers hold different numbers of rows",
        ),
        (["--budget", "3"], "h2o: `budget` must exceed the 20 rows of `n_sink`, `grace` and `protect`; got 3"),
    ],
)
def test_wrong_use_is_one_line_before_a_model_is_loaded(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", "no-such/model", "--method", "h2o", *arguments]) == 2
    assert capsys.readouterr().err == f"vq: {text}\n"


@ENDED_THREAD
@pytest.mark.parametrize(
    ("method", "more", "most"),
    [("xquant", [], 8192), ("xquant", ["--option", "max_ctx=64"], 64), ("skvq", ["--option", "max_ctx=9"], 9)],
)
def test_a_method_that_ends_at_a_length_tells_of_it(
    method: str, more: list[str], most: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", str(tmp_path), "--method", method, "--port", str(free_port()), *more]) == 1
    told = f"a request of more than {most} tokens would end the server; `{method}_max_ctx` says how many"
    assert f"vq: warning: {told}\n" in capsys.readouterr().err


@ENDED_THREAD
def test_bytes_are_no_reason_to_refuse_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the hook too; the model is what is missing here."""
    arguments = ["--method", "h2o", "--budget", "48MB", "--no-hook", "--port", str(free_port())]
    assert main(["serve", "--model", str(tmp_path), *arguments]) == 1
    assert "config.json" in error_of(capsys)


@ENDED_THREAD
def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = ["--port", str(free_port())]
    assert main(["serve", "--model", str(tmp_path), "--method", "kivi", *port]) == 1
    line = error_of(capsys)
    assert line.startswith("vq: ") and "config.json" in line


@ENDED_THREAD
def test_a_model_without_a_cache_to_replace_ends_the_server(latent: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", latent, "--method", "kivi", "--port", str(free_port())]) == 1
    line = error_of(capsys)
    assert line.startswith("vq: for_model: `model` must have a plain KVCache to replace")


def test_a_port_that_is_taken_ends_the_server(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: getattr(server, name) for name in ("load", "run", "argparse", "_run_http_server")}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--model", folder, "--method", "kivi", "--port", str(taken.getsockname()[1])]) == 1
    assert "in use" in error_of(capsys)
    assert {name: getattr(server, name) for name in before} == before
