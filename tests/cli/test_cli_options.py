"""From arguments to a configuration: names, types, short forms, and what is refused."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from vq_adapters.artifacts import FileArtifactStore
from vq_adapters.cli.commands import _parser, main
from vq_adapters.cli.generate import generate as mlx_generate
from vq_adapters.cli.parsing import UsageError
from vq_adapters.cli.settings import ELSEWHERE, configuration, field_named, parse
from vq_adapters.config import KVCacheConfig
from vq_adapters.documented import DEFAULTS, METHOD_NAMES, fields_of
from vq_adapters.names import name_of
from vq_adapters.options import OPTIONS
from vq_functional.methods import METHODS


def configured(method: str, *arguments: str) -> KVCacheConfig:
    args = _parser().parse_args(["report", "--model", "m", "--method", method, *arguments])
    config = configuration(args)
    assert isinstance(config, KVCacheConfig)
    return config


def written(value: Any) -> str:
    """A value as one writes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()


def owner(field: str) -> str:
    """A method that has the field, where one does."""
    return next((name for name in METHOD_NAMES if field in fields_of(name)), "kivi")


def test_there_is_a_field_for_each_documented_parameter() -> None:
    assert len(DEFAULTS) == 225
    assert set(ELSEWHERE) == {"method", "options", "observers"}


@pytest.mark.parametrize("field", sorted(set(DEFAULTS) - set(ELSEWHERE)))
def test_every_field_goes_by_its_name_and_type(field: str) -> None:
    """A default that is written out comes back as it was."""
    default, method = DEFAULTS[field], owner(field)
    value = getattr(configured(method, "--option", f"{field}={written(default)}"), field)
    assert (type(value), value) == (type(default), default)


@pytest.mark.parametrize("field", sorted(ELSEWHERE))
def test_what_no_text_can_fill_is_refused_by_name(field: str) -> None:
    with pytest.raises(UsageError, match=f"--option {field}: `{field}` "):
        configured("kivi", "--option", f"{field}=x")


@pytest.mark.parametrize(
    ("method", "option", "field", "value"),
    [
        ("h2o", "h2o_budget=64", "h2o_budget", 64),
        ("h2o", "h2o_budget=0.25", "h2o_budget", 0.25),
        ("h2o", "h2o_budget=48MB", "h2o_budget", "48MB"),
        ("h2o", "h2o_budget=64, 0.5", "h2o_budget", [64, 0.5]),
        ("h2o", "h2o_decay=0.5", "h2o_decay", 0.5),
        ("svdq", "svdq_bit_schedule=4,3,2,1", "svdq_bit_schedule", (4, 3, 2, 1)),
        ("svdq", "svdq_bit_schedule=[4, 3, 2, 1]", "svdq_bit_schedule", (4, 3, 2, 1)),
        ("svdq", "svdq_rank=48", "svdq_rank", 48),
        ("gear", "gear_quantize_values=False", "gear_quantize_values", False),
        ("chunkkv", "chunkkv_score=key_norm", "chunkkv_score", "key_norm"),
        ("spectral", "spectral_model_name=7", "spectral_model_name", "7"),
        ("kivi", "bit_width_inlier=4,2", "bit_width_inlier", [4, 2]),
        ("kivi", "residual_length=64", "residual_length", 64),
        ("kivi", "capacity=4096", "capacity", 4096),
        ("kivi", "capacity=none", "capacity", None),
        ("turboquant_mse", "sliding_window=64", "sliding_window", 64),
        ("snapkv", "dtype=float16", "dtype", mx.float16),
        ("a2ats", 'a2ats_rope_scaling={"rope_type": "default"}', "a2ats_rope_scaling", {"rope_type": "default"}),
    ],
)
def test_values_are_typed(method: str, option: str, field: str, value: Any) -> None:
    found = getattr(configured(method, "--option", option), field)
    assert (type(found), found) == (type(value), value)


def test_options_that_are_not_documented_fields() -> None:
    config = configured("kivi", "--bits", "2", "--option", "bits_v=4", "--option", "kivi_bits_k=3")
    assert (config.options.kivi_bits_v, config.options.kivi_bits_k) == (4, 3)
    config = configured("h2o", "--option", "protect=[[3, 9], [20, 22]]")
    assert config.options.h2o_protect == ((3, 9), (20, 22))


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_names_of_options(method: str) -> None:
    """Every field means itself, and every option of the method that is no field means the method's."""
    fields = [field.name for field in dataclasses.fields(OPTIONS[method])]
    assert all(field_named(field, method) == field for field in (*DEFAULTS, *fields))
    options = [field.name for field in attrs.fields(METHODS[method].options)]
    short = {option: field_named(option, method) for option in options if option not in DEFAULTS}
    assert short == {option: name_of(method, option) for option in short}


def test_arrays_come_from_files(tmp_path: Path) -> None:
    factors = np.linspace(1, 2, 64, dtype=np.float32)
    np.save(tmp_path / "factors.npy", factors)
    config = configured("vecinfer", "--option", f"smooth_factors=@{tmp_path}/factors.npy")
    assert mx.array_equal(config.smooth_factors, mx.array(factors))
    mx.save_safetensors(str(tmp_path / "one.safetensors"), {"x": mx.array(factors)})
    assert mx.array_equal(parse(f"@{tmp_path}/one.safetensors"), mx.array(factors))
    mx.save_safetensors(str(tmp_path / "two.safetensors"), {"x": mx.ones(2), "y": mx.ones(2)})
    with pytest.raises(UsageError, match="must hold one array; it holds 2"):
        parse(f"@{tmp_path}/two.safetensors")
    with pytest.raises(UsageError, match="must be a file with an array"):
        parse(f"@{tmp_path}/none.npy")


@pytest.mark.parametrize(
    ("method", "arguments", "field", "value"),
    [
        ("kivi", ["--bits", "4"], "bit_width_inlier", 4),
        ("kivi", ["--bits", "4,3"], "bit_width_inlier", [4, 3]),
        ("kvquant", ["--bits", "4"], "kvquant_bits", 4),
        ("h2o", ["--budget", "256"], "h2o_budget", 256),
        ("snapkv", ["--budget", "0.25"], "snap_budget", 0.25),
        ("streaming_llm", ["--budget", "48MB"], "stream_window_size", "48MB"),
        ("turboquant_mse", ["--seed", "7"], "seed", 7),
        ("keyformer", ["--seed", "7"], "keyformer_seed", 7),
        ("snapkv", ["--dtype", "bfloat16"], "dtype", mx.bfloat16),
    ],
)
def test_arguments_with_names_of_their_own(method: str, arguments: list[str], field: str, value: Any) -> None:
    assert getattr(configured(method, *arguments), field) == value


def test_a_store_is_a_folder(tmp_path: Path) -> None:
    for arguments in (["--store", str(tmp_path)], ["--option", f"store={tmp_path}"]):
        store = configured("svdq", *arguments).store
        assert isinstance(store, FileArtifactStore) and store.folder == tmp_path


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--method", "kivy"], "no method 'kivy'; did you mean kivi or kitty?; `vq methods` lists them all"),
        (["--method", "qqq"], "no method 'qqq'; `vq methods` lists them all"),
        (
            ["--method", "h2o", "--option", "h2o_budgte=3"],
            "no option 'h2o_budgte'; did you mean h2o_budget",
        ),
        (["--method", "h2o", "--option", "budgt=3"], "no option 'budgt'; did you mean budget"),
        (["--method", "h2o", "--option", "budget"], "--option must be NAME=VALUE; got 'budget'"),
        (["--method", "h2o", "--budget", "64", "--option", "budget=3"], "`h2o_budget` is given twice"),
        (["--method", "kivi", "--budget", "64"], "--budget has no effect on kivi; `vq methods --method kivi` lists"),
        (["--method", "h2o", "--bits", "4"], "--bits has no effect on h2o; `vq methods --method h2o` lists"),
        (["--method", "svdq", "--dtype", "int8"], "--dtype must be one of float16, bfloat16, float32; got 'int8'"),
        (["--method", "svdq", "--store", "/no/such"], "--store must be a folder; got '/no/such'"),
        (["--method", "h2o", "--budget", "10"], "h2o: `budget` must exceed the 20 rows of"),
        (
            ["--method", "h2o", "--budget", "much"],
            "h2o: `h2o_budget` must be rows, a share of the prompt, or bytes such as '48MB'; got 'much'",
        ),
        (["--method", "kivi", "--bits", "9"], "kivi: `bit_width_inlier` must be an integer in [1, 8]; got 9"),
        (["--method", "kivi", "--bits", "four"], "kivi: `bit_width_inlier` must be an integer in [1, 8]; got 'four'"),
        (["--method", "qjl", "--seed", "-1"], "qjl: `seed` must be an integer in [0, 4294967295]; got -1"),
        (["--method", "qjl", "--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--method", "kivi", "--option", "store=."], "kivi: `store` has no effect"),
        (["--method", "plain", "--bits", "4"], "--bits has no effect on --method plain"),
        (["--method", "none", "--option", "a=1"], "--option has no effect on --method none"),
        (["--method", "kivi", "--tokens", "0"], "argument --tokens: must be at least 1; got 0"),
        (["--method", "kivi", "--toknes", "9"], "unrecognized arguments: --toknes 9"),
        ([], "the following arguments are required: --method"),
    ],
)
def test_wrong_use_is_one_line_before_a_model_is_loaded(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--model", "no-such/model", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"vq: {text}")
    assert captured.err.count("\n") == 1


def test_debug_shows_where_an_error_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--model", "no-such/model", "--method", "h2o", "--budget", "10", "--debug"]) == 2
    assert "Traceback" in (text := capsys.readouterr().err)
    assert text.splitlines()[-1].startswith("vq: h2o: `budget` must exceed")


def test_a_missing_model_folder_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--model", "/no/such/model", "--method", "kivi"]) == 2
    assert capsys.readouterr().err == "vq: argument --model: no folder '/no/such/model'\n"


def test_warnings_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configured("svdq", "--option", "bit_width_inlier=3")
    assert capsys.readouterr().err == "vq: warning: KVCacheConfig: `bit_width_inlier` has no effect on svdq\n"


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["generat"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("command", ["methods", "report", "generate", "serve"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: vq {command}")
    theirs = {"generate": "--xtc-probability", "serve": "--decode-concurrency"}
    assert command not in theirs or theirs[command] in text


def test_the_commands_of_the_documentation_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model", "draft", "calibrations"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text().replace("\\\n", " ")
    lines = [line for fence in page.split("```sh\n")[1:] for line in fence.split("```")[0].splitlines()]
    commands = [shlex.split(line.split("|")[-1], comments=True) for line in lines if "vq " in line]
    assert len(commands) > 8
    for _, *arguments in commands:
        args, rest = _parser().parse_known_args(arguments)
        if args.command != "methods":
            assert configuration(args) is not None
        if args.command == "generate":
            mlx_generate.setup_arg_parser().parse_args(rest)
        assert not rest or args.command in ("generate", "serve")


def test_the_json_of_a_page_is_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--method", "svdq", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["svdq_bit_schedule"] == [8, 4, 2, 1, 1, 0, 0, 0]
