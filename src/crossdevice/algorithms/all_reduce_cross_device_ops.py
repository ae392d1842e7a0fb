"""An all-reduce by name, with every way of packing."""

from __future__ import annotations

from collections.abc import Sequence

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.packing import Packing
from crossdevice.plans.steps import Buffer
from crossdevice.values.device import Device


class AllReduceCrossDeviceOps(CrossDeviceOps):
    """Runs an algorithm by its name (`"nccl"`, `"hierarchical_copy"`, `"ring"`, ...) on packed values.

    Args:
        all_reduce_alg: the name of an algorithm, ours or an installed package's; an unknown one is refused
            with a list of all names.
        num_packs: the number of packs into which a batch is split; 0 uses the next two arguments instead.
        agg_small_grads_max_bytes: consecutive values smaller than this share a pack; 0 turns this off.
        agg_small_grads_max_group: the largest number of values that share a pack.

    Raises:
        OptionError: the algorithm is unknown, or a number is outside its range.

    >>> import numpy as np
    >>> from crossdevice import PerReplica
    >>> value = PerReplica([np.float32([1, 2]), np.float32([3, 4])])
    >>> AllReduceCrossDeviceOps("ring", num_packs=2).reduce("sum", value, destinations=value).values[1]
    array([4., 6.], dtype=float32)
    """

    def __init__(
        self,
        all_reduce_alg: str = "nccl",
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ) -> None:
        self.packing = Packing(num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group)
        self.all_reduce_alg = all_reduce_alg
        self._algorithm()  # refuses an unregistered name now, not in the first call

    @property
    def agg_small_grads_max_bytes(self) -> int:
        """Size below which consecutive values share a pack."""
        return self.packing.small_max_bytes

    @property
    def agg_small_grads_max_group(self) -> int:
        """Maximum number of values in a pack."""
        return self.packing.small_max_group

    @property
    def uses_engine(self) -> bool:  # type: ignore[override]
        """True if the named algorithm does."""
        return self._algorithm().uses_engine

    def fallback_reason(self, devices: Sequence[Device]) -> str | None:
        """Returns the reason the named algorithm cannot run on these devices; None if it can."""
        return self._algorithm().fallback_reason(devices)

    def plan_sum(self, build: PlanBuilder, destinations: Sequence[Device]) -> Sequence[Buffer]:
        """Plans with the named algorithm."""
        return self._algorithm().plan_sum(build, destinations)

    def _algorithm(self) -> CrossDeviceOps:
        # Made each time: the name may have been set, and plans, not calls, ask for it.
        algorithm: CrossDeviceOps = ALGORITHMS.load(self.all_reduce_alg)()
        return algorithm
