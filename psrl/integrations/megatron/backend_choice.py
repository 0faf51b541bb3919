"""Which attention backend a model runs on: the configured one, or on CUDA the fastest for its layers on this device.

``auto`` on CUDA is measured once for a kind of device, model layer and versions of what runs it, by rank 0 for all
ranks; the result is a JSON file in the cache folder. Only backends that are deterministic and keep attention's results
take part: FlexAttention is neither everywhere, and takes a minute to compile.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from psrl import __version__
from psrl.errors import PSRLError, UnsupportedError
from psrl.files import cache_dir, staged_text
from psrl.runtime.attention import KEEPING_BACKENDS, resolve_backend
from psrl.runtime.attention.cached_layer import LayerShape
from psrl.runtime.attention.trial import FANS, Fan, TrialTimes, run_trial

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

logger = logging.getLogger(__name__)

CLEARLY_SLOWER = 1.05
"""How much of the fastest backend's time an earlier one may take and still be chosen: ``triton``, which comes first,
copies nothing of a cached path and so needs less memory."""


class BackendChoice(NamedTuple):
    name: str
    detail: str = ""
    """How ``auto`` came to it; empty where the configuration names it."""

    @classmethod
    def unmeasured(cls, backend: str, device_type: str) -> BackendChoice:
        """
        Raises:
            ConfigError: ``backend`` is unknown.
        """
        return cls(resolve_backend(backend, device_type), "auto" if backend == "auto" else "")

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


def choose_backend(
    backend: str, config: TransformerConfig, dtype: torch.dtype, device: torch.device, *, in_place: bool
) -> BackendChoice:
    """Collective over all ranks where ``backend`` is ``auto`` and the device is CUDA.

    Args:
        backend: ``psrl.attention_backend``.
        config: of the model.
        in_place: the model can read a cached path in its blocks, with a backend that can.

    Raises:
        ConfigError: ``backend`` is unknown.
        UnsupportedError: no backend runs the model's layers on this device.
    """
    if backend != "auto" or device.type != "cuda":
        return BackendChoice.unmeasured(backend, device.type)
    return agreed_choice(lambda: measured_choice(layer_shape(config, dtype, device), in_place))


def layer_shape(config: TransformerConfig, dtype: torch.dtype, device: torch.device) -> LayerShape:
    """One tensor-parallel rank's attention in a layer."""
    ranks = config.tensor_model_parallel_size
    heads, head_dim, v_head_dim = config.num_attention_heads // ranks, config.kv_channels, config.kv_channels
    kv_heads = max(1, (config.num_query_groups or config.num_attention_heads) // ranks)
    if config.multi_latent_attention:
        latent: Any = config  # MLATransformerConfig
        kv_heads = heads
        head_dim, v_head_dim = latent.qk_head_dim + latent.qk_pos_emb_head_dim, latent.v_head_dim
    assert head_dim is not None and v_head_dim is not None  # filled in by TransformerConfig
    return LayerShape(heads, kv_heads, head_dim, v_head_dim, dtype, device)


def measured_choice(
    shape: LayerShape, in_place: bool, candidates: Sequence[str] = KEEPING_BACKENDS, fans: Sequence[Fan] = FANS
) -> BackendChoice:
    """The candidate to run such layers with, measured here unless the cache folder has the result.

    Raises:
        UnsupportedError: no candidate runs them.
    """
    kind = _kind(shape, in_place)
    times = _remembered(kind, candidates)
    if times is None:
        times = run_trial(candidates, shape, in_place=in_place, fans=fans)
        _remember(kind, times)
    return choice_of(times, candidates)


def choice_of(times: TrialTimes, candidates: Sequence[str]) -> BackendChoice:
    """The first candidate that is not clearly slower than the fastest.

    Raises:
        UnsupportedError: none has run.
    """
    seconds = times.seconds
    if not seconds:
        reasons = "; ".join(f"{backend}: {refusal}" for backend, refusal in times.refusals.items())
        raise UnsupportedError(f"no attention backend runs this model here: {reasons}")
    limit = CLEARLY_SLOWER * min(seconds.values())
    name = next(backend for backend in candidates if seconds.get(backend, limit + 1) <= limit)
    others = [f"{other} takes {seconds[other] / seconds[name]:.2f}x its time" for other in candidates
              if other in seconds and other != name]  # fmt: skip
    others += [f"{other} cannot run" for other in candidates if other in times.refusals]
    return BackendChoice(name, ", ".join(["auto, measured", *others]))


def agreed_choice(measure: Callable[[], BackendChoice]) -> BackendChoice:
    """What ``measure`` returns or raises on rank 0, on all ranks. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return measure()
    outcome: list[BackendChoice | PSRLError | None] = [None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = measure()
        except PSRLError as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome)
    (choice,) = outcome
    if isinstance(choice, PSRLError):
        raise choice
    assert choice is not None
    return choice


# ------------------------------------------------------------------------------------------------------ the files
def _kind(shape: LayerShape, in_place: bool) -> dict[str, Any]:
    """What a measurement holds for: JSON of text and numbers."""
    device = "cpu"
    if shape.device.type == "cuda":
        properties = torch.cuda.get_device_properties(shape.device)
        device = f"{properties.name} sm_{properties.major}{properties.minor}"
    layer = {
        "device": device,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "v_head_dim": shape.v_head_dim,
        "path": "in place" if in_place else "gathered",
    }
    return layer | {"versions": {"psrl": __version__, "torch": torch.__version__} | _installed()}


def _installed() -> dict[str, str]:
    """Versions of the packages that bring kernels."""
    found = {}
    for name in ("triton", "flash-attn", "flash-attn-3", "flash-attn-4"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _file_name(kind: dict[str, Any]) -> str:
    words = " ".join(str(value) for key, value in kind.items() if key != "versions")
    return re.sub(r"[^a-z0-9]+", "-", words.lower()) + ".json"


def _remembered(kind: dict[str, Any], candidates: Sequence[str]) -> TrialTimes | None:
    """None: not measured yet, or with other versions or candidates."""
    path = cache_dir() / "attention" / _file_name(kind)
    try:
        record = json.loads(path.read_text())
        times = TrialTimes(dict(record["seconds"]), dict(record["refusals"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not a measurement of attention (%s): measured again", path, error)
        return None
    is_whole = {*times.seconds, *times.refusals} == {*candidates}
    return times if record.get("kind") == kind and is_whole else None


def _remember(kind: dict[str, Any], times: TrialTimes) -> None:
    path = cache_dir() / "attention" / _file_name(kind)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged_text(path, json.dumps({"kind": kind, **times._asdict()}, indent=2) + "\n"):
            pass
    except OSError as error:
        logger.warning("%s: cannot write (%s): attention is measured at every start; set PSRL_CACHE", path, error)
