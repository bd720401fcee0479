"""A tiny model on disk, with the helpers of the adapter tests."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "adapters"))

from models import ARCHITECTURES, build, tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A llama of two layers; a word a token."""
    return save(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose first layers have windows of their own."""
    return save(tmp_path_factory.mktemp("mixed"), "gemma3_text")


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A llama with other weights."""
    return save(tmp_path_factory.mktemp("draft"), "llama", seed=1)


@pytest.fixture(scope="session")
def latent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose layers all cache latent vectors."""
    return save(tmp_path_factory.mktemp("latent"), "deepseek_v3")


def save(path: Path, architecture: str, seed: int = 0) -> str:
    build(architecture, seed=seed).save_weights(str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps({"model_type": architecture, **ARCHITECTURES[architecture]}))
    tokenizer().save_pretrained(path)
    return str(path)
