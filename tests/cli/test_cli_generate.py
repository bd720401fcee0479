"""`vq generate` and `vq report` on a tiny model: the library's own answers and bytes."""

import contextlib
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import interrupts
import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache
from models import CHUNK, tokens

from vq_adapters import (
    FileArtifactStore,
    H2OOptions,
    KVCacheBuilder,
    KVCacheConfig,
    QuantizerConfigError,
    SqueezeAttentionOptions,
    StreamingLLMOptions,
    SVDqOptions,
    XQuantOptions,
    attention_hook,
    calibrate,
    report,
)
from vq_adapters.cli import main
from vq_adapters.cli.generate import generate as mlx_generate
from vq_adapters.cli.held import held, size
from vq_adapters.documented import METHOD_NAMES

COUNT = 12
PROMPT = " ".join(f"t{token}" for token in tokens(60))
SHORT = ["-m", str(COUNT), "--prefill-step-size", str(CHUNK)]

CASES: dict[str, tuple[list[str], Any]] = {
    "kivi": (["--bits", "4"], KVCacheConfig(method="kivi", bit_width_inlier=4)),
    "turboquant_mse": (["--seed", "7"], KVCacheConfig(method="turboquant_mse", seed=7)),
    "h2o": (
        ["--budget", "16", "--option", "n_sink=2", "--option", "grace=4"],
        KVCacheConfig(method="h2o", options=H2OOptions(h2o_budget=16, h2o_n_sink=2, h2o_grace=4)),
    ),
    "squeeze": (
        ["--budget", "16", "--option", "n_sink=2", "--option", "recent=4"],
        KVCacheConfig(
            method="squeeze", options=SqueezeAttentionOptions(squeeze_budget=16, squeeze_n_sink=2, squeeze_recent=4)
        ),
    ),
    "streaming_llm": (
        ["--budget", "20KB"],
        KVCacheConfig(method="streaming_llm", options=StreamingLLMOptions(stream_window_size="20KB")),
    ),
    "xquant": (
        ["--option", "xquant_residual_length=8"],
        KVCacheConfig(method="xquant", options=XQuantOptions(xquant_residual_length=8)),
    ),
}


def by_library(folder: str, config: KVCacheConfig | None, hooked: bool = True) -> tuple[str, list[Any]]:
    """The answer, and the caches after it."""
    model, tokenizer = mlx_lm.load(folder)
    caches = make_prompt_cache(model) if config is None else KVCacheBuilder.for_model(model, config)
    with attention_hook(model) if hooked else contextlib.nullcontext():
        text = mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=COUNT, prompt_cache=caches, prefill_step_size=CHUNK)
    return text, caches


def by_command(folder: str, method: str, *arguments: str) -> int:
    return main(["generate", "--model", folder, "--method", method, "-p", PROMPT, *SHORT, *arguments])


@pytest.mark.parametrize("method", CASES)
def test_tokens_are_those_of_the_library(method: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, config = CASES[method]
    expected, caches = by_library(folder, config)
    assert by_command(folder, method, *arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == expected + "\n"
    assert f"caches: {size(sum(row.nbytes for row in report(caches)))} held" in captured.err
    assert "prompt: 60 tokens" in captured.err
    assert f"answer: {COUNT} tokens" in captured.err


def test_the_hook_is_there_unless_it_is_refused(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, config = CASES["h2o"]
    answers = []
    for hooked, more in ((True, []), (False, ["--no-hook"])):
        assert by_command(folder, "h2o", *arguments, *more) == 0
        answers.append(capsys.readouterr().out)
        assert answers[-1] == by_library(folder, config, hooked)[0] + "\n"
    assert answers[0] != answers[1]


@pytest.mark.parametrize("name", ["plain", "none"])
def test_plain_caches(name: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert by_command(folder, name, "--report") == 0
    captured = capsys.readouterr()
    assert captured.out == by_library(folder, None, hooked=False)[0] + "\n"
    assert captured.err.count("KVCache") == 2


def test_mlx_lm_quantizes_plain_caches_only(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0"]
    assert by_command(folder, "plain", "--report", *more) == 0
    # Two layers, 72 tokens, two heads of 32, keys and values, 2 bytes.
    assert f"the {size(2 * 72 * 2 * 32 * 2 * 2)} of plain" in (text := capsys.readouterr().err)
    assert text.count("QuantizedKVCache") == 2
    assert by_command(folder, "kivi", *more) == 2
    assert capsys.readouterr().err == "vq: --kv-bits is for --method plain: kivi makes its own caches\n"


@pytest.mark.parametrize("more", [["--max-kv-size", "64"], ["--prompt-cache-file", "x"]])
def test_other_caches_of_mlx_lm_are_refused(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert by_command("no-such/model", "kivi", *more) == 2
    assert capsys.readouterr().err == f"vq: {more[0]} is for --method plain: kivi makes its own caches\n"


def test_a_draft_changes_no_token(folder: str, draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert by_command(folder, "turboquant_mse", "--report") == 0
    alone = capsys.readouterr()
    assert by_command(folder, "turboquant_mse", "--report", "--draft-model", draft) == 0
    drafted = capsys.readouterr()
    assert drafted.out == alone.out
    assert [text.count(" turboquant_mse ") for text in (alone.err, drafted.err)] == [2, 4]


@pytest.mark.parametrize("method", ["h2o", "rocketkv", "knorm"])
def test_a_draft_needs_caches_that_take_back(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert by_command("no-such/model", method, "--draft-model", "no-such/draft") == 2
    text = f"vq: a draft model needs caches that take tokens back, which those of {method} can't\n"
    assert capsys.readouterr().err == text


def test_the_prompt_may_come_from_stdin(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert main(["generate", "--model", folder, "--method", "kivi", "--bits", "4", *SHORT]) == 0
    assert capsys.readouterr().out == by_library(folder, CASES["kivi"][1])[0] + "\n"
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert main(["generate", "--model", folder, "--method", "kivi"]) == 2
    assert capsys.readouterr().err == "vq: --prompt is required where stdin is a terminal\n"


def test_progress_is_shown_on_a_terminal(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert by_command(folder, "kivi") == 0
    assert "prompt 16/60" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert by_command(folder, "kivi") == 0
    text = capsys.readouterr().err
    assert all(f"\r\033[Kprompt {done}/60 tokens" in text for done in (0, 16, 32, 48, 59))
    assert "prompt 60/60" not in text


def test_sampling_options_reach_mlx_lm(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    answers = set()
    for seed in ("1", "2", "1"):
        assert by_command(folder, "kivi", "--temp", "5", "--seed", seed) == 0
        answers.add(capsys.readouterr().out)
    assert len(answers) == 2
    assert by_command(folder, "kivi", "--no-such-option") == 2
    assert capsys.readouterr().err == "vq: unrecognized arguments: --no-such-option\n"


def test_text_alone(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert by_command(folder, "kivi", "--bits", "4", "--verbose", "False") == 0
    captured = capsys.readouterr()
    assert captured.out == by_library(folder, CASES["kivi"][1])[0] + "\n"
    assert captured.err == ""


def test_mlx_lm_is_left_as_it_was(folder: str) -> None:
    names = ("load", "generate", "argparse")
    before, argv = [getattr(mlx_generate, name) for name in names], sys.argv
    assert by_command(folder, "kivi") == 0
    assert by_command(folder, "kivi", "--max-tokens", "0") == 1
    assert [getattr(mlx_generate, name) for name in names] == before
    assert sys.argv is argv


def test_errors_after_loading_are_one_line(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert by_command(folder, "h2o", "--budget", "100B") == 1
    text = capsys.readouterr().err
    with pytest.raises(QuantizerConfigError) as error:
        by_library(folder, KVCacheConfig(method="h2o", options=H2OOptions(h2o_budget="100B")))
    assert text == f"vq: {error.value}\n"
    assert by_command(folder, "kivi", "--option", "capacity=20") == 1
    assert capsys.readouterr().err.count("\n") == 1


def reported(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["report", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("method", CASES)
def test_a_report_counts_what_is_held(method: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, config = CASES[method]
    found = reported(capsys, "--model", folder, "--method", method, "--tokens", "100", *arguments)
    model, _ = mlx_lm.load(folder)
    caches = KVCacheBuilder.for_model(model, config)
    with attention_hook(model):
        for step in (99, 1):
            mx.eval(model(mx.zeros((1, step), mx.int32), cache=caches))
    assert [layer["nbytes"] for layer in found["layers"]] == [row.nbytes for row in report(caches)]
    assert [layer["used"] for layer in found["layers"]] == [row.used for row in report(caches)]
    assert [layer["tokens"] for layer in found["layers"]] == [100, 100]
    assert [layer["plain_nbytes"] for layer in found["layers"]] == [100 * 2 * (32 + 32) * 2] * 2
    assert (found["nbytes"], found["plain_nbytes"]) == tuple(
        sum(layer[name] for layer in found["layers"]) for name in ("nbytes", "plain_nbytes")
    )


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_every_method_serves_a_model(method: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--option", "val_d_eff=16"] if method == "spectral" else []
    found = reported(capsys, "--model", folder, "--method", method, "--tokens", "200", *more)
    assert [(layer["used"], layer["reason"], layer["tokens"]) for layer in found["layers"]] == [(method, "", 200)] * 2
    assert found["nbytes"] > 0


def test_calibrations_come_from_a_store(
    folder: str, draft: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--option", "n_fit=64", "--store", str(tmp_path)]
    assert by_command(folder, "svdq", *arguments) == 1
    assert capsys.readouterr().err.startswith("vq: svdq: `store` must hold what `calibrate` found for this model")
    model, _ = mlx_lm.load(folder)
    store = FileArtifactStore(tmp_path)
    calibrate(model, None, [tokens(90, seed) for seed in range(2)], method="svdq", store=store)
    config = KVCacheConfig(method="svdq", store=store, options=SVDqOptions(svdq_n_fit=64))
    for more in ([], ["--draft-model", draft]):
        assert by_command(folder, "svdq", *arguments, *more) == 0
        assert capsys.readouterr().out == by_library(folder, config)[0] + "\n"


def test_a_report_says_why_layers_are_left_alone(mixed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--model", mixed, "--method", "kivi", "--tokens", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:4]] == ["RotatingKVCache", "RotatingKVCache", "kivi"]
    assert lines[1].endswith("bounded by the model's own window")
    assert "of plain 16-bit keys and values" in lines[4]


def test_a_report_of_plain_caches(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = reported(capsys, "--model", folder, "--method", "plain", "--tokens", "300")
    assert [layer["plain_nbytes"] for layer in found["layers"]] == [300 * 2 * 64 * 2] * 2
    model, _ = mlx_lm.load(folder)
    caches = make_prompt_cache(model)
    assert [one.plain for one in held(caches)] == [0, 0]


def started(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vq_adapters.cli", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": interrupts.heeded}
    return subprocess.Popen(command, text=True, **pipes, **options)


def test_an_interrupt_ends_quietly(folder: str) -> None:
    process = started("generate", "--model", folder, "--method", "kivi", "-p", PROMPT, "-m", "-1")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1) == "t"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")


def test_a_reader_that_leaves_is_no_error(folder: str) -> None:
    process = started("generate", "--model", folder, "--method", "kivi", "-p", PROMPT, "-m", "-1")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1) == "t"
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == ""
    process.stderr.close()
