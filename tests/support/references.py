"""Slow references that use nothing but transformers' own forward, for the fast paths to be compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from qcfuse_rag import LanguageModel, Prompt
from qcfuse_rag.fusion.pipeline import Prefilled
from qcfuse_rag.prompts.segments import Role, Span
from qcfuse_rag.runtime.attention.dispatch import ATTENTION_NAME
from qcfuse_rag.store.chunk import ChunkKV
from qcfuse_rag.store.key import Base
from qcfuse_rag.verification.exactness import stock_attention

Table = list[tuple[Tensor, Tensor]]
"""Per layer keys and values, `[1, Hkv, T, D]`, rotated at their positions; of a recurrent layer the hidden states that
its mixer reads, `[1, 1, T, H]`, twice."""


def error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of two tensors."""
    return float((ours - theirs).abs().max())


def empty_cache(lm: LanguageModel) -> Cache:
    """Return transformers' cache for a model's attention layers; recurrent ones compute without, see `over_table`."""
    attention = lm.attention_layers
    return Cache(layers=[DynamicLayer() if n in attention else LinearAttentionLayer() for n in range(lm.n_layers)])


@contextmanager
def over_table(lm: LanguageModel, before: list[Tensor], rows: list[int]) -> Iterator[dict[int, Tensor]]:
    """Have the mixers of recurrent layers compute whole texts without a cache, and return the rows alone.

    `before` are the hidden states of each layer at earlier positions, of which rows are replaced. The context gives the
    hidden states that the mixers read, by layer.
    """
    read = dict[int, Tensor]()

    def enter(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = args[0] if args else kwargs.pop("hidden_states")
        options = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
        text = torch.zeros(1, rows[-1] + 1, hidden.shape[-1])
        if before:
            text[:, : before[layer].shape[2]] = before[layer][:, 0, : rows[-1] + 1]
        text[:, rows] = hidden
        read[layer] = text[:, None]
        return (text,), options

    def leave(output: Tensor) -> Tensor:
        return output[:, rows]

    hooks = []
    for layer, recurrent in lm.recurrent.items():
        mixer = lm.model.get_decoder().get_submodule(recurrent.mixer)
        hooks.append(mixer.register_forward_pre_hook(lambda _, a, k, layer=layer: enter(layer, a, k), with_kwargs=True))
        hooks.append(mixer.register_forward_hook(lambda _, __, output: leave(output)))
    try:
        yield read
    finally:
        for hook in hooks:
            hook.remove()


def table_of(lm: LanguageModel, cache: Cache, read: dict[int, Tensor]) -> Table:
    """Return what a pass has left of each layer."""
    table = dict.fromkeys(range(lm.n_layers), (torch.zeros(1, 1, cache.get_seq_length(), 1),) * 2)
    for n in lm.attention_layers:
        table[n] = in_order(lm.shapes[n].latent, cache.layers[n].keys, cache.layers[n].values)
    table |= {layer: (hidden, hidden) for layer, hidden in read.items()}
    return [*table.values()]


def in_order(latent: bool, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two sides of a cache as a buffer has them, or the other way round: latent attention swaps them."""
    return (values, keys) if latent else (keys, values)


@torch.inference_mode()
def plain_forward(lm: LanguageModel, ids: tuple[int, ...]) -> tuple[Tensor, Table]:
    """Run the model as transformers would: `[T, vocabulary]` logits and the cache."""
    cache = empty_cache(lm)
    with stock_attention(lm), over_table(lm, [], [*range(len(ids))]) as read:
        logits = lm.model(
            input_ids=torch.tensor([ids], device=lm.device), past_key_values=cache, use_cache=True
        ).logits[0]
    return logits, stored_form(lm, table_of(lm, cache, read))


@torch.inference_mode()
def greedy_continuation(lm: LanguageModel, ids: tuple[int, ...], count: int) -> list[int]:
    """Continue greedily, running the whole text afresh for every token."""
    text = list(ids)
    with stock_attention(lm):
        for _ in range(count):
            text.append(int(lm.model(input_ids=torch.tensor([text], device=lm.device)).logits[0, -1].argmax()))
    return text[len(ids) :]


@torch.inference_mode()
def alone_at(lm: LanguageModel, ids: tuple[int, ...], start: int, before: tuple[int, ...] = ()) -> Table:
    """Compute what a buffer holds of a segment behind `before`, at positions `start ...` of the prompt."""
    return stored_form(lm, _alone_at(lm, ids, start, before))


def _alone_at(lm: LanguageModel, ids: tuple[int, ...], start: int, before: tuple[int, ...]) -> Table:
    cache = empty_cache(lm)
    first = start - len(before)
    text = torch.tensor([before + ids], device=lm.device)
    positions = torch.arange(first, start + len(ids), device=lm.device)[None]
    with stock_attention(lm), over_table(lm, [], [*range(text.shape[1])]) as read:
        lm.model(input_ids=text, position_ids=positions, past_key_values=cache, use_cache=True)
    table = table_of(lm, cache, read)
    return [(keys[:, :, len(before) :], values[:, :, len(before) :]) for keys, values in table]


@torch.inference_mode()
def stored_table(lm: LanguageModel, prompt: Prompt, base: Base | Callable[[Span], tuple[int, ...]]) -> Table:
    """Assemble every segment of a prompt by the model's own forward, at its place.

    Passages are computed behind the text of a base, or the text that a function returns for each.
    """
    tables = []
    for span in prompt.spans:
        before: tuple[int, ...] = ()
        if span.segment.role is Role.CHUNK:
            before = base.prefix(prompt.prefix_ids) if isinstance(base, Base) else base(span)
        tables.append(_alone_at(lm, span.segment.ids, span.start, before))
    return [
        (torch.cat([t[layer][0] for t in tables], dim=2), torch.cat([t[layer][1] for t in tables], dim=2))
        for layer in range(lm.n_layers)
    ]


@torch.inference_mode()
def sequential_fusion(lm: LanguageModel, ids: tuple[int, ...], rows: list[int], table: Table) -> tuple[Tensor, Table]:
    """Recompute rows one at a time in ascending order, each over what stands before it.

    A row sees only earlier positions, so when its turn comes they are final: one token at a time gives what one pass
    over all rows must give.

    Rows are ascending, and the last token is one of them. Returned are `[vocabulary]` logits after the last row, and
    the completed table.
    """
    table = [(keys.clone(), values.clone()) for keys, values in table]
    logits = torch.empty(0)
    with stock_attention(lm):
        for row in rows:
            cache = empty_cache(lm)
            for layer in lm.attention_layers:
                sides = (side[:, :, :row] for side in table[layer])
                cache.update(*in_order(lm.shapes[layer].latent, *sides), layer)
            with over_table(lm, [keys for keys, _ in table], [row]) as read:
                out = lm.model(
                    input_ids=torch.tensor([[ids[row]]], device=lm.device),
                    position_ids=torch.tensor([[row]], device=lm.device),
                    past_key_values=cache,
                    use_cache=True,
                )
            logits = out.logits[0, -1]
            for sides, fresh in zip(table, table_of(lm, cache, read), strict=True):
                for side, new in zip(sides, fresh, strict=True):
                    side[:, :, row] = new[:, :, -1]
    return logits, stored_form(lm, table)


@torch.inference_mode()
def stored_form(lm: LanguageModel, table: Table) -> Table:
    """Return a table with what a buffer holds of recurrent layers, by the mixers' own linear layers."""
    table = [*table]
    for layer, recurrent in lm.recurrent.items():
        mixer, hidden = lm.model.get_decoder().get_submodule(recurrent.mixer), table[layer][0][:, 0]
        products = zip(recurrent.projections, recurrent.used, strict=True)
        inputs = torch.cat([mixer.get_submodule(name)(hidden)[..., used] for name, used in products], -1)
        shape = recurrent.shape
        whole = torch.zeros(1, hidden.shape[1], 2 * shape.kv_heads * shape.key_dim)
        whole[..., : inputs.shape[-1]] = inputs
        halves = whole.view(1, hidden.shape[1], 2 * shape.kv_heads, shape.key_dim).transpose(1, 2)
        table[layer] = halves[:, : shape.kv_heads], halves[:, shape.kv_heads :]
    return table


class Observed(NamedTuple):
    """What a layer of `layerwise_fusion` saw: its rows, and their stored and fresh keys and values."""

    rows: list[int]
    stored: tuple[Tensor, Tensor]
    fresh: tuple[Tensor, Tensor]


@torch.inference_mode()
def layerwise_fusion(
    lm: LanguageModel,
    ids: tuple[int, ...],
    rows: list[int],
    table: Table,
    *,
    rows_of: Callable[[int, list[int], Observed | None], list[int]] | None = None,
    correct: Callable[[int, Observed, Table], None] | None = None,
    visible: set[int] | None = None,
) -> tuple[Tensor, Table]:
    """Recompute rows of a Llama layer by layer, written out, every row attending by itself.

    Args:
        lm: a Llama.
        ids: the whole prompt.
        rows: positions to begin with, ascending.
        table: keys and values of all positions.
        rows_of: the rows of a layer, given those of the layer before and what it saw.
        correct: changes the table of a layer when its fresh keys and values are in.
        visible: positions that may be seen at all; all if None.

    Returns:
        `[vocabulary]` logits after the last row, and the completed table.
    """
    table = [(keys.clone(), values.clone()) for keys, values in table]
    decoder = lm.model.model
    hidden = decoder.embed_tokens(torch.tensor([[ids[row] for row in rows]], device=lm.device))
    cos, sin = decoder.rotary_emb(hidden, torch.arange(len(ids), device=lm.device)[None])
    seen: Observed | None = None
    for index, layer in enumerate(decoder.layers):
        if rows_of is not None:
            left = rows_of(index, rows, seen)
            hidden = hidden[:, [rows.index(row) for row in left]]
            rows = left
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        shape = (1, len(rows), -1, attention.head_dim)
        query, key, value = (
            project(normed).view(shape).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, cos[:, rows], sin[:, rows])
        keys, values = table[index]
        seen = Observed(rows, (keys[:, :, rows].clone(), values[:, :, rows].clone()), (key, value))
        keys[:, :, rows], values[:, :, rows] = key, value
        if correct is not None:
            correct(index, seen, table)
        groups = query.shape[1] // keys.shape[1]
        outputs = []
        for place, row in enumerate(rows):
            looked_at = [p for p in range(row + 1) if visible is None or p in visible]
            k, v = (part[0, :, looked_at].repeat_interleave(groups, 0) for part in (keys, values))
            weights = (k @ query[0, :, place, :, None])[..., 0].mul(attention.scaling).softmax(-1)
            outputs.append((weights[:, None] @ v).reshape(-1))
        hidden = hidden + attention.o_proj(torch.stack(outputs))[None]
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return lm.model.lm_head(decoder.norm(hidden))[0, -1], table


class Whole(NamedTuple):
    """What `whole_forward` computed: logits, attention `[L, Hq, T, T]`, and keys and values before and after."""

    logits: Tensor
    attention: Tensor
    fresh: Table
    table: Table


class StoredPositions(DynamicLayer):  # type: ignore[misc]
    """A layer's cache in which some positions hold what was stored, whatever the model computes for them."""

    def __init__(self, stored: tuple[Tensor, Tensor], kept: list[int]) -> None:
        super().__init__()
        self.stored, self.kept = stored, kept

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        self.fresh = keys, values
        keys, values = keys.clone(), values.clone()
        for new, old in ((keys, self.stored[0]), (values, self.stored[1])):
            new[:, :, self.kept] = old[:, :, self.kept]
        done: tuple[Tensor, Tensor] = super().update(keys, values, *args, **kwargs)
        return done


@torch.inference_mode()
def whole_forward(lm: LanguageModel, ids: tuple[int, ...], table: Table, kept: list[list[int]]) -> Whole:
    """Run the whole prompt through the model's own eager forward, some positions showing stored keys and values.

    A position that shows what was stored from some layer on might as well not have been computed there: nobody sees it.
    `kept` are these positions of each layer.
    """
    latent = [shape.latent for shape in lm.shapes]
    stored = [in_order(swapped, *sides) for swapped, sides in zip(latent, table, strict=True)]
    cache = Cache(layers=[StoredPositions(sides, own) for sides, own in zip(stored, kept, strict=True)])
    lm.model.set_attn_implementation("eager")
    try:
        out = lm.model(
            torch.tensor([ids], device=lm.device), past_key_values=cache, use_cache=True, output_attentions=True
        )
    finally:
        lm.model.set_attn_implementation(ATTENTION_NAME)
    attention = torch.cat(list(out.attentions))
    fresh = [in_order(swapped, *layer.fresh) for swapped, layer in zip(latent, cache.layers, strict=True)]
    return Whole(out.logits[0, -1], attention, fresh, table_of(lm, cache, {}))


def eager_attention(lm: LanguageModel, ids: tuple[int, ...]) -> Tensor:
    """Return transformers' own attention weights over a text, `[L, Hq, T, T]`, of layers with keys of their own."""
    return whole_forward(lm, ids, plain_forward(lm, ids)[1], [[]] * lm.n_layers).attention[: lm.n_layers]


def assert_chunk_is(lm: LanguageModel, chunk: ChunkKV, table: Table, start: int) -> None:
    """Compare a stored chunk with keys and values computed at positions `start ...`."""
    positions = torch.arange(start, start + chunk.n_tokens, device=lm.device)
    for layer, (keys, values) in enumerate(table):
        ours, theirs = (block[None].to(lm.device) for block in chunk.layer(layer))
        assert error(lm.ropes[layer].rotated(ours, positions), keys) <= 1e-4
        assert error(theirs, values) <= 1e-4


def assert_same_layers(first: ChunkKV, second: ChunkKV, tolerance: float = 0.0) -> None:
    """Compare the keys and values of two stored chunks."""
    for layer in range(first.n_layers):
        for ours, theirs in zip(first.layer(layer), second.layer(layer), strict=True):
            assert error(ours, theirs) <= tolerance


def assert_prefilled(done: Prefilled, logits: Tensor, table: Table, tolerance: float = 1e-4) -> None:
    """Assert that a prefill has a reference's logits of the first token, and its keys and values in every layer."""
    assert error(done.logits, logits) <= tolerance
    for layer, (keys, values) in enumerate(table):
        assert error(done.buffer.keys[layer], keys) <= tolerance
        assert error(done.buffer.values[layer], values) <= tolerance
