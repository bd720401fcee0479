"""English prose that comes with Python: the help texts of `pydoc`."""

from pydoc_data.topics import topics
from typing import Any

PREFIX = 60_000  # characters that `token_slice` reads


def english() -> str:
    """All help topics in sorted order as one line; the words vary with Python's version."""
    return " ".join(" ".join(topics[name] for name in sorted(topics)).split())


def token_slice(tokenizer: Any, start: int, count: int) -> list[int]:
    """`count` token ids of the prose from token `start`, without special tokens.

    `tokenizer` is a `tokenizers.Tokenizer` or anything with the `encode` of transformers.
    """
    encoded = tokenizer.encode(english()[:PREFIX], add_special_tokens=False)
    ids = list(getattr(encoded, "ids", encoded))
    if start + count > len(ids):
        raise ValueError(f"token_slice: `start + count` must not exceed {len(ids)} tokens; got {start + count}")
    return ids[start : start + count]
