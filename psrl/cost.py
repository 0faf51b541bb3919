"""Work and bytes: FLOPs of forward and backward, and the K/V bytes of a token.

A GEMM's backward costs twice its forward; flash attention's backward 2.5 times (it recomputes the scores).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

GEMM_BACKWARD = 2.0
ATTENTION_BACKWARD = 2.5

CostFunction = Callable[[int, int, int], float]
"""Forward cost of a micro-batch from its tokens, visible attention pairs and logit rows."""


@dataclass(frozen=True, slots=True)
class Work:
    """Amounts that FLOPs follow from."""

    tokens: int
    pairs: int
    """Visible (query, key) pairs."""
    rows: int
    """Rows of the vocabulary projection."""
    path_tokens: int = 0
    """Cached tokens that micro-batches read, once for each that reads them."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Multi-head latent attention: keys and values are expanded from a latent and a rotary part that heads share."""

    query_rank: int
    """0: queries are projected from the hidden state at once."""
    kv_rank: int
    plain_dim: int
    """Of a head's query and key without the rotary part."""
    rotary_dim: int
    value_dim: int

    @property
    def cached_values(self) -> int:
        """Numbers that a layer caches of a token."""
        return self.kv_rank + self.rotary_dim

    def expansion_size(self, num_heads: int) -> int:
        """Parameters of the up-projection of a layer."""
        return self.kv_rank * num_heads * (self.plain_dim + self.value_dim)

    def projections_size(self, hidden_size: int, num_heads: int) -> int:
        """Parameters of all projections of a layer."""
        query_size = num_heads * (self.plain_dim + self.rotary_dim)
        query = self.query_rank * (hidden_size + query_size) if self.query_rank else hidden_size * query_size
        down, out = hidden_size * self.cached_values, num_heads * self.value_dim * hidden_size
        return query + down + self.expansion_size(num_heads) + out


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder as the cost model sees it (whole model, all ranks)."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    output_size: int
    """Columns of the output layer: the vocabulary, or 1 for a value head."""
    gated_mlp: bool = True
    latent: LatentShape | None = None
    """Of latent attention, which has no use for ``num_kv_heads`` and ``head_dim``."""

    @property
    def flops_per_token(self) -> float:
        """Forward FLOPs of a token in the layers' GEMMs."""
        if self.latent is None:
            attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        else:
            attention = self.latent.projections_size(self.hidden_size, self.num_heads)
        mlp = self.hidden_size * self.ffn_size * (3 if self.gated_mlp else 2)
        return 2.0 * self.num_layers * (attention + mlp)

    @property
    def flops_per_pair(self) -> float:
        """Forward FLOPs of a visible (query, key) pair over all layers: scores and weighted values."""
        latent = self.latent
        dims = 2 * self.head_dim if latent is None else latent.plain_dim + latent.rotary_dim + latent.value_dim
        return 2.0 * self.num_layers * self.num_heads * dims

    @property
    def flops_per_path_token(self) -> float:
        """Forward FLOPs of a cached token for a micro-batch that reads it, beside its pairs: latents are expanded."""
        return 0.0 if self.latent is None else 2.0 * self.num_layers * self.latent.expansion_size(self.num_heads)

    @property
    def cached_values(self) -> int:
        """Numbers that a layer caches of a token."""
        return 2 * self.num_kv_heads * self.head_dim if self.latent is None else self.latent.cached_values

    def attention_bytes(self, itemsize: int, tensor_parallel: int = 1) -> int:
        """Output of ``itemsize`` bytes a number and log-sum-exp of a layer's attention on one rank, of a token.

        Where values have fewer numbers than keys this is the most that a backend's output takes: some fill it up.
        """
        latent, head_dim = self.latent, self.head_dim
        if latent is not None:
            head_dim = max(latent.plain_dim + latent.rotary_dim, latent.value_dim)
        return self.num_heads // tensor_parallel * (head_dim * itemsize + max(4, itemsize))

    @property
    def flops_per_row(self) -> float:
        """Forward FLOPs of a row of the output layer."""
        return 2.0 * self.hidden_size * self.output_size

    def forward_flops(self, work: Work) -> float:
        return self._gemm_flops(work) + work.pairs * self.flops_per_pair

    def backward_flops(self, work: Work) -> float:
        return GEMM_BACKWARD * self._gemm_flops(work) + ATTENTION_BACKWARD * work.pairs * self.flops_per_pair

    def _gemm_flops(self, work: Work) -> float:
        path = work.path_tokens * self.flops_per_path_token
        return work.tokens * self.flops_per_token + work.rows * self.flops_per_row + path

    def cost(self, tokens: int, pairs: int, rows: int) -> float:
        """The default CostFunction: forward FLOPs."""
        return self.forward_flops(Work(tokens, pairs, rows))


@dataclass(frozen=True, slots=True)
class KVFootprint:
    """Bytes of the cache on one rank."""

    kv_bytes_per_token: int
    """K and V of one token over the layers and heads of this rank."""
    grad_bytes_per_token: int
    """Gradient accumulators of one token (fp32, or fp64 for an fp64 model)."""
    budget_bytes: int | None = None
    """Most bytes that the cache may hold at once. None: no limit."""
    num_shards: int = 1
    """Ranks over which every block is spread evenly (context parallelism)."""
    attention_bytes_per_token: int = 0
    """Output and log-sum-exp of attention over the layers and heads of this rank, which an update keeps of the spine
    as far as the budget has room. 0: it keeps none."""

    def stored_tokens(self, num_tokens: int) -> int:
        """Tokens for which this rank has room of a block of ``num_tokens``."""
        return -(-num_tokens // self.num_shards)

    def bytes_per_token(self, forward_only: bool) -> int:
        """Of a cached token once its accumulators exist too, if they ever do."""
        return self.kv_bytes_per_token + (0 if forward_only else self.grad_bytes_per_token)

    @classmethod
    def of_layers(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        itemsize: int,
        budget_bytes: int | None = None,
        num_shards: int = 1,
    ) -> KVFootprint:
        """Footprint of ``num_layers`` layers and ``num_kv_heads`` heads of this rank, ``itemsize`` bytes a value."""
        return cls.of_values(2 * num_layers * num_kv_heads * head_dim, itemsize, budget_bytes, num_shards)

    @classmethod
    def of_values(
        cls,
        values: int,
        itemsize: int,
        budget_bytes: int | None = None,
        num_shards: int = 1,
        attention_bytes_per_token: int = 0,
    ) -> KVFootprint:
        """Footprint of a rank that caches ``values`` numbers of ``itemsize`` bytes of a token, over all its layers."""
        return cls(values * itemsize, values * max(4, itemsize), budget_bytes, num_shards, attention_bytes_per_token)
