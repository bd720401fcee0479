"""Stores of tables that are worth keeping: rotations, codebooks, projections, calibrations.

Files are safetensors, one an artifact: no pickle, no code.
"""

from __future__ import annotations

import abc
import hashlib
import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from vq_functional.core.errors import QuantizerConfigError, check, check_int

FORMAT, VERSION = "vq_adapters.artifact", "1"
SUFFIX = ".safetensors"
LONGEST = 100  # characters of a name that go into a file's name

Arrays = dict[str, mx.array]

# What reading a file that is not of this format, or damaged, may raise.
_DAMAGE = (RuntimeError, ValueError, TypeError, KeyError, AttributeError)

# What names an artifact of the documented kinds.
_FIELDS = {"rotation": ("d", "seed"), "codebook": ("distribution", "b", "d"), "jl": ("d", "m", "seed")}


class ArtifactStore(abc.ABC):
    """Where tables are kept. What isn't there raises FileNotFoundError when loaded."""

    @abc.abstractmethod
    def load_rotation_matrix(self, d: int, seed: int) -> mx.array:
        """The rotation [d, d] of a seed."""

    @abc.abstractmethod
    def save_rotation_matrix(self, Pi: mx.array, d: int, seed: int) -> None:
        """Keep the rotation `Pi` [d, d] of a seed."""

    @abc.abstractmethod
    def load_codebook(self, distribution: str, b: int, d: int) -> mx.array:
        """The levels of a scalar codebook of `b` bits for a distribution at size `d`."""

    @abc.abstractmethod
    def save_codebook(self, cb: mx.array, distribution: str, b: int, d: int) -> None:
        """Keep the levels `cb` [2**b] for a distribution at size `d`."""

    @abc.abstractmethod
    def load_jl_matrix(self, d: int, m: int, seed: int) -> mx.array:
        """The projection [m, d] of a seed."""

    @abc.abstractmethod
    def save_jl_matrix(self, S: mx.array, d: int, m: int, seed: int) -> None:
        """Keep the projection `S` [m, d] of a seed."""

    @abc.abstractmethod
    def exists(self, artifact_type: str, **kwargs: Any) -> bool:
        """Whether an artifact can be loaded: a "rotation", "codebook" or "jl" by what names it, others by `name`."""

    def load(self, kind: str, name: str) -> tuple[Arrays, dict[str, Any]]:
        """Arrays and metadata of any artifact."""
        raise TypeError(f"{type(self).__name__} does not load artifacts of other kinds")

    def save(self, kind: str, name: str, arrays: Mapping[str, mx.array], metadata: dict[str, Any]) -> None:
        """Keep arrays, and metadata that JSON can hold, under a kind and a name."""
        raise TypeError(f"{type(self).__name__} does not save artifacts of other kinds")


class FileArtifactStore(ArtifactStore):
    """Artifacts as files of one folder, which several processes may share.

    A file is written beside its place and put there whole, so a reader sees the
    old one or the new one. A damaged file, and one of another artifact, is
    refused by its name with QuantizerConfigError.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def load_rotation_matrix(self, d: int, seed: int) -> mx.array:
        return self._load_table("rotation", (d, d), d=d, seed=seed)

    def save_rotation_matrix(self, Pi: mx.array, d: int, seed: int) -> None:
        self._save_table("rotation", "Pi", Pi, (d, d), d=d, seed=seed)

    def load_codebook(self, distribution: str, b: int, d: int) -> mx.array:
        return self._load_table("codebook", (2**b,), distribution=distribution, b=b, d=d)

    def save_codebook(self, cb: mx.array, distribution: str, b: int, d: int) -> None:
        self._save_table("codebook", "cb", cb, (2**b,), distribution=distribution, b=b, d=d)

    def load_jl_matrix(self, d: int, m: int, seed: int) -> mx.array:
        return self._load_table("jl", (m, d), d=d, m=m, seed=seed)

    def save_jl_matrix(self, S: mx.array, d: int, m: int, seed: int) -> None:
        self._save_table("jl", "S", S, (m, d), d=d, m=m, seed=seed)

    def exists(self, artifact_type: str, **kwargs: Any) -> bool:
        name = table_name(artifact_type, kwargs) if artifact_type in _FIELDS else kwargs.get("name")
        check(isinstance(name, str), "exists", "name", f"must name the {artifact_type}", kwargs)
        try:
            self.load(artifact_type, str(name))
        except (FileNotFoundError, QuantizerConfigError):
            return False
        return True

    def load(self, kind: str, name: str) -> tuple[Arrays, dict[str, Any]]:
        path = self.path(kind, name)
        if not path.is_file():
            raise FileNotFoundError(f"load: no {kind} {name!r} in {os.fspath(self.folder)!r}")
        try:
            loaded: Any = mx.load(os.fspath(path), format="safetensors", return_metadata=True)
            arrays, header = loaded
            mx.eval(arrays)
            metadata, written = json.loads(header["metadata"]), header["digest"]
        except _DAMAGE as error:
            raise QuantizerConfigError(f"load: `{path.name}` must be a whole artifact; got {error}") from error
        wanted = {"format": FORMAT, "version": VERSION, "kind": kind, "name": name}
        found = {key: header.get(key) for key in wanted}
        check(found == wanted, "load", path.name, f"must hold {wanted}", found)
        check(digest(arrays) == written, "load", path.name, "must have the numbers that were saved", "others")
        return arrays, metadata

    def save(self, kind: str, name: str, arrays: Mapping[str, mx.array], metadata: dict[str, Any]) -> None:
        path, arrays = self.path(kind, name), dict(arrays)
        check(bool(arrays), "save", "arrays", "must hold an array", name)
        header = {"format": FORMAT, "version": VERSION, "kind": kind, "name": name, "digest": digest(arrays)}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, arrays, {**header, "metadata": json.dumps(metadata)})

    def path(self, kind: str, name: str) -> Path:
        """The file of an artifact."""
        return self.folder / f"{file_name(kind)}--{file_name(name)}{SUFFIX}"

    def _load_table(self, kind: str, shape: tuple[int, ...], **fields: Any) -> mx.array:
        name = table_name(kind, fields)
        table = self.load(kind, name)[0].get("table")
        shaped = table is not None and table.shape == shape
        check(
            shaped, "load", self.path(kind, name).name, f"must hold a table {shape}", table is not None and table.shape
        )
        return table  # type: ignore[return-value]

    def _save_table(self, kind: str, field: str, table: Any, shape: tuple[int, ...], **fields: Any) -> None:
        name, table = table_name(kind, fields), mx.array(table)
        check(table.shape == shape, "save", field, f"must be {shape}", table.shape)
        self.save(kind, name, {"table": table}, fields)


def table_name(kind: str, fields: Mapping[str, Any]) -> str:
    """The name of a rotation, a codebook or a projection; raises QuantizerConfigError for what can't name one."""
    check(set(fields) == set(_FIELDS[kind]), kind, "kwargs", f"must be {_FIELDS[kind]}", tuple(fields))
    for field, value in fields.items():
        if field == "distribution":
            check(isinstance(value, str) and value != "", kind, field, "must be a name", value)
        else:
            check_int(kind, field, value, 0 if field == "seed" else 1)
    return "-".join(f"{field}{fields[field]}" for field in _FIELDS[kind])


def file_name(name: str) -> str:
    """`name` in letters that every file system takes; a name that had to change ends with its digest."""
    check(isinstance(name, str) and name != "", "artifact", "name", "must be a text", name)
    clean = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:LONGEST]
    return clean if clean == name else f"{clean}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def digest(arrays: Mapping[str, mx.array], text: str = "") -> str:
    """SHA-256 of a text and of names, shapes, dtypes and bytes."""
    found = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        x = arrays[name]
        found.update(f"{name} {x.dtype} {x.shape}\n".encode())
        if x.size:
            found.update(memoryview(mx.contiguous(x.reshape(-1)).view(mx.uint8)))  # type: ignore[arg-type]
    return found.hexdigest()


def write_whole(path: Path, arrays: Arrays, metadata: dict[str, str]) -> None:
    """Write safetensors to exactly `path` and have them on the disk; an older file stays until the new one is whole."""
    part = path.with_name(f".{uuid.uuid4().hex}{SUFFIX}")
    try:
        mx.save_safetensors(os.fspath(part), arrays, metadata)
        _flush(part)
        os.replace(part, path)
        _flush(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Have what was written to a file or a folder on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
