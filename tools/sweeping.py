"""Implementation of ``kvstore sweep``: a sweep of the storage behind a URL."""

from __future__ import annotations

from contextlib import closing
from typing import Final

from kvstore.model.errors import ConfigError
from kvstore.tiers import leads_to
from kvstore.tiers.object.sweep import Limits, SweepReport, sweep
from kvstore.tiers.object.tier import open_store
from kvstore.tiers.object.url import parse_target
from kvstore.tools.console import Tick

_GIB: Final = 1 << 30
_DAY_S: Final = 86_400


def sweep_url(
    url: str, *, max_size_gib: float | None, max_age_days: float | None, dry_run: bool, tick: Tick
) -> SweepReport:
    """Sweep the storage behind a URL, see ``kvstore.tiers.object.sweep``.

    Raises:
        ConfigError: the URL leads to no store of objects, or another sweep is under way.
        TierError: the storage failed.
    """
    if not leads_to(url, "object"):
        raise ConfigError("only a store of objects or a shared folder is swept: s3://, az://, gs:// or file://")
    limits = Limits(
        None if max_size_gib is None else int(max_size_gib * _GIB),
        None if max_age_days is None else max_age_days * _DAY_S,
    )
    with closing(open_store(parse_target(url, {}))) as store:
        return sweep(store, limits, dry_run=dry_run, tick=tick)
