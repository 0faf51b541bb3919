"""The running plan: micro-batches bound to a device, the cache they share, and the one that is in its forward.

Attention and its recomputation find their micro-batch through the object that travels with the layer's inputs (see
``integrations/megatron/packed.py``). Only what surrounds the layers in a forward (rotary table, output rows) asks
``active_micro_batch``.

A rank may hold several model chunks (virtual pipeline stages). Each has a cache of its own layers: a schedule runs the
micro-batches of one chunk in order, but not those of two.

Under context parallelism this rank computes a part of every micro-batch's tokens, see ``context.py``.

Shape legend: U unique tokens of the plan, T tokens of a micro-batch on this rank, padding included, R logit rows of
this rank, E edges of a micro-batch, e those of this rank's rows (all without context parallelism).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
import torch
from torch import Tensor

from psrl.cache import BlockShard, CacheBytes, KVCache, make_cache
from psrl.errors import PlanError
from psrl.runtime.attention import AttentionLayout, KeptAttention, KeptResult
from psrl.runtime.context import ContextPart, ContextRank, LocalPart, local_part, whole_part
from psrl.runtime.outputs import RowChunk, row_chunks
from psrl.runtime.path_tables import PathTables
from psrl.runtime.routes import TokenRoutes
from psrl.runtime.routing import RouterLoads, RouterPass
from psrl.runtime.transfer import to_device
from psrl.types import Edges, ExecutionPlan, FloatArray, IntArray, MicroBatch

_ACTIVE: ContextVar[BoundMicroBatch | None] = ContextVar("psrl_active_micro_batch", default=None)
_LAYER: ContextVar[Execution | None] = ContextVar("psrl_layer_execution", default=None)


DUMMY = -1
"""Index of a micro-batch that is no part of the plan: ranks run it to keep in step with others. One token, no edges."""


@dataclass(frozen=True)
class BoundMicroBatch:
    """A micro-batch of the plan, or this rank's part of it, with its tensors on the device, ready for a model forward.

    Padding tokens come last: id 0 at position 0, each visible to itself only, so that nothing else depends on them.
    """

    plan: MicroBatch
    num_tokens: int
    """Of the whole micro-batch, padding included."""
    token_ids_T: Tensor
    position_ids_T: Tensor
    layout: AttentionLayout
    """Of this rank's queries and the keys of the path and of the whole micro-batch."""
    rows_R: Tensor
    """Local rows that reach the output layer; one dummy row where no edge is live, so that backward runs."""
    row_temperature_R: Tensor | None
    """None where every temperature is 1."""
    edges_E: Tensor
    edge_rows_e: Tensor
    edge_labels_e: Tensor
    row_chunks: tuple[RowChunk, ...]
    """Rows whose logits may exist at a time."""
    edges: Edges
    """The plan's, which ``edges_E`` are numbers of."""
    token_weights_T: Tensor | None
    """Samples that each token stands for, 0 for padding; None where the session does not count them."""
    unique_T: Tensor | None = None
    """Unique token that each token is, -1 for padding; None where the session has no routes."""
    context: ContextPart | None = None
    """None where this rank computes the whole micro-batch."""

    @property
    def is_dummy(self) -> bool:
        return self.plan.index == DUMMY

    @property
    def has_edges(self) -> bool:
        return len(self.edges_E) > 0


@dataclass(frozen=True)
class Execution:
    """One execution of a micro-batch: what the layers need to know."""

    micro_batch: BoundMicroBatch
    cache: KVCache
    backward: bool
    """Pass 2: a backward follows. Otherwise the forward is all, and a spine micro-batch writes its blocks."""
    attention_backend: str
    path_tables: PathTables | None = None
    """For a micro-batch with a path that attention reads in its blocks; None where it is gathered."""
    router: RouterPass | None = None
    """For expert routers with losses or statistics."""
    routes: TokenRoutes | None = None
    """For expert routers that replay or record."""
    kept: KeptAttention | None = None
    """For a spine micro-batch whose attention pass 1 keeps for pass 2."""

    def kept_result(self, layer: int) -> KeptResult | None:
        """Where attention of a layer of this model chunk keeps its result, or finds it."""
        if self.kept is None:
            return None
        return KeptResult(self.kept, self.micro_batch.plan.index, layer, is_filled=self.backward)


@dataclass(frozen=True)
class RouterSamples:
    """The samples of a session as expert routers see them."""

    token_counts_U: IntArray
    """Samples that hold each unique token."""
    num_tokens: int
    """Sum of the counts: tokens of all samples."""
    loads: RouterLoads | None
    """For balancing losses: filled by a session that ``is_counting``, read by the next."""
    is_counting: bool = False


class Session:
    """One plan on one rank and device. Binds micro-batches lazily and keeps them for both passes."""

    def __init__(
        self,
        plan: ExecutionPlan,
        *,
        chunk_layers: Sequence[int],
        device: torch.device,
        attention_backend: str,
        path_in_place: bool = False,
        token_multiple: int = 1,
        router: RouterSamples | None = None,
        routes: TokenRoutes | None = None,
        context: ContextRank | None = None,
        max_logit_rows: int | None = None,
    ) -> None:
        """
        Args:
            chunk_layers: number of attention layers of each model chunk of this rank.
            path_in_place: attention reads the cached path in its blocks (see ``path_access``).
            token_multiple: micro-batches are padded to a multiple of it (sequence and context parallelism split them
                evenly).
            router: what routers with losses or statistics have to know of the samples.
            routes: experts that routers replay, or record; None: neither.
            context: ranks that share micro-batches; None: this one alone.
            max_logit_rows: most rows of logits at a time; None: all of a micro-batch.

        Raises:
            PlanError: the path is to be read in place, and a cache does not lend its blocks.
        """
        self.plan = plan
        self.device = device
        self.attention_backend = attention_backend
        shard = BlockShard() if context is None else BlockShard(context.rank, context.size)
        self.caches = tuple(make_cache(plan, num_layers, shard) for num_layers in chunk_layers)
        if path_in_place and not (context is None and all(cache.lends_blocks for cache in self.caches)):
            raise PlanError("the path cannot be read in place: the cache has no whole blocks on the device")
        self._path_in_place = path_in_place
        self._context = context
        self._token_multiple = token_multiple
        self._max_logit_rows = max_logit_rows
        self._router = router
        self._routes = routes
        self._kept = tuple(KeptAttention() for _ in self.caches) if plan.kept_attention else ()
        self._bound: dict[int, BoundMicroBatch] = {}

    def execution(self, index: int, *, chunk: int = 0, backward: bool, router_scale: float = 1.0) -> Execution:
        """Micro-batch ``index`` (or ``DUMMY``) on one model chunk.

        Args:
            router_scale: factor of the routers' losses.
        """
        router = None
        if self._router is not None:
            router = RouterPass(
                self._router.loads, self._router.num_tokens, self._router.is_counting and not backward, router_scale
            )
        bound, cache = self._bind(index), self.caches[chunk]
        tables = PathTables(cache, index) if self._path_in_place and bound.plan.path_blocks else None
        kept = self._kept[chunk] if bound.plan.index in self.plan.kept_attention else None
        return Execution(bound, cache, backward, self.attention_backend, tables, router, self._routes, kept)

    @property
    def cache_bytes(self) -> CacheBytes:
        """What the caches took and moved so far; peaks are sums of the chunks'."""
        return reduce(CacheBytes.beside, (cache.bytes for cache in self.caches))

    def check_drained(self) -> None:
        """Raises:
        PlanError: KV blocks or results of attention are left.
        """
        for held in (*self.caches, *self._kept):
            held.check_drained()

    def close(self) -> None:
        """Drop what the caches hold, wherever the plan stopped."""
        for held in (*self.caches, *self._kept):
            held.close()

    @property
    def attention_bytes(self) -> int:
        """Most bytes of attention's results that were kept so far."""
        return sum(kept.peak_bytes for kept in self._kept)

    @cached_property
    def _token_ids_U(self) -> Tensor:
        return self._tensor(self.plan.token_ids_U)

    @cached_property
    def _position_ids_U(self) -> Tensor:
        return self._tensor(self.plan.position_ids_U)

    @cached_property
    def _label_E(self) -> Tensor:
        return self._tensor(self.plan.edges.label_E)

    def _tensor(self, array: IntArray | FloatArray) -> Tensor:
        return to_device(array, self.device)

    def _bind(self, index: int) -> BoundMicroBatch:
        bound = self._bound.get(index)
        if bound is not None:
            return bound
        mb = _DUMMY_MICRO_BATCH if index == DUMMY else self.plan.micro_batches[index]
        num_tokens = max(1, -(-mb.num_tokens // self._token_multiple)) * self._token_multiple
        where = self._context
        part = whole_part(mb, num_tokens) if where is None else local_part(self.plan, mb, num_tokens, where)
        tokens = self._tensor(mb.tokens_T)
        edges = self._tensor(mb.edges_E)
        is_scaled = bool((part.row_temperature_R != 1.0).any())
        context = None if where is None else self._context_part(mb, part, where)
        num_rows = max(1, len(part.rows_R))
        bound = self._bound[index] = BoundMicroBatch(
            plan=mb,
            num_tokens=num_tokens,
            token_ids_T=self._local(self._token_ids_U[tokens], part, num_tokens),
            position_ids_T=self._local(self._position_ids_U[tokens], part, num_tokens),
            layout=part.layout,
            rows_R=self._tensor(part.rows_R) if len(part.rows_R) else tokens.new_zeros(1),
            row_temperature_R=self._tensor(part.row_temperature_R) if is_scaled else None,
            edges_E=edges,
            edge_rows_e=self._tensor(part.edge_rows_e),
            edge_labels_e=self._label_E[edges] if context is None else self._label_E[edges[context.edges_e]],
            row_chunks=row_chunks(part.edge_rows_e, num_rows, self._max_logit_rows or num_rows),
            edges=self.plan.edges,
            token_weights_T=self._token_weights(mb, part, num_tokens),
            unique_T=None if self._routes is None else self._local(tokens, part, num_tokens, padding=-1),
            context=context,
        )
        return bound

    def _context_part(self, mb: MicroBatch, part: LocalPart, where: ContextRank) -> ContextPart:
        return ContextPart(
            where=where,
            sources_S=self._tensor(part.sources_S),
            tap_rows=self._tensor(part.tap.rows),
            tap_keys=self._tensor(part.tap.tokens + mb.path_len),
            edges_e=self._tensor(part.edges_e),
            num_edges=len(mb.edges_E),
        )

    def _token_weights(self, mb: MicroBatch, part: LocalPart, num_tokens: int) -> Tensor | None:
        if self._router is None:
            return None
        return self._local(self._tensor(self._router.token_counts_U[mb.tokens_T]), part, num_tokens)

    def _local(self, values: Tensor, part: LocalPart, num_tokens: int, padding: int = 0) -> Tensor:
        """A value for each of this rank's tokens, ``padding`` for padding, from those of the micro-batch's tokens."""
        if len(values) < num_tokens:
            values = torch.cat([values, values.new_full((num_tokens - len(values),), padding)])
        return values if self._context is None else values[self._tensor(part.tokens_t)]


_NONE = np.empty(0, dtype=np.int64)
_DUMMY_MICRO_BATCH = MicroBatch(
    index=DUMMY,
    is_spine=False,
    tokens_T=_NONE,
    first_S=_NONE,
    last_S=_NONE,
    path_blocks=(),
    own_blocks=(),
    rows_R=_NONE,
    row_temperature_R=np.empty(0),
    edges_E=_NONE,
    edge_rows_E=_NONE,
    completes=_NONE,
    cost=0.0,
)
"""All padding."""


@contextlib.contextmanager
def forwarding(micro_batch: BoundMicroBatch) -> Iterator[None]:
    """Mark ``micro_batch`` as the one whose model forward runs.

    Raises:
        PlanError: another forward is active: forwards do not nest.
    """
    if _ACTIVE.get() is not None:
        raise PlanError("a micro-batch forward is already active")
    token = _ACTIVE.set(micro_batch)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active_micro_batch() -> BoundMicroBatch | None:
    """The micro-batch whose model forward runs now, None outside."""
    return _ACTIVE.get()


def enter_layer(execution: Execution) -> None:
    """Attention tells the rest of its layer, which runs next and without the inputs that say so, whose turn it is."""
    _LAYER.set(execution)


def layer_execution() -> Execution:
    """The execution whose attention ran last, in a forward or in its recomputation.

    Raises:
        PlanError: none has.
    """
    execution = _LAYER.get()
    if execution is None:
        raise PlanError("a layer was called outside a micro-batch of an execution plan")
    return execution
