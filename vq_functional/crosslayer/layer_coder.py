"""Coders of several layers' rows: the heads of one layer stand behind those of the other, stacked on axis 1."""

from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx

from vq_functional.core.codec import Codec, Coder, Rows, bind


class StackCoder(Coder):
    """A coder of rows [B, M * H, S, D] of `layers` = M layers, whose arrays the layers may share.

    A subclass gives `encode`, or `encode_by` and `tables`, of all layers and the
    three readers of one; what all layers read follows.
    """

    layers: int

    @property
    def owners(self) -> tuple[str, ...]:
        """Whose each array of `encode` is, and behind them each of `tables`.

        "first": held for the first layer and read by all; "all": every layer has
        its heads' share; "others": all layers but the first have theirs.
        """
        raise TypeError(f"{type(self).__name__} does not tell whose its arrays are")

    def decode_layer(self, rows: Rows, layer: int) -> mx.array:
        """Vectors [B, H, S, D] of one layer in `dtype`."""
        raise TypeError(f"{type(self).__name__} does not decode a layer")

    def dot_layer(self, queries: mx.array, rows: Rows, layer: int) -> mx.array:
        """`Coder.dot` of one layer: float32 [B, H, Q, S] of `queries` [B, H, Q, D]."""
        return queries @ self.decode_layer(rows, layer).astype(mx.float32).swapaxes(-1, -2)

    def mix_layer(self, weights: mx.array, rows: Rows, layer: int) -> mx.array:
        """`Coder.mix` of one layer: float32 [B, H, Q, D] by `weights` [B, H, Q, S]."""
        return weights @ self.decode_layer(rows, layer).astype(mx.float32)

    def decode(self, rows: Rows) -> mx.array:
        return mx.concatenate([self.decode_layer(rows, layer) for layer in range(self.layers)], axis=1)

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        return self._each(self.dot_layer, queries, rows)

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        return self._each(self.mix_layer, weights, rows)

    def _each(self, read: Callable[[mx.array, Rows, int], mx.array], x: mx.array, rows: Rows) -> mx.array:
        layers = mx.split(x, self.layers, axis=1)
        return mx.concatenate([read(one, rows, layer) for layer, one in enumerate(layers)], axis=1)


@attrs.frozen
class LayerCodec(Codec):
    """Reads one of `layers` layers out of what the codec of them all, `whole`, packs."""

    whole: Codec
    layer: int
    layers: int

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.whole.name

    @property
    def unit(self) -> int:  # type: ignore[override]
        return self.whole.unit

    @property
    def shared(self) -> int:  # type: ignore[override]
        return self.whole.shared

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        return self.whole.mixes

    @property
    def warmup(self) -> int:  # type: ignore[override]
        return self.whole.warmup

    @property
    def keys_only(self) -> bool:  # type: ignore[override]
        return self.whole.keys_only

    @property
    def values_only(self) -> bool:  # type: ignore[override]
        return self.whole.values_only

    def bind(self, dim: int, dtype: mx.Dtype) -> Coder:
        return LayerCoder(bind(self.whole, dim, dtype), self.layer, self.layers)


@attrs.frozen
class LayerCoder(Coder):
    """One layer of a StackCoder; of a coder whose arrays all have the heads at axis 1, a share of these."""

    whole: Coder
    layer: int
    layers: int

    @property
    def dim(self) -> int:  # type: ignore[override]
        return self.whole.dim

    @property
    def dtype(self) -> mx.Dtype:  # type: ignore[override]
        return self.whole.dtype

    @property
    def axes(self) -> tuple[int, ...] | None:
        return self.whole.axes

    def heads(self, rows: Rows) -> int:
        return self.whole.heads(rows) // self.layers

    def empty(self, batch: int, heads: int, count: int, unit: int = 1) -> Rows:
        return self.whole.empty(batch, heads * self.layers, count, unit)

    def decode(self, rows: Rows) -> mx.array:
        if isinstance(self.whole, StackCoder):
            return self.whole.decode_layer(rows, self.layer)
        return self.whole.decode(self._own(rows))

    def dot(self, queries: mx.array, rows: Rows) -> mx.array:
        if isinstance(self.whole, StackCoder):
            return self.whole.dot_layer(queries, rows, self.layer)
        return self.whole.dot(queries, self._own(rows))

    def mix(self, weights: mx.array, rows: Rows) -> mx.array:
        if isinstance(self.whole, StackCoder):
            return self.whole.mix_layer(weights, rows, self.layer)
        return self.whole.mix(weights, self._own(rows))

    def shares(self, sizes: Sequence[int]) -> list[int]:
        """Of arrays of so many bytes, those of rows and then of tables, what is held for this layer."""
        owners = self.whole.owners if isinstance(self.whole, StackCoder) else ("all",) * len(sizes)
        return [share(size, owner, self.layer, self.layers) for size, owner in zip(sizes, owners, strict=True)]

    def _own(self, rows: Rows) -> Rows:
        return tuple(heads_of(x, self.layer, self.layers) for x in rows)


def heads_of(x: mx.array, layer: int, layers: int) -> mx.array:
    """The heads of one of `layers` layers in `x` [B, layers * H, ...]."""
    heads = x.shape[1] // layers
    return x[:, layer * heads : (layer + 1) * heads]


def share(size: int, owner: str, layer: int, layers: int) -> int:
    """What is held for one of `layers` layers of an array of `size` bytes, by its owner as in `StackCoder.owners`."""
    if owner == "all":
        return size // layers
    if owner == "first":
        return 0 if layer else size
    return size // (layers - 1) if layer else 0
