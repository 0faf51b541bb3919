"""Systems that psrl is compared with, and psrl with one mechanism switched off: policies of the same engine.

A system says which equal tokens are shared, how the tree is divided into micro-batches, and how long the cache keeps
what it holds. Gradients are the same under all of them; bytes, work and time are not. Without any sharing (veRL's own
path) there is no plan: that is ``psrl.enable=false``, the name ``unshared`` here.

Shape legend: N tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from psrl.errors import ConfigError
from psrl.micro_batching import (
    Divide,
    by_labels,
    by_pages,
    by_rows,
    by_runs,
    by_tokens,
    page_labels,
    trie_labels,
    with_labels,
)
from psrl.tree import PrefixTree, build_tree
from psrl.types import CachePolicy, IntArray, SampleBatch

PAGE_TOKENS = 16
"""Of a page in vLLM."""
UNSHARED = "unshared"

Labels = Callable[[SampleBatch, PrefixTree, int], IntArray]
"""[N] labels of a batch's tokens, from its tree and the token budget: equal tokens with other labels are not shared."""


@dataclass(frozen=True)
class System:
    """One way of sharing prefixes."""

    name: str
    stands_for: str
    divide: Divide = by_tokens
    labels: Labels | None = None
    """None: all equal prefixes are shared."""
    cache: CachePolicy = CachePolicy()  # noqa: RUF009  immutable
    keeps_attention: bool = True
    """Whether an update keeps attention's results of the spine between its passes, where the settings allow it. The
    caches of serving engines hold K/V only."""

    def prepare(self, batch: SampleBatch, max_tokens: int) -> SampleBatch:
        """The batch with the system's labels as one more input that has to be equal. Plans are made of that batch."""
        if self.labels is None or not batch.num_samples:
            return batch
        return with_labels(batch, self.labels(batch, build_tree(batch), max_tokens))


def paged(name: str, stands_for: str, page_tokens: int, *, serves: bool) -> System:
    """A system whose blocks are pages of ``page_tokens`` tokens, shared only whole.

    Args:
        serves: keep K/V to the end, those of leaves too, and nothing of attention, as a serving engine's cache.
    """

    def labels(batch: SampleBatch, tree: PrefixTree, max_tokens: int) -> IntArray:
        return page_labels(batch, tree, page_tokens)

    policy = CachePolicy(page_tokens, keeps=serves, stores_leaves=serves)
    return System(name, stands_for, by_pages(page_tokens), labels, policy, keeps_attention=not serves)


_ALL = (
    System("psrl", "psrl with all its mechanisms"),
    System(
        "tree_packing",
        "sharing inside a micro-batch only, as tree training in AReaL, TRL and verl-MAGI; psrl without sharing between "
        "micro-batches",
        by_labels,
        trie_labels,
    ),
    paged(
        "paged",
        f"vLLM's prefix cache: pages of {PAGE_TOKENS} tokens, of every token, kept to the end",
        PAGE_TOKENS,
        serves=True,
    ),
    System(
        "radix",
        "SGLang's prefix cache: a radix tree of every token, kept to the end",
        cache=CachePolicy(keeps=True, stores_leaves=True),
        keeps_attention=False,
    ),
    System("no_self_sharing", "psrl without cutting what the same samples have over micro-batches", by_runs),
    paged("no_adaptive_blocks", f"psrl with blocks of {PAGE_TOKENS} tokens", PAGE_TOKENS, serves=False),
    System("no_dynamic_cache", "psrl with blocks freed at the end", cache=CachePolicy(keeps=True)),
    System("no_kept_attention", "psrl with attention of the spine computed in both passes", keeps_attention=False),
    System("no_token_wise", "psrl with micro-batches of equally many samples", by_rows),
)
SYSTEMS: dict[str, System] = {system.name: system for system in _ALL}
PSRL = SYSTEMS["psrl"]


def find_system(name: str) -> System:
    """
    Raises:
        ConfigError: there is none of that name.
    """
    if name not in SYSTEMS:
        raise ConfigError(f"the sharing system must be one of {', '.join(SYSTEMS)}, got {name!r}")
    return SYSTEMS[name]
