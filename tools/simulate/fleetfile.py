"""Parser of the file that describes a fleet for ``kvstore simulate --fleet``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvstore.model.errors import ConfigError
from kvstore.policies import Adaptive
from kvstore.tools.yamlfile import read_yaml

Router: TypeAlias = Literal["random", "load", "prefix", "session"]

GIB: Final = 1 << 30
MAX_REPLICAS: Final = 1000
_MAX_ROWS: Final = 100
_REMEDY: Final = "write it as docs/scale.md shows"


def _listed(value: Any) -> Any:  # noqa: ANN401 - from YAML
    return value if isinstance(value, list) else [value]


_Above0: TypeAlias = Annotated[float, Field(ge=1e-6, le=1e15)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class GpuTier(_Strict):
    """vLLM's own prefix cache, which loads nothing. The size is in GiB."""

    size: _Above0


class OwnTier(_Strict):
    """Tier of each replica. The size is in GiB, the speed in 10^9 bytes per second."""

    size: _Above0
    gb_per_s: _Above0


class SharedTier(OwnTier):
    """Tier of all replicas together. ``gb_per_s`` is for each of them, ``total_gb_per_s`` for all."""

    total_gb_per_s: _Above0 | None = None


class FleetPlan(_Strict):
    """Contents of the file: the model, the tiers, and one or several numbers of replicas and routers to compare.

    Attributes:
        bytes_per_token: bytes of KV per token, of all workers of a replica together, as are the sizes of tiers.
        prefill_tokens_per_s: tokens that a replica computes per second.
        first_token_s: seconds that each request takes besides.
        decode_tokens_per_s: tokens of one answer per second; until its end a request counts as load of its replica.
        gpus_per_replica, gpu_price_per_hour: the cost; without a price none is shown.
    """

    bytes_per_token: Annotated[int, Field(ge=1, le=1 << 40)]
    prefill_tokens_per_s: _Above0
    first_token_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    decode_tokens_per_s: _Above0 = 50.0
    replicas: Annotated[
        list[Annotated[int, Field(ge=1, le=MAX_REPLICAS)]], BeforeValidator(_listed), Field(min_length=1)
    ]
    router: Annotated[list[Router], BeforeValidator(_listed), Field(min_length=1)] = ["prefix"]
    policy: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)] = [Adaptive.name]
    gpu: GpuTier | None = None
    memory: OwnTier
    disk: OwnTier | None = None
    shared: SharedTier | None = None
    load_only_if_faster: bool = True
    gpus_per_replica: Annotated[int, Field(ge=1, le=1 << 20)] = 1
    gpu_price_per_hour: _Above0 | None = None


def read_fleet(path: Path) -> FleetPlan:
    """Read a fleet's file.

    Raises:
        ConfigError: the file is invalid; the message names the place and a remedy.
    """
    plan = read_yaml(path, FleetPlan, "the fleet's file", _REMEDY)
    rows = len(plan.replicas) * len(plan.router) * len(plan.policy)
    if rows > _MAX_ROWS:
        raise ConfigError(f"the fleet's file {path} compares {rows} fleets, and {_MAX_ROWS} are the most: name fewer")
    return plan
