"""The measuring code of the examples, on cases that can be worked out by hand."""

import collections
import copy
import csv
import math
import types

import attrs
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, RotatingKVCache

import measuring
import needle
import quickstart
import vq_functional as vq
from benchmarks import decode
from vq_adapters import TransformKVCache, attention_hook

VOCABULARY = 7


def tiny_llama():
    """Two layers, three query heads a KV head, heads of 32."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=96,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        vocab_size=50,
    )
    mx.random.seed(0)
    return llama.Model(args)


class TinyTokenizer:
    """A token a character."""

    def encode(self, text, add_special_tokens):
        return [ord(character) % 50 for character in text]


class Remembering:
    """A cache of token ids."""

    def __init__(self, name):
        self.name, self.calls = name, []

    @property
    def state(self):
        return mx.zeros((1,))

    @property
    def seen(self):
        return [token for call in self.calls for token in call]


class Summing:
    """A model that is sure, by a factor e, that the sum of all tokens comes next; keeps a log of who was fed."""

    def __init__(self):
        self.log = []

    def __call__(self, ids, cache):
        logits = []
        for token in ids[0].tolist():
            cache[0].calls.append([token]) if not logits else cache[0].calls[-1].append(token)
            logits.append([float(i == sum(cache[0].seen) % VOCABULARY) for i in range(VOCABULARY)])
        self.log.append(cache[0].name)
        return mx.array([logits])


# Scores


def test_divergence_of_two_known_distributions():
    base = mx.log(mx.array([[0.5, 0.5]]))
    other = mx.log(mx.array([[0.25, 0.75]]))
    assert measuring.divergence(base, other) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-6)
    assert measuring.divergence(other, base) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-6)


def test_divergence_is_the_mean_over_rows():
    base = mx.log(mx.array([[0.5, 0.5], [0.5, 0.5]]))
    other = mx.log(mx.array([[0.5, 0.5], [0.25, 0.75]]))
    assert measuring.divergence(base, other) == pytest.approx(0.5 * 0.143841, abs=1e-6)


def test_divergence_counts_nothing_where_the_base_is_zero():
    base = mx.array([[0.0, -mx.inf]])
    assert measuring.divergence(base, mx.log(mx.array([[0.25, 0.75]]))) == pytest.approx(math.log(4), abs=1e-6)
    assert measuring.divergence(base, base) == 0.0


def test_divergence_is_infinite_where_only_the_method_is_zero():
    assert measuring.divergence(mx.log(mx.array([[0.5, 0.5]])), mx.array([[0.0, -mx.inf]])) == math.inf


def test_agreement_counts_rows_with_the_same_likeliest_token():
    base = mx.array([[3.0, 1, 0], [0, 5, 1], [0, 1, 2], [9, 0, 0]])
    other = mx.array([[1.0, 0, 0], [2, 1, 0], [0, 1, 7], [1, 2, 0]])
    assert measuring.agreement(base, other) == 0.5


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_log_softmax_neither_overflows_nor_stays_in_half_precision(dtype):
    out = measuring.log_softmax(mx.array([100.0, 100.0, 0.0], dtype))
    assert out.dtype == mx.float32
    assert out.tolist() == pytest.approx([-math.log(2), -math.log(2), -100 - math.log(2)], abs=1e-5)


# Teacher forcing


def test_rows_follow_the_tokens_that_were_fed():
    cache = Remembering("a")
    (run,) = measuring.teacher_forced(Summing(), [1, 2, 3, 4, 6], 3, [cache])
    assert cache.calls == [[1, 2, 3], [4], [6]]
    assert run.log_probs.argmax(axis=-1).tolist() == [10 % VOCABULARY, 16 % VOCABULARY]
    assert run.log_probs.shape == (2, VOCABULARY)
    total = math.log(math.e + VOCABULARY - 1)
    assert run.log_probs[0].tolist() == pytest.approx([1 - total if i == 3 else -total for i in range(7)], abs=1e-6)


@pytest.mark.parametrize(
    "chunk, calls", [(None, [[1, 2, 3, 4, 5]]), (2, [[1, 2], [3, 4], [5]]), (5, [[1, 2, 3, 4, 5]])]
)
def test_the_prompt_comes_in_chunks(chunk, calls):
    cache = Remembering("a")
    measuring.teacher_forced(Summing(), [1, 2, 3, 4, 5, 6], 5, [cache], chunk=chunk)
    assert cache.calls == [*calls, [6]]


def test_lists_take_turns_in_an_order_that_flips():
    model = Summing()
    runs = measuring.teacher_forced(model, [1, 1, 1, 1], 1, [Remembering("a")], [Remembering("b")])
    assert "".join(model.log) == "ab" + "ab" + "ba" + "ab"
    assert [run.caches[0].name for run in runs] == ["a", "b"]
    assert [len(run.step_seconds) for run in runs] == [3, 3]
    assert mx.array_equal(runs[0].log_probs, runs[1].log_probs)


def test_median_and_mean_of_the_steps():
    run = measuring.Run([], 1.0, [1.0, 2.0, 9.0])
    assert (run.step_median, run.step_mean) == (2.0, 4.0)


def test_chunks_change_nothing_for_plain_caches():
    model, tokens = tiny_llama(), list(range(20))
    whole, chunks = (
        measuring.teacher_forced(model, tokens, 16, [KVCache() for _ in model.layers], chunk=chunk)[0]
        for chunk in (None, 5)
    )
    assert mx.allclose(whole.log_probs, chunks.log_probs, atol=1e-5)
    # The same by one call without a cache.
    direct = measuring.log_softmax(model(mx.array(tokens)[None])[0, 16:])
    assert mx.allclose(whole.log_probs, direct, atol=1e-5)


def test_progress_names_prompts_and_steps():
    said = []
    measuring.teacher_forced(Summing(), [1] * 35, 1, [Remembering("a")], [Remembering("b")], say=said.append)
    assert said == ["prompt 1 of 2", "prompt 2 of 2", "step 1 of 34", "step 33 of 34"]


# Bytes


class Slotted:
    __slots__ = ("__private", "public", "unset")

    def __init__(self, private, public):
        self.__private, self.public = private, public


class SlottedChild(Slotted):
    __slots__ = ("own",)


@attrs.frozen
class Frozen:
    rows: tuple
    name: str = "frozen"


def row(n):
    return mx.zeros((n,), mx.uint8)


def holder(**attributes):
    return types.SimpleNamespace(**attributes)


def test_arrays_are_found_in_attributes_slots_and_containers():
    child = SlottedChild(row(1), row(2))
    child.own = row(4)
    kept = {"one": [row(8), (row(16), {"two": row(32)})], "three": collections.deque([row(64)])}
    root = holder(child=child, kept=kept, frozen=Frozen(({"x": row(128)},)), nothing=None, number=3, text="abc")
    assert sum(array.nbytes for array in measuring.arrays_held(root)) == 255


def test_an_array_counts_once_and_cycles_end():
    shared = row(10)
    first, second = holder(x=shared), holder(x=shared, y=[shared])
    first.other, second.other = second, first
    assert [id(array) for array in measuring.arrays_held([first, second])] == [id(shared)]


def test_equal_arrays_are_different_arrays():
    assert len(measuring.arrays_held([row(1), row(1)])) == 2


def test_weights_classes_and_functions_are_left_out():
    weights = row(1)

    class Owner:
        table = row(2)

        def method(self, default=weights):
            return default

    owner = Owner()
    owner.model, owner.kind, owner.call = nn.Linear(2, 2), Owner, owner.method
    assert measuring.arrays_held(owner) == []


def test_resident_bytes_count_spare_rows_and_plain_bytes_do_not():
    caches = [KVCache(), KVCache()]
    for cache in caches:
        cache.update_and_fetch(mx.zeros((2, 3, 5, 8), mx.float16), mx.zeros((2, 3, 5, 4), mx.float16))
    row_bytes = 2 * (2 * 3 * 8 + 2 * 3 * 4)
    assert measuring.plain_bytes(caches) == 2 * 5 * row_bytes
    assert measuring.resident_bytes(caches) == 2 * KVCache.step * row_bytes


def test_plain_bytes_are_of_16_bits_whatever_the_dtype():
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 5, 8)), mx.zeros((1, 1, 5, 8)))
    assert measuring.plain_bytes([cache]) == 5 * 2 * 2 * 8


def test_plain_bytes_of_a_rotating_cache_stop_at_its_window():
    cache = RotatingKVCache(max_size=4)
    for _ in range(9):
        cache.update_and_fetch(mx.zeros((1, 1, 1, 8), mx.float16), mx.zeros((1, 1, 1, 8), mx.float16))
    assert measuring.plain_bytes([cache]) == 4 * 2 * 2 * 8


@pytest.mark.parametrize(
    "transform",
    [vq.kivi(bits=4, residual_length=32), vq.turboquant_rvq(), vq.streaming_llm(n_sink=2, window_size=8)],
    ids=lambda transform: transform.name,
)
def test_resident_bytes_of_our_caches_are_their_states(transform):
    cache = TransformKVCache(transform)
    x = mx.random.normal((1, 2, 40, 32)).astype(mx.float16)
    cache.update_and_fetch(x, x)
    assert cache.nbytes > 0  # settles what the call left open
    assert measuring.resident_bytes([cache]) == cache.nbytes


# Sixteen bits on the way in


class Noting:
    """Notes the dtypes that come in, and returns always the same pair."""

    __slots__ = ("answer", "dtypes")

    def __init__(self):
        self.answer, self.dtypes = (row(1), row(2)), []

    def update_and_fetch(self, keys, values):
        self.dtypes.append((keys.dtype, values.dtype))
        return self.answer


@pytest.mark.parametrize("came, held", [(mx.float32, mx.float16), (mx.float16, mx.float16), (mx.bfloat16, mx.bfloat16)])
def test_only_float32_is_rounded_and_the_answer_is_the_cache_s(came, held):
    (cache,) = measuring.float16_rows([Noting()])
    x = mx.zeros((1, 1, 1, 4), came)
    assert cache.update_and_fetch(x, x) is cache.answer
    assert cache.dtypes == [(held, held)]
    assert isinstance(cache, Noting) and type(cache).__name__ == "Noting"


def test_rounding_is_of_one_object_and_survives_a_copy():
    rounded, plain = measuring.float16_rows([KVCache()])[0], KVCache()
    x = mx.full((1, 1, 1, 4), 1.0001)
    for cache in (copy.deepcopy(rounded), rounded):
        keys, values = cache.update_and_fetch(x, x)
        assert keys.dtype == values.dtype == mx.float16
    assert plain.update_and_fetch(x, x)[0].dtype == mx.float32


def test_the_hook_finds_a_cache_that_rounds():
    model, attended = tiny_llama(), []

    class Telling(TransformKVCache):
        def attend(self, *arguments, **named):
            attended.append(self)
            return super().attend(*arguments, **named)

    caches = measuring.float16_rows(Telling(vq.kivi(bits=8, residual_length=32)) for _ in model.layers)
    with attention_hook(model):
        measuring.teacher_forced(model, list(range(10)), 8, caches)
    assert attended == caches * 3  # the prompt and two steps
    assert caches[0].keys_and_values()[0].dtype == mx.float16


# The machine and the model


@pytest.mark.parametrize(
    "cpu, fast, platform, words",
    [
        (True, False, "linux", "CPU with the reference BLAS"),
        (True, True, "linux", "CPU with OpenBLAS"),
        (True, True, "darwin", "CPU with Accelerate"),
        (False, False, "linux", "on the GPU"),
    ],
)
def test_machine_says_which_blas(monkeypatch, cpu, fast, platform, words):
    monkeypatch.setattr(measuring, "on_cpu", lambda: cpu)
    monkeypatch.setattr(measuring, "use_openblas", lambda: fast)
    monkeypatch.setattr(measuring.sys, "platform", platform)
    assert measuring.machine().endswith(words)
    assert measuring.slow_blas() == (cpu and not fast)


@pytest.mark.parametrize("cpu, dtype", [(True, mx.float32), (False, mx.float16)])
def test_smollm2_runs_in_float32_on_a_cpu(monkeypatch, cpu, dtype):
    monkeypatch.setattr(measuring, "on_cpu", lambda: cpu)
    monkeypatch.setattr(measuring, "load_smollm2", lambda dtype: ("SmolLM2", dtype))
    assert measuring.load_model("smollm2") == ("SmolLM2", dtype)


def test_other_names_go_to_mlx_lm(monkeypatch):
    monkeypatch.setattr(measuring.mlx_lm, "load", lambda name: (name, "tokenizer"))
    assert measuring.load_model("some/model") == ("some/model", "tokenizer")


def test_a_table_is_markdown():
    assert measuring.table_head(["a", "b"]) == "| a | b |\n| --- | --- |"
    assert measuring.table_line([1, "x"]) == "| 1 | x |"


# The benchmark over a tiny model


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(decode, "load_model", lambda name: (tiny_llama(), TinyTokenizer()))


def table_rows(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_entries_have_names_of_their_own_and_every_code_runs_both_ways():
    entries = decode.entries()
    labels = [entry.label for entry in entries]
    assert len(set(labels)) == len(labels)
    for entry in entries:
        cache = entry.cache(0) if callable(entry.cache) else None  # a configuration is for a whole model
        if isinstance(cache, TransformKVCache) and cache.transform.coded and not cache.transform.evicts:
            assert {entry.name, f"{entry.name}, hook"} <= set(labels)


def test_rotations_differ_from_layer_to_layer_and_between_keys_and_values():
    entry = next(entry for entry in decode.entries() if entry.name == "rows of 4-bit codes")
    seeds = [codec.seed for layer in range(3) for codec in _codecs(entry.cache(layer).transform)]
    assert len(set(seeds)) == 6


def _codecs(store):
    return store.key, store.value


def test_decode_prints_and_writes_what_it_measured(tiny, tmp_path, capsys):
    path = tmp_path / "out.csv"
    options = ["--prompt", "12", "--steps", "3", "--repeats", "2", "--methods", "^plain|kivi 4", "--csv", str(path)]
    decode.main(options)
    out, progress = capsys.readouterr()
    assert "CPU" in out.splitlines()[0] or "GPU" in out.splitlines()[0]
    assert [(cells[0], cells[1]) for cells in table_rows(out)] == [
        ("plain fp16", "no"),
        ("kivi 4 bits, 32 exact", "no"),
        ("kivi 4 bits, 32 exact", "yes"),
    ]
    assert "kivi 4 bits, 32 exact, hook, repeat 2 of 2, step 1 of 3" in progress
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["plain fp16", "kivi 4 bits, 32 exact", "kivi 4 bits, 32 exact"]
    plain = rows[0]
    assert (float(plain["kl_nats"]), float(plain["top1"])) == (0.0, 1.0)
    assert float(plain["bytes_ratio"]) == pytest.approx(KVCache.step / 15)
    assert {(row["prompt"], row["steps"], row["repeats"]) for row in rows} == {("12", "3", "2")}
    for row in rows:
        low, middle, high = (float(row[name]) for name in ("decode_ratio_low", "decode_ratio", "decode_ratio_high"))
        assert 0 < low <= middle <= high
        assert int(row["bytes"]) == pytest.approx(float(row["bytes_ratio"]) * 15 * 2 * 2 * 32 * 2 * 2)


def test_a_method_that_errs_shows_in_the_scores(tiny, capsys):
    decode.main(["--prompt", "12", "--steps", "3", "--repeats", "1", "--methods", "4-bit codes$"])
    ((name, hook, divergence, *_),) = table_rows(capsys.readouterr().out)
    assert (name, hook) == ("rows of 4-bit codes", "no")
    assert float(divergence) > 0


def test_decode_refuses_an_expression_that_matches_nothing(tiny):
    with pytest.raises(SystemExit, match="no row matches 'nothing'; there are: plain fp16; "):
        decode.main(["--methods", "nothing"])


@pytest.mark.parametrize("label, attends", [("kivi 4 bits, 32 exact", False), ("kivi 4 bits, 32 exact, hook", True)])
def test_only_rows_with_the_hook_attend_in_the_cache(monkeypatch, label, attends):
    model, attended = tiny_llama(), []
    attend = TransformKVCache.attend
    monkeypatch.setattr(TransformKVCache, "attend", lambda self, *rest: attended.append(self) or attend(self, *rest))
    entry = next(entry for entry in decode.entries() if entry.label == label)
    decode.measure(model, list(range(10)), 8, entry, 1, measuring.silent)
    assert len(attended) == (3 * len(model.layers) if attends else 0)
    assert type(model.layers[0].self_attn) is llama.Attention  # as it was


def test_peaks_are_one_a_window_and_a_fixed_cache_does_not_grow(monkeypatch):
    monkeypatch.setattr(decode, "PEAK_STEPS", 8)
    entry = decode.Entry("window", lambda layer: TransformKVCache(vq.streaming_llm(n_sink=2, window_size=6)))
    found, grown = decode.peaks(tiny_llama(), list(range(20)), 12, entry)
    assert len(found) == decode.PEAK_WINDOWS and min(found) > 0
    assert grown == 0


# Plain rows of 8 tokens in two layers of two heads of 32, keys and values of 16 bits: 4096 bytes.
@pytest.mark.parametrize("rise, grown, flat", [(4096, 0, "yes"), (4097, 0, "NO"), (5096, 1000, "yes"), (-5, 0, "yes")])
def test_flat_is_no_more_than_the_caches_and_plain_rows(tiny, monkeypatch, capsys, rise, grown, flat):
    monkeypatch.setattr(decode, "PEAK_STEPS", 8)
    monkeypatch.setattr(decode, "peaks", lambda *given: ([10**6, 10**9, 10**6, 10**6 + rise], grown))
    decode.main(["--peak", "--prompt", "12", "--methods", "streaming"])
    ((name, hook, *_, verdict),) = table_rows(capsys.readouterr().out)
    assert (name, hook, verdict) == ("streaming_llm 4+124", "no", flat)


# The command lines


@pytest.mark.parametrize(
    ("main", "option", "text"),
    [(quickstart.main, "--prompt", "-5"), (decode.main, "--repeats", "0"), (needle.main, "--jobs", "1.5")],
)
def test_a_number_is_1_or_more(main, option, text, capsys):
    with pytest.raises(SystemExit):
        main([f"{option}={text}"])
    assert f"{option}: must be a whole number above 0; got '{text}'" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("not a name"), FileNotFoundError("no config.json")])
def test_a_model_that_is_not_there_is_named_in_one_line(error, monkeypatch):
    def load(name):
        raise error

    monkeypatch.setattr(measuring.mlx_lm, "load", load)
    with pytest.raises(SystemExit, match=rf"^no model './nope': {error}$"):
        measuring.load_model("./nope")


# The quickstart


def test_the_first_words_fit_a_table():
    assert quickstart.first_words(" one\n two | three ") == "one two / three"
    assert quickstart.first_words("word " * 30, width=12) == "word word ..."


def test_without_a_fast_blas_the_prompt_is_short_and_the_hint_is_given(monkeypatch, capsys):
    seen = {}
    monkeypatch.setattr(quickstart, "load_model", lambda name: (tiny_llama(), TinyTokenizer()))
    monkeypatch.setattr(quickstart, "slow_blas", lambda: True)
    monkeypatch.setattr(
        quickstart, "compare", lambda model, tokenizer, tokens, prompt, *_: seen.update(all=len(tokens), prompt=prompt)
    )
    quickstart.main([])
    assert seen == {"all": quickstart.SHORT_PROMPT + quickstart.SHORT_STEPS, "prompt": quickstart.SHORT_PROMPT}
    assert "apt-get install libopenblas0-pthread" in capsys.readouterr().out


def test_with_a_fast_blas_the_prompt_has_more_than_1000_tokens(monkeypatch, capsys):
    seen = {}
    monkeypatch.setattr(quickstart, "load_model", lambda name: (tiny_llama(), TinyTokenizer()))
    monkeypatch.setattr(quickstart, "slow_blas", lambda: False)
    monkeypatch.setattr(quickstart, "compare", lambda *given: seen.update(prompt=given[3], written=given[4]))
    quickstart.main([])
    assert seen["prompt"] > 1000 and seen["written"] == 40
    assert "apt-get" not in capsys.readouterr().out
