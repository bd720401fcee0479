"""Law: the table of methods is whole: every row has a test of its own, a page, a name; and no method lacks a row."""

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import attrs
import pytest

import vq_functional as vq
from laws.common import SPEC, begin, feed, keys_and_values, small_options
from vq_functional import codebook, crosslayer, evict, hybrid, lowrank, methods, quantize
from vq_functional.core.transform import Transform
from vq_functional.methods import TABLE, Method

ROOT = Path(__file__).parents[2]
NAMES = """
    a2ats adakv age_tiered amc anchorkv cachegen cam chunkkv curdkv gear h2o keyformer kitty kivi kivi_sink
    knorm kvquant kvtc kvzip minicache morphkv nestedkv nsnquant palu polar pyramidkv qfilters qjl rocketkv
    skvq snapkv spectral squeeze streaming_llm svdq tova turboquant_mse turboquant_prod turboquant_rvq vecinfer
    xkv xquant zipcache
"""
DOCUMENTED = set(NAMES.split())
# Methods that are not in the documentation that this package follows: whoever adds one names it here.
ADDED: set[str] = set()
EACH = pytest.mark.parametrize("method", TABLE, ids=[method.name for method in TABLE])


def family(method: Method) -> str:
    """The folder that the method lives in."""
    return method.build.__module__.split(".")[1]


def modules() -> Iterator[ModuleType]:
    """All modules that may hold methods."""
    for package in (evict, quantize, codebook, lowrank, crosslayer, hybrid):
        for info in pkgutil.iter_modules(package.__path__):
            yield importlib.import_module(f"{package.__name__}.{info.name}")


def test_there_are_43_documented_names() -> None:
    assert len(DOCUMENTED) == 43


def test_names_are_unique_and_known() -> None:
    names = [method.name for method in TABLE]
    assert len(set(names)) == len(names)
    assert set(names) == DOCUMENTED | ADDED and not DOCUMENTED & ADDED
    assert {name: methods.find(name) for name in names} == vq.METHODS == {m.name: m for m in TABLE}


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(vq.QuantizerConfigError, match="nobody"):
        methods.find("nobody")


@EACH
def test_a_row_is_complete(method: Method) -> None:
    assert method.paper
    assert attrs.has(method.options) and method.options.__doc__
    assert method.build.__name__ == method.name and method.build.__doc__
    assert getattr(vq, method.name) is method.build and method.name in vq.__all__
    transform = method.build()
    assert isinstance(transform, Transform)
    assert transform.name == method.name
    assert transform == method.build(), "two builds with the same options must share compiled steps"
    assert hash(transform) == hash(method.build())
    assert transform.evicts == ("evicts" in method.traits)
    assert transform.coded == ("packs" in method.traits or "pages" in method.traits)
    assert transform.trimmable == ("evicts" not in method.traits)


@EACH
def test_options_have_defaults_and_are_passed_on(method: Method) -> None:
    """The options class is the one place of defaults; an option that isn't there is refused."""
    defaults = attrs.asdict(method.options(), recurse=False)
    assert method.build(**defaults) == method.build()
    with pytest.raises(vq.QuantizerConfigError, match=f"^{method.name}: `no_such_option` must be a known option"):
        method.build(no_such_option=1)


@pytest.mark.parametrize("method", [m for m in TABLE if "seed" in attrs.fields_dict(m.options)], ids=lambda m: m.name)
def test_a_seed_is_refused_at_once_or_serves(method: Method) -> None:
    """A seed is any number of 32 bits, also where others are derived from it."""
    rule = rf"^{method.name}: `seed` must be an integer in \[0, 4294967295\]; got 4294967296"
    with pytest.raises(vq.QuantizerConfigError, match=rule):
        method.build(seed=2**32)
    transform = method.build(seed=2**32 - 1, **small_options(method))
    feed(transform, begin(transform), *keys_and_values(SPEC, 40))


@EACH
def test_a_row_has_its_own_test(method: Method) -> None:
    path = ROOT / "tests" / family(method) / f"test_{method.name}.py"
    assert path.is_file(), f"{path.relative_to(ROOT)} is missing"
    assert "def test_" in path.read_text()


@EACH
def test_a_row_has_its_page(method: Method) -> None:
    path = ROOT / "docs" / "methods" / f"{method.name}.md"
    assert path.is_file(), f"{path.relative_to(ROOT)} is missing"
    assert method.name in path.read_text()


@EACH
def test_policies_and_codecs_are_public(method: Method) -> None:
    """Evicting methods give their policy; who holds each token by itself gives its codec."""
    if "evicts" in method.traits:
        assert f"{method.name}_policy" in vq.__all__
        assert getattr(vq, f"{method.name}_policy")() == method.build().policy
    elif getattr(method.build(), "take", False):
        assert f"{method.name}_codec" in vq.__all__
        assert getattr(vq, f"{method.name}_codec")() == method.build().key


def test_no_method_lacks_a_row() -> None:
    built = {method.name: method.build for method in TABLE}
    seen = set()
    for module in modules():
        for name in (DOCUMENTED | ADDED) & vars(module).keys():
            function = getattr(module, name)
            if callable(function) and function.__module__ == module.__name__:
                assert built.get(name) is function, f"{module.__name__}.{name} has no row in the table"
                seen.add(name)
    assert seen == built.keys()
