"""Replica of a simulated fleet: its tiers, and the times of its loads and computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.adapters.vllm.scheduler.choice import LoadChoice, LoadRules
from kvstore.index.plans import Place
from kvstore.policies import LRU, open_policy
from kvstore.policies.simulation import SimulatedStore, SimulatedTier
from kvstore.policies.traces import Request
from kvstore.tools.simulate.fleetfile import GIB, FleetPlan, SharedTier

GPU, MEMORY, DISK, SHARED = "gpu", "memory", "disk", "shared"
_PLACES: Final = {MEMORY: Place.MEMORY, DISK: Place.DISK, SHARED: Place.REMOTE}


@dataclass
class Pipe:
    """Connection that carries one transfer after the other.

    Attributes:
        free_s: end of the last transfer.
    """

    gb_per_s: float
    free_s: float = 0.0

    def carry(self, size_bytes: int, begin_s: float) -> float:
        """Return the end of a transfer that may begin at ``begin_s``."""
        if not size_bytes:
            return begin_s
        self.free_s = max(self.free_s, begin_s) + size_bytes / (self.gb_per_s * 1e9)
        return self.free_s


class Shared(NamedTuple):
    """Tier of all replicas, and the connection by which all of them read."""

    tier: SimulatedTier
    pipe: Pipe | None

    @classmethod
    def of(cls, given: SharedTier, policy: str) -> Shared:
        """Open an empty one."""
        pipe = None if given.total_gb_per_s is None else Pipe(given.total_gb_per_s)
        return cls(SimulatedTier(open_policy(policy, round(given.size * GIB))), pipe)


class Served(NamedTuple):
    """Work of a request.

    Attributes:
        num_tokens: tokens of the prompt.
        loaded_tokens: tokens loaded, by tier; those in the GPU's cache included.
        declined_tokens: found, but computed because that was faster.
        computed_tokens: computed.
        begin_s: the begin of computing.
        end_s: the time of the first token.
    """

    num_tokens: int
    loaded_tokens: dict[str, int]
    declined_tokens: int
    computed_tokens: int
    begin_s: float
    end_s: float


class Replica:
    """One vLLM, which computes a prompt after the other, and meanwhile loads for those that wait.

    Attributes:
        weight, load, is_well, credit: as the proxy's routers expect.
        computed_s: seconds of computing so far.
    """

    def __init__(self, plan: FleetPlan, policy: str, shared: Shared | None) -> None:
        self.weight, self.load, self.is_well, self.credit = 1.0, 0, True, 0.0
        self.computed_s = 0.0
        self._plan = plan
        self._pipe = None if shared is None else shared.pipe
        own = {MEMORY: plan.memory, DISK: plan.disk}
        policies = [open_policy(policy, round(tier.size * GIB)) for tier in own.values() if tier is not None]
        if plan.gpu is not None:
            policies.insert(0, open_policy(LRU.name, round(plan.gpu.size * GIB)))
        self._store = SimulatedStore(
            policies, None if shared is None else shared.tier, num_staging=1 if plan.gpu is None else 2
        )
        given = {GPU: plan.gpu, **own, SHARED: plan.shared}
        self.tiers = dict(zip((name for name, tier in given.items() if tier), self._store.tiers, strict=True))
        self._lanes = {name: Pipe(tier.gb_per_s) for name, tier in own.items() if tier is not None}
        if plan.shared is not None:
            self._lanes[SHARED] = Pipe(plan.shared.gb_per_s)
        self._computing: tuple[Request, int] | None = None  # and the chunks found
        self._choice = LoadChoice(LoadRules(only_if_faster=plan.load_only_if_faster))

    def serve(self, request: Request, arrival_s: float, now_s: float) -> Served:
        """Look up a request that arrived earlier, load what is found unless computing is faster, and compute the rest.

        What it computes is found once it is complete, at the time of its first token.
        """
        found = self._find(request)
        num_tokens = sum(map(request.tokens_of, range(len(request.keys))))
        in_gpu_tokens, ready_s, declined = found.get(GPU, 0), arrival_s, {}
        carried = {_PLACES[name]: tokens for name, tokens in found.items() if name != GPU and tokens}
        if carried and self._choice.declines(carried, sum(carried.values())):
            declined, found = found, {GPU: in_gpu_tokens} if in_gpu_tokens else {}
        elif carried:
            ready_s = self._load(found, arrival_s)
            self._choice.loaded(carried, ready_s - arrival_s)
        computed_tokens = max(1, num_tokens - sum(found.values()))  # a prompt's last token is always computed
        compute_s = computed_tokens / self._plan.prefill_tokens_per_s
        if not carried:
            self._choice.computed(computed_tokens, compute_s)
        begin_s = max(now_s, ready_s)
        end_s = begin_s + self._plan.first_token_s + compute_s
        self.computed_s += end_s - begin_s
        declined_tokens = sum(declined.values()) - in_gpu_tokens if declined else 0
        return Served(num_tokens, found, declined_tokens, computed_tokens, begin_s, end_s)

    def complete(self) -> None:
        """Store what the request being served has computed."""
        if self._computing is not None:
            request, found = self._computing
            self._store.store(request.keys, self._sizes_bytes(request), found, request.answer_tokens)
            self._computing = None

    def _sizes_bytes(self, request: Request) -> list[int]:
        return [request.tokens_of(place) * self._plan.bytes_per_token for place in range(len(request.keys))]

    def _find(self, request: Request) -> dict[str, int]:
        """Return the tokens found in each tier."""
        per_token = self._plan.bytes_per_token
        before = [tier.counts.hit_bytes for tier in self.tiers.values()]
        self._computing = request, self._store.load(request.keys, self._sizes_bytes(request))
        return {
            name: (tier.counts.hit_bytes - bytes_before) // per_token
            for (name, tier), bytes_before in zip(self.tiers.items(), before, strict=True)
        }

    def _load(self, found: dict[str, int], begin_s: float) -> float:
        """Return the end of loads from all tiers, which run side by side."""
        sizes_bytes = {name: tokens * self._plan.bytes_per_token for name, tokens in found.items()}
        ends_s = [lane.carry(sizes_bytes[name], begin_s) for name, lane in self._lanes.items()]
        if self._pipe is not None:
            ends_s.append(self._pipe.carry(sizes_bytes[SHARED], begin_s))
        return max(ends_s)
