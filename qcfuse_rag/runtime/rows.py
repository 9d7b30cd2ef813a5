"""Rows: the token positions that a forward pass computes, over a buffer with the keys and values of all others.

Full prefill computes all rows, naive reuse the question's rows, a decode step one row. The whole engine rests on this
idea; see docs/reference/architecture.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from qcfuse_rag.runtime.device import to_device

if TYPE_CHECKING:
    from qcfuse_rag.runtime.buffer import KVBuffer

MAX_CACHED_MASK_BYTES = 4 << 20
"""Largest additive mask of a block that is kept for later layers."""


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Neighbouring rows that share one attention call, and the keys that call needs.

    Attributes:
        start, stop: the rows' range within the plan.
        start_key, stop_key: range of key positions (or of indices into the visible keys) that the rows may see.
        mask: `[stop - start, stop_key - start_key]` bool, True where a row sees a key; None if every row sees every
            key of the range, or if `causal` is True.
        causal: True if the rows are the last positions of the range and each sees the keys up to its own position.
    """

    start: int
    stop: int
    start_key: int
    stop_key: int
    mask: Tensor | None
    causal: bool
    _additive: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict, compare=False)

    def additive(self, dtype: torch.dtype, groups: int) -> Tensor:
        """Return the `[groups * (stop - start), stop_key - start_key]` mask: 0 where a row sees a key, else -inf.

        Torch would convert a boolean mask in every layer. The result is cached for later layers unless it is large.
        It is repeated for each query head that shares a key.
        """
        assert self.mask is not None
        if (dtype, groups) in self._additive:
            return self._additive[dtype, groups]
        additive = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
        additive = additive.masked_fill_(~self.mask, float("-inf")).repeat(groups, 1)
        if additive.nbytes <= MAX_CACHED_MASK_BYTES:
            self._additive[dtype, groups] = additive
        return additive


@dataclass(slots=True, eq=False)
class RowsPlan:
    """The rows that one forward pass computes, and the keys they may see.

    A row at position p sees the keys at positions <= p. In a layer with a sliding window of W tokens, it sees only
    the keys at positions > p - W.

    Attributes:
        rows: `[R]` int64, ascending positions.
        length: number of keys; positions >= length do not exist yet.
        visible: per layer, `[V]` int64 ascending positions that rows may see at all, or None for every position; on the
            CPU if the host knows them.
        observe: called in every layer before attention, with the layer's queries and keys; probes use it.
        windows: per layer the sliding window in tokens or None, for models that do not pass it to attention.
        on_host: the rows on the CPU, or None if the host does not know them. Reading `rows` waits for the device.
        row_blocks: the blocks that layers share, by `visible_key` and sliding window; see `attention.row_blocks`.
    """

    rows: Tensor
    length: int
    visible: Sequence[Tensor | None] | None = None
    observe: Observer | None = None
    windows: Sequence[int | None] | None = None
    on_host: Tensor | None = None
    row_blocks: dict[tuple[int, int | None], list[RowBlock]] = field(default_factory=dict)
    _visible_on_device: dict[int, Tensor] = field(default_factory=dict)
    _last: dict[int, RowsPlan] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        rows: Tensor,
        windows: Sequence[int | None] | None = None,
        *,
        device: torch.device | None = None,
        visible: Sequence[Tensor | None] | None = None,
    ) -> RowsPlan:
        """Plan a pass over `[R]` int64 ascending rows, not empty; the host waits for them unless on the CPU."""
        on_device = rows if device is None else to_device(rows, device)
        host = rows if rows.device.type == "cpu" else None
        return cls(on_device, int(rows[-1]) + 1, visible, None, windows, host)

    @classmethod
    def between(
        cls,
        start: int,
        stop: int,
        device: torch.device,
        windows: Sequence[int | None] | None = None,
        observe: Observer | None = None,
    ) -> RowsPlan:
        """Plan a pass over all rows `start <= p < stop`."""
        rows = torch.arange(start, stop, device=device)
        return cls(rows, stop, None, observe, windows, torch.arange(start, stop))

    @property
    def at(self) -> slice | Tensor:
        """The rows as an index: a slice, which copies faster, if the host knows that they have no gaps."""
        first, host = self.length - len(self.rows), self.rows if self.rows.device.type == "cpu" else self.on_host
        return slice(first, self.length) if host is not None and int(host[0]) == first else self.rows

    def last(self, count: int) -> RowsPlan:
        """Return the plan of the last rows alone, which nothing observes; layers share it."""
        if count not in self._last:
            host = None if self.on_host is None else self.on_host[-count:]
            self._last[count] = RowsPlan(self.rows[-count:], self.length, self.visible, None, self.windows, host)
        return self._last[count]

    def visible_key(self, layer: int) -> int:
        """Return a key that is equal for layers in which rows see the same set of keys."""
        visible = None if self.visible is None else self.visible[layer]
        return 0 if visible is None else id(visible)

    def visible_at(self, layer: int) -> Tensor | None:
        """Return the positions that rows may see in a layer, on the rows' device; None for all."""
        visible = None if self.visible is None else self.visible[layer]
        if visible is None or visible.device == self.rows.device:
            return visible
        if id(visible) not in self._visible_on_device:
            self._visible_on_device[id(visible)] = to_device(visible, self.rows.device)
        return self._visible_on_device[id(visible)]


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How a layer computes attention scores.

    Attributes:
        scaling: factor on scores.
        softcap: cap on scores through tanh (Gemma 2), or None.
        window: sliding window in tokens, or None.
        sinks: `[Hq]` logits that take part in the softmax only (gpt-oss), or None.
    """

    scaling: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = field(default=None, compare=False)


States = dict[int, tuple[int, LinearAttentionLayer]]
"""By recurrent layer, the state behind so many tokens of a sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredSequence:
    """The inputs and states of a sequence in a recurrent layer, or of several sequences with the same rows.

    Fresh inputs are written already.

    Attributes:
        keys, values: `[B, H, capacity, D]`, stored inputs, see `models.recurrence`.
        at: the rows.
        length: number of tokens up to the last row.
        visible: `[V]` int64 ascending positions that rows may see, the rows among them, or None for every position.
        states: of the sequence, or None if states are not kept.
    """

    keys: Tensor
    values: Tensor
    at: slice | Tensor
    length: int
    visible: Tensor | None
    states: States | None

    @property
    def first(self) -> int:
        """The first row."""
        return int(self.at.start if isinstance(self.at, slice) else self.at[0])

    @property
    def rows(self) -> Tensor:
        """`[R]` int64, the rows' positions."""
        if isinstance(self.at, Tensor):
            return self.at
        return torch.arange(self.at.start, self.at.stop, device=self.keys.device)


class PlannedLayer(CacheLayerMixin, ABC):  # type: ignore[misc]
    """A transformers cache layer over buffers that exist before the pass; subclasses write fresh keys and values.

    A pass may read `length` keys of the `capacity` that the buffer holds. Latent attention has latents in the place of
    keys, and rotary keys in that of values; a buffer has them the other way round, see `KVShape`. `written` is called
    when an attention layer's rows are written, before they attend.
    """

    is_sliding = False

    def __init__(self, length: int, capacity: int, *, latent: bool = False) -> None:
        super().__init__()
        self.length, self.capacity, self.latent = length, capacity, latent
        self.written: Callable[[], None] | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers exist."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write fresh keys and values `[B, Hkv, R, D]`; return the keys and values that attention reads."""
        keys, values = self.write(value_states, key_states) if self.latent else self.write(key_states, value_states)
        if self.written is not None:
            self.written()
        return (values, keys) if self.latent else (keys, values)

    @abstractmethod
    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write fresh keys and values `[B, Hkv, R, D]` to the buffers; return those that attention reads."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the position of the first."""
        return self.length, 0

    def get_seq_length(self) -> int:
        """Return 0, the position of the first key: a model that counts its rows from here scales no query (Llama 4)."""
        return 0

    def get_max_length(self) -> int:
        """Return the capacity."""
        return self.capacity


Observer = Callable[[int, Tensor, Tensor, AttentionParams], None]
"""`(layer, queries [1, Hq, R, D], keys [1, Hkv, length, D], params) -> None`."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The rows of a decode step that torch computes: the next token of each request. Kernels use a `TablePlan`.

    Attributes:
        buffers: of the requests, with keys and values at every position before their rows.
        rows: `[B, 1]` int64 positions, on the model's device.
        positions: the same positions on the host.
        windows: per layer the sliding window in tokens or None, for models that do not pass it to attention.
    """

    buffers: Sequence[KVBuffer]
    rows: Tensor
    positions: tuple[int, ...]
    windows: Sequence[int | None]

    def cache(self) -> Cache:
        """Return a transformers cache that writes the step's rows to the buffers."""
        return Cache(layers=[StepLayer(self, layer) for layer in range(len(self.buffers[0].keys))])


class StepLayer(PlannedLayer):
    """A cache layer that writes each request's fresh keys and values to its own buffer, where attention reads them."""

    def __init__(self, plan: StepPlan, layer: int) -> None:
        length, capacity = max(plan.positions) + 1, max(buffer.capacity for buffer in plan.buffers)
        super().__init__(length, capacity, latent=layer in plan.buffers[0].latent)
        self.plan, self.layer = plan, layer

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write `[B, Hkv, 1, D]` fresh keys and values to the buffers; return them unchanged."""
        for index, (buffer, position) in enumerate(zip(self.plan.buffers, self.plan.positions, strict=True)):
            buffer.keys[self.layer][0, :, position] = keys[index, :, 0]
            buffer.values[self.layer][0, :, position] = values[index, :, 0]
        return keys, values

    def sequences(self) -> list[StoredSequence]:
        """Return the sequence of each request."""
        found = []
        for buffer, position in zip(self.plan.buffers, self.plan.positions, strict=True):
            keys, values, stop = buffer.keys[self.layer], buffer.values[self.layer], position + 1
            found.append(StoredSequence(keys, values, slice(position, stop), stop, None, buffer.states))
        return found
