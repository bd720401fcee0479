"""The needle test: the prompt, the scores and the table on cases that can be worked out by hand."""

import copy
import csv
import math
import re
import sys
import types
from concurrent.futures import Future
from unittest import mock

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

import needle
from measuring import log_softmax
from prose import english
from vq_adapters import TransformKVCache, attention_hook

BUDGET = 32


class Words:
    """A token a word, digit or sign, with the space before it; `joined` numbers are one token."""

    def __init__(self, joined=()):
        self.pieces, self.joined = {}, joined

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        if text.strip() in self.joined:
            return [self._id(text)]
        return [self._id(piece) for piece in re.findall(r" ?[^\W\d]+|\d|.|\n", text)]

    def _id(self, piece):
        return self.pieces.setdefault(piece, len(self.pieces))

    def decode(self, ids):
        names = list(self.pieces)
        return "".join(names[i] for i in ids)


def tiny_llama(layers=2):
    """Two query heads a KV head, heads of 32."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=layers,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        vocab_size=1024,
    )
    mx.random.seed(0)
    return llama.Model(args)


# The prompt


def test_facts_say_and_ask_for_their_numbers():
    tokenizer = Words()
    for (name, _), fact in zip(needle.FACTS, needle.make_facts(tokenizer)):
        sentence, question = tokenizer.decode(fact.sentence), tokenizer.decode(fact.question)
        number = tokenizer.decode(fact.answers[0])
        assert re.fullmatch(r"\d{4}", number)
        assert sentence.endswith(f"secret number of {name} is {number}.")
        # The space that all answers begin with is asked for, once.
        assert question.endswith(f"What is the secret number of {name}? The secret number of {name} is ")


def test_answers_are_different_numbers_of_equally_many_tokens():
    tokenizer = Words(joined=[str(number) for number in range(1000, 10000, 3)])
    facts = needle.make_facts(tokenizer, seed=3)
    answers = [tokenizer.decode(answer).strip() for fact in facts for answer in fact.answers]
    assert len(set(answers)) == len(answers) == len(needle.FACTS) * (1 + needle.WRONG)
    assert len({len(answer) for fact in facts for answer in fact.answers}) == 1


def test_same_start_counts_what_all_texts_begin_with():
    assert needle.same_start([[1, 2, 3], [1, 2, 4], [1, 2, 3]]) == 2
    assert needle.same_start([[1, 5], [2, 5]]) == 0


def test_numbers_follow_from_the_seed():
    tokenizer = Words()
    first, again, other = (needle.make_facts(tokenizer, seed) for seed in (1, 1, 2))
    assert first == again
    assert all(one.answers != two.answers for one, two in zip(first, other))


@pytest.mark.parametrize("count", [1, 50, 777])
def test_filler_is_the_prose_up_to_exactly_so_many_tokens(count):
    tokenizer = Words()
    sentences = needle.filler(tokenizer, count)
    assert sum(map(len, sentences)) == count
    text = "".join(map(tokenizer.decode, sentences))
    assert text.strip() in english()
    assert all(tokenizer.decode(sentence)[-1] in ".!?" for sentence in sentences[:-1])


def test_filler_refuses_more_than_there_is(monkeypatch):
    monkeypatch.setattr(needle, "english", lambda: " ".join(["Too short."] * (needle.START + 2)))
    with pytest.raises(ValueError, match="no more than 6 tokens; got 7"):
        needle.filler(Words(), 7)


def test_facts_lie_at_even_depths_between_sentences():
    sentences = [[i] * 10 for i in range(4)]
    found = needle.hidden(sentences, [[8], [9, 9]])  # at tokens 10 and 30 of 40
    assert found == [0] * 10 + [8] + [1] * 10 + [2] * 10 + [9, 9] + [3] * 10


def test_several_facts_may_lie_before_one_sentence():
    assert needle.hidden([[0] * 8, [1] * 2], [[7], [8], [9]]) == [7, 8] + [0] * 8 + [9] + [1] * 2


@pytest.mark.parametrize("count", [600, 1500])
def test_a_prompt_has_the_asked_length_and_every_fact_at_its_depth(count):
    tokenizer = Words()
    facts = needle.make_facts(tokenizer)
    prompt = needle.make_prompt(tokenizer, facts, count)
    assert len(prompt) == count
    room = count - sum(len(fact.sentence) for fact in facts)
    longest = max(map(len, needle.filler(tokenizer, room)))
    for i, fact in enumerate(facts):
        (start,) = (j for j in range(count) if prompt[j : j + len(fact.sentence)] == fact.sentence)
        before = start - sum(len(other.sentence) for other in facts[:i])
        assert 0 <= room * (i + 0.5) / len(facts) - before <= longest


def test_a_prompt_has_room_for_the_facts():
    tokenizer = Words()
    facts = needle.make_facts(tokenizer)
    least = sum(len(fact.sentence) for fact in facts)
    with pytest.raises(ValueError, match=f"must exceed the {least} tokens of the facts; got {least}"):
        needle.make_prompt(tokenizer, facts, least)


# Scores


class Remembering:
    """A cache of token ids, one list a batch row."""

    def __init__(self, rows=((),)):
        self.rows = [list(row) for row in rows]

    @classmethod
    def merge(cls, caches):
        return cls([row for cache in caches for row in cache.rows])


class Summing:
    """A model that is sure, by a factor e, that the sum of all tokens comes next."""

    vocabulary = 7

    def __init__(self):
        self.calls = []

    def __call__(self, ids, cache):
        self.calls.append(ids.tolist())
        return mx.array([[self._logits(row, token) for token in new] for row, new in zip(cache[0].rows, ids.tolist())])

    def _logits(self, row, token):
        row.append(token)
        return [float(i == sum(row) % self.vocabulary) for i in range(self.vocabulary)]


def logarithms(hits, length):
    """Log likelihood of an answer of so many tokens, of which `hits` were expected."""
    return hits - length * math.log(math.e + Summing.vocabulary - 1)


def test_log_likelihoods_of_a_model_that_adds():
    model, cache = Summing(), Remembering([[1, 2]])
    # After 1 + 2 + 3 + 4 = 10 comes 3, then 6, then 5.
    fact = needle.Fact([], [3, 4], [[3, 6, 5], [3, 6, 4], [0, 3, 6], [1, 1, 1]])
    found = needle.log_likelihoods(model, [cache], fact)
    assert found == pytest.approx([logarithms(hits, 3) for hits in (3, 2, 2, 0)], abs=1e-5)
    assert model.calls == [[[3, 4]], [[3], [3], [0], [1]], [[6], [6], [3], [1]]]
    assert cache.rows == [[1, 2]]


def test_answers_of_one_token_need_no_step():
    model = Summing()
    found = needle.log_likelihoods(model, [Remembering([[1]])], needle.Fact([], [2], [[3], [4]]))
    assert found == pytest.approx([logarithms(1, 1), logarithms(0, 1)], abs=1e-5)
    assert model.calls == [[[2]]]


@pytest.mark.parametrize(
    "scores, place",
    [
        ([-1.0, -2.0, -3.0], 1),
        ([-2.0, -1.0, -3.0], 2),
        ([-3.0, -2.0, -1.0], 3),
        ([-1.0, -1.0, -3.0], 2),
        ([math.nan, -1.0, -2.0], 3),
        ([-1.0, math.nan, -2.0], 2),
    ],
)
def test_rank_counts_what_is_not_below_the_first(scores, place):
    assert needle.rank(scores) == place


def one_by_one(model, caches, fact):
    """Log likelihoods, each answer on a copy of its own."""
    found = []
    for answer in fact.answers:
        ids = mx.array([fact.question + answer])
        rows = log_softmax(model(ids, cache=copy.deepcopy(caches)))[0, -len(answer) - 1 : -1]
        found.append(sum(row[token].item() for row, token in zip(rows, answer)))
    return found


@pytest.mark.parametrize("entry", [needle.Entry("plain"), needle.Entry("h2o", 400), needle.Entry("squeeze", 400)])
def test_answers_side_by_side_are_as_likely_as_one_by_one(entry):
    model, tokenizer = tiny_llama(), Words()
    fact = needle.make_facts(tokenizer)[0]
    prompt = list(range(60))
    with attention_hook(model):
        caches = needle.read(model, prompt, entry, [])
        held = [cache.size() for cache in caches]
        found = needle.log_likelihoods(model, caches, fact)
        assert [cache.size() for cache in caches] == held
        assert needle.log_likelihoods(model, caches, fact) == found
        assert found == pytest.approx(one_by_one(model, caches, fact), abs=2e-3)  # keys and values have 16 bits


# Methods


def test_the_plain_cache_comes_first_and_each_method_has_every_budget():
    chosen = needle.entries("plain|h2o|tova", [64, 128])
    assert [(entry.method, entry.budget) for entry in chosen] == [
        ("plain", None),
        ("plain, no facts", None),
        *(("h2o", 64), ("h2o", 128)),
        *(("tova", 64), ("tova", 128)),
    ]
    everything = needle.entries("", [64])
    assert [entry.method for entry in everything] == ["plain", "plain, no facts", *needle.METHODS]
    assert needle.entries("nothing", [64]) == []


def test_the_methods_are_those_that_evict():
    assert len(needle.METHODS) == 16
    assert {"h2o", "rocketkv"} < set(needle.METHODS) and "kivi" not in needle.METHODS


@pytest.mark.parametrize("method", needle.METHODS)
def test_a_method_holds_its_budget_of_the_prompt(method):
    model, prompt = tiny_llama(), [i % 50 for i in range(100)]
    with attention_hook(model):
        caches = needle.read(model, prompt, needle.Entry(method, BUDGET), [1, 2])
    assert all(cache.transform.name == method and cache.offset == 100 for cache in caches)
    rows = sum(cache.size() for cache in caches) / len(caches)
    # chunkkv keeps whole chunks and room for an unfinished one; rocketkv reads its budget and holds more.
    low, high = {"chunkkv": (BUDGET - 2 * 8, BUDGET), "rocketkv": (BUDGET, 99)}.get(method, (BUDGET, BUDGET))
    assert low <= rows <= high


def test_the_prompt_is_read_in_chunks_and_real_queries_settle_them(monkeypatch):
    lengths, attend = [], TransformKVCache.attend
    monkeypatch.setattr(needle, "CHUNK", 40)

    def telling(self, queries, *rest):
        lengths.append(queries.shape[:3])
        return attend(self, queries, *rest)

    monkeypatch.setattr(TransformKVCache, "attend", telling)
    model, fact = tiny_llama(layers=1), needle.make_facts(Words())[0]
    result = needle.measure(needle.Task(model, [fact], list(range(100)), [], []), needle.Entry("h2o", BUDGET))
    question, answers = len(fact.question), len(fact.answers)
    assert lengths == [(1, 4, 40), (1, 4, 40), (1, 4, 20), (1, 4, question), *[(answers, 4, 1)] * 3]
    assert result.rows == BUDGET
    assert type(model.layers[0].self_attn) is llama.Attention  # as it was


def test_kvzip_reads_the_prompt_twice(monkeypatch):
    seen, original = [], needle.kvzip_prefill

    def telling(model, caches, ids, **named):
        seen.append((ids.shape, named))
        return original(model, caches, ids, **named)

    monkeypatch.setattr(needle, "kvzip_prefill", telling)
    needle.read(tiny_llama(), list(range(60)), needle.Entry("kvzip", BUDGET), [5])
    needle.read(tiny_llama(), list(range(60)), needle.Entry("tova", BUDGET), [5])
    assert seen == [((1, 60), {"chunk": needle.CHUNK, "instruction": [5]})]


def test_a_model_that_looks_back_finds_what_the_cache_kept(monkeypatch):
    """Ranks follow the prompt: what the window has lost is a guess, what it holds is found."""

    def likelihoods(model, caches, fact):
        return [0.0 if fact.sentence[0] >= caches[0].offset - caches[0].size() else -2.0, -1.0]

    monkeypatch.setattr(needle, "log_likelihoods", likelihoods)
    facts = [needle.Fact([place], [1], [[1], [2]]) for place in (10, 50, 70, 90)]
    task = needle.Task(tiny_llama(), facts, list(range(100)), [], [])
    found = [needle.measure(task, entry) for entry in (needle.Entry("plain"), needle.Entry("streaming_llm", 40))]
    assert found == [
        needle.Result("plain", None, 100, (1, 1, 1, 1)),
        needle.Result("streaming_llm", 40, 40, (2, 2, 1, 1)),
    ]
    assert [(result.hits, result.mean_rank) for result in found] == [(4, 1.0), (2, 1.5)]


def test_the_row_without_facts_reads_as_much_prose(monkeypatch):
    seen, tokenizer, original = [], Words(), needle.read

    def telling(model, prompt, *rest):
        seen.append(prompt)
        return original(model, prompt, *rest)

    monkeypatch.setattr(needle, "load_model", lambda name: (tiny_llama(), tokenizer))
    monkeypatch.setattr(needle, "read", telling)
    task = needle.prepared.__wrapped__(needle.Setting("smollm2", 300, 0))
    for method in ("plain, no facts", "plain"):
        needle.measure(task, needle.Entry(method))
    assert [len(prompt) for prompt in seen] == [300, 300]
    texts = [tokenizer.decode(prompt) for prompt in seen]
    assert [text.count("secret number") for text in texts] == [0, 8]
    assert texts[0].strip() in english()


# The table, the file and the plot


def results():
    return [
        needle.Result("plain", None, 3000.0, (1, 1)),
        needle.Result("h2o", 128, 128.0, (8, 1)),
        needle.Result("h2o", 64, 64.0, (9, 2)),
        needle.Result("tova", 128, 128.0, (1, 1)),
    ]


def test_there_is_a_cell_for_each_column():
    assert [needle.cells(result) for result in results()[:2]] == [
        ["plain", "all", "3000", 2, "1.00", "1 1"],
        ["h2o", 128, "128", 1, "4.50", "8 1"],
    ]
    assert len(needle.HEAD) == 6


def test_the_summary_has_a_line_a_method_and_a_column_a_budget():
    assert needle.summary(results(), [64, 128]).splitlines() == [
        "| method | 64 | 128 |",
        "| --- | --- | --- |",
        "| plain | 2 (1.0) | 2 (1.0) |",
        "| h2o | 0 (5.5) | 1 (4.5) |",
        "| tova |  | 2 (1.0) |",
    ]


@pytest.fixture
def tiny(monkeypatch):
    """The command over a tiny model."""
    monkeypatch.setattr(needle, "load_model", lambda name: (tiny_llama(), Words()))
    needle.prepared.cache_clear()
    yield
    needle.prepared.cache_clear()


def table_rows(text, columns):
    """Cells of the tables with so many columns, without their two head lines."""
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in cells] for cells in lines if len(cells) == columns][2:]


def test_main_prints_and_writes_what_it_found(tiny, tmp_path, capsys):
    path = tmp_path / "needle.csv"
    chosen = ["--methods", "plain$|h2o|streaming", "--budgets", "32,64"]
    needle.main([*chosen, "--tokens", "300", "--seed", "5", "--csv", str(path)])
    out, progress = capsys.readouterr()
    assert "8 facts in 300 tokens" in out.splitlines()[0]
    rows = table_rows(out, len(needle.HEAD))
    assert [row[:3] for row in rows] == [
        ["plain", "all", "300"],
        *([method, held, held] for method in ("streaming_llm", "h2o") for held in ("32", "64")),
    ]
    for row in rows:
        ranks = [int(rank) for rank in row[5].split()]
        assert len(ranks) == len(needle.FACTS) and set(ranks) <= set(range(1, 2 + needle.WRONG))
        assert (int(row[3]), row[4]) == (ranks.count(1), f"{sum(ranks) / len(ranks):.2f}")
    cells = {(row[0], row[1]): f"{row[3]} ({float(row[4]):.1f})" for row in rows}
    assert table_rows(out, 3) == [
        ["plain", cells["plain", "all"], cells["plain", "all"]],
        *([method, cells[method, "32"], cells[method, "64"]] for method in ("streaming_llm", "h2o")),
    ]
    assert "] h2o, 64 rows" in progress
    with path.open() as file:
        head, *written = csv.reader(file)
    assert head == [*needle.HEAD, "model", "tokens", "seed"]
    assert written == [[*row, "smollm2", "300", "5"] for row in rows]


def test_a_budget_that_a_method_refuses_is_left_out(tiny, capsys):
    needle.main(["--methods", "plain$|h2o", "--budgets", "4,32", "--tokens", "300"])
    out, progress = capsys.readouterr()
    assert [row[:2] for row in table_rows(out, len(needle.HEAD))] == [["plain", "all"], ["h2o", "32"]]
    assert table_rows(out, 3)[1][1] == ""
    assert "left out: h2o: `budget`" in progress


class LastFirst:
    """A pool of processes, in this one: what is submitted last is done first."""

    def __init__(self, jobs, context):
        self.context, self.calls = (jobs, context.get_start_method()), []
        LastFirst.started = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, *arguments):
        self.calls.append((Future(), function, arguments))
        return self.calls[-1][0]

    def done(self, futures):
        assert futures == [future for future, *_ in self.calls]
        for future, function, arguments in reversed(self.calls):
            future.set_result(function(*arguments))
            yield future


def test_processes_share_the_cores_and_the_file_has_the_order(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(needle, "ProcessPoolExecutor", LastFirst)
    monkeypatch.setattr(needle, "as_completed", lambda futures: LastFirst.started.done(futures))
    monkeypatch.setattr(needle.os, "cpu_count", lambda: 6)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "9")
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "")
    written = []
    for jobs in ("2", "1"):
        path = tmp_path / jobs
        chosen = ["--methods", "plain$|h2o", "--budgets", "4,32,64", "--tokens", "300"]
        needle.main([*chosen, "--jobs", jobs, "--csv", str(path)])
        written.append(path.read_text())
    assert LastFirst.started.context == (2, "spawn")
    assert needle.os.environ["OPENBLAS_NUM_THREADS"] == "3" and needle.os.environ["MLX_DISABLE_COMPILE"] == "1"
    assert written[0] == written[1]
    rows = table_rows(capsys.readouterr().out, len(needle.HEAD))
    assert [row[1] for row in rows if row[0] in ("plain", "h2o")] == ["64", "32", "all", "all", "32", "64"]


def test_main_refuses_an_expression_that_matches_nothing(tiny):
    with pytest.raises(SystemExit, match="no method matches 'nothing'; there are: plain, streaming_llm, h2o"):
        needle.main(["--methods", "nothing"])


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(needle.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(needle, "load_model", None)
    with pytest.raises(SystemExit) as stopped:
        needle.main(["--plot", "needle.png"])
    assert stopped.value.code == '--plot needs matplotlib: pip install "vq-functional[plots]"'


def test_a_plot_has_a_panel_a_budget_and_a_line_a_method(monkeypatch, tmp_path):
    figure, panels = mock.MagicMock(), [mock.MagicMock(), mock.MagicMock()]
    figure.subplots.return_value = [panels]
    module = types.SimpleNamespace(Figure=lambda **_: figure)
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    needle.plot(tmp_path / "needle.png", results(), [64, 128])
    (first,), (second,) = (panel.imshow.call_args.args for panel in panels)
    assert first[:2] == [(1, 1), (9, 2)] and all(math.isnan(rank) for rank in first[2])
    assert second == [(1, 1), (8, 1), (1, 1)]
    panels[0].set_yticks.assert_called_once_with(range(3), ["plain", "h2o", "tova"])
    assert [panel.set.call_args.kwargs["title"] for panel in panels] == ["64 rows", "128 rows"]
    figure.savefig.assert_called_once_with(tmp_path / "needle.png")


def test_the_plain_cache_is_that_of_mlx_lm():
    assert all(isinstance(cache, KVCache) for cache in needle.fresh_caches(tiny_llama(), needle.Entry("plain"), 100))
