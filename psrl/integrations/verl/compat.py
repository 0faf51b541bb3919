"""The pinned upstream versions, and what has to be worked around in them on every device."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from packaging.version import Version

from psrl.errors import PSRLError, UnsupportedError
from psrl.integrations.megatron.hooks import HookSet

VERL = "0.9.1"
MEGATRON_CORE = "0.16.1"
HOOKS = HookSet()
logger = logging.getLogger("psrl")


def install() -> None:
    """Check the versions and apply the hooks. Idempotent."""
    check_versions()
    HOOKS.install()


def check_versions() -> None:
    """Raises:
    UnsupportedError: veRL or Megatron-Core is missing or of another version than psrl is built for.
    """
    found = {name: _version(name) for name in ("verl", "megatron-core")}
    if found["verl"] is None or Version(found["verl"]).release != Version(VERL).release:
        raise UnsupportedError(f"verl {found['verl'] or 'is not installed'}: psrl needs verl=={VERL}")
    if found["megatron-core"] is None or Version(found["megatron-core"]).release < Version(MEGATRON_CORE).release:
        raise UnsupportedError(
            f"megatron-core {found['megatron-core'] or 'is not installed'}: psrl needs megatron-core>={MEGATRON_CORE}"
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@HOOKS.add(
    cause="a bridge for a model with tied embeddings changes the weight map of its class, so that a later model with "
    "an output layer of its own loads and exports the embedding in its place",
    upstream="mbridge/models/qwen2.py:58 (Qwen2Bridge._adjust_mapping_for_shared_weights), inherited by Qwen3Bridge",
    remove_when="mbridge copies the map before it changes it",
)
def bridge_owns_its_weight_map() -> None:
    from mbridge.core.bridge import Bridge

    upstream = Bridge.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self._DIRECT_MAPPING = dict(type(self)._DIRECT_MAPPING)
        upstream(self, *args, **kwargs)

    Bridge.__init__ = __init__


@HOOKS.add(
    cause="has no bridge for Mistral, and one for DeepSeek-V3 that fails with transformers 5 and Megatron-Core 0.16.1",
    upstream="mbridge/models/__init__.py:23, mbridge/models/deepseek_v3.py:157 and :162",
    remove_when="mbridge has bridges that make those of psrl superfluous",
)
def bridges_of_psrl() -> None:
    import psrl.integrations.megatron.mbridge_models  # noqa: F401  registers them


@HOOKS.add(
    cause="only the bridges of Qwen2 and its heirs know that with tied embeddings the last pipeline stage's output "
    "layer is a copy of the embedding; the others look for lm_head.weight, which such a checkpoint has not",
    upstream="mbridge/core/bridge.py:593 (_adjust_mapping_for_shared_weights, _get_hf_shared_weight_keys), overridden "
    "in mbridge/models/qwen2.py:58, not in llama.py and qwen2moe.py",
    remove_when="the base class does what Qwen2Bridge does",
)
def tied_embeddings_on_the_last_stage() -> None:
    from mbridge.core.bridge import Bridge
    from mbridge.models.qwen2 import Qwen2Bridge

    base: Any = Bridge
    base._adjust_mapping_for_shared_weights = Qwen2Bridge._adjust_mapping_for_shared_weights
    base._get_hf_shared_weight_keys = Qwen2Bridge._get_hf_shared_weight_keys


@HOOKS.add(
    cause="an update cuts its mini-batches out one by one, so that none can be planned while the one before it runs",
    upstream="verl/utils/tensordict_utils.py:559 (make_iterator), verl/workers/engine_workers.py:273",
    remove_when="train_mini_batch shows its engine the mini-batches ahead",
)
def mini_batches_are_planned_ahead() -> None:
    from verl.utils import tensordict_utils

    from psrl.integrations.verl.engine.plan_ahead import planned_ahead

    upstream = tensordict_utils.make_iterator
    tensordict_utils.make_iterator = lambda *args, **kwargs: planned_ahead(upstream(*args, **kwargs))


_NOISY_WARNINGS = (DeprecationWarning, FutureWarning, UserWarning)


@contextlib.contextmanager
def quiet_upstream() -> Iterator[None]:
    """Keep upstream prints, log messages below ERROR and warnings off the terminal; psrl's own messages pass.

    If the body raises anything but a psrl error, what was printed goes to stderr first. Does nothing while the
    ``psrl`` logger is at DEBUG. Reaches log handlers that exist when it begins. Wrap the import of veRL and
    Megatron-Core as well: both warn on import.
    """
    if logger.isEnabledFor(logging.DEBUG):
        yield
        return
    printed = io.StringIO()
    if not logging.root.handlers:
        logging.basicConfig(format="%(levelname)s: %(message)s")  # or veRL adds a handler of its own on import
    handlers = _all_handlers()
    try:
        for handler in handlers:
            handler.addFilter(_passes)
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            for category in _NOISY_WARNINGS:
                warnings.simplefilter("ignore", category)
            yield
    except PSRLError:
        raise  # says what is wrong by itself
    except BaseException:
        sys.stderr.write(printed.getvalue())
        raise
    finally:
        for handler in handlers:
            handler.removeFilter(_passes)


def _all_handlers() -> list[logging.Handler]:
    """Of the root logger and of those that print by themselves, as torch's and transformers' do."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return [handler for each in loggers if isinstance(each, logging.Logger) for handler in each.handlers]


def _passes(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or record.name.partition(".")[0] == "psrl"
