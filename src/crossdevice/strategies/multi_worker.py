"""The strategy for several processes: each has some of the devices, and all run the same program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce
from crossdevice.errors import MismatchError, OptionError
from crossdevice.process_groups.cluster import Cluster, cluster_from_env
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.strategies.data.input import DealtDataset, InputContext, batches_of, check_input_options
from crossdevice.strategies.extended import StrategyExtended
from crossdevice.strategies.mirrored import MirroredStrategy, default_devices
from crossdevice.values.device import Device, check_listed, host_device
from crossdevice.values.options import CommunicationOptions


class MultiWorkerMirroredStrategy(MirroredStrategy):
    """Runs a function on the devices of several processes at once, and keeps variables in step on all.

    Every process runs the same program: it makes a strategy with devices of its own, and then the same
    calls in the same order. Replicas are numbered process by process, in the order of ranks. Reductions,
    gathers and reads of variables that are synchronized on reading take all processes; a process that
    does not come is named in the others' error. A replica function that raises ends the run on all.

    Args:
        cluster_resolver: which process of how many this is; None asks the launcher's environment variables.
        communication_options: the defaults of all reductions.
        devices: those of this process, one replica for each. None means its share of the host's GPUs or
            cores, as in MirroredStrategy.
        group: a group that has been formed already, in place of `cluster_resolver`.
        own_random_streams: as in MirroredStrategy, with the numbers that replicas have among all processes.

    Raises:
        OptionError: the environment describes no launch, or an argument is outside its range.
        ProcessGroupError: the other processes could not be reached.
        DeadlineError: not all processes came in time.

    >>> from crossdevice.testing import run_ranks
    >>> from crossdevice import get_replica_context
    >>> def program(group):
    ...     strategy = MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], group=group)
    ...     numbers = strategy.run(lambda: get_replica_context().replica_id_in_sync_group)
    ...     return numbers.values, int(strategy.reduce("sum", numbers, axis=None))
    >>> run_ranks(2, program)
    [((0, 1), 6), ((2, 3), 6)]
    """

    def __init__(
        self,
        cluster_resolver: Cluster | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: Sequence[Device | str] | None = None,
        group: ProcessGroup | None = None,
        own_random_streams: bool = False,
    ) -> None:
        if cluster_resolver is not None and not isinstance(cluster_resolver, Cluster):
            raise OptionError(
                f"cluster_resolver must be a Cluster or None, got {type(cluster_resolver).__name__}; "
                "crossdevice.cluster_from_env() makes one"
            )
        if cluster_resolver is not None and group is not None:
            raise OptionError("both cluster_resolver and group were given; expected one of them")
        if devices is not None:  # before the others of a group would wait for this process
            check_listed(devices)
        if group is None:
            cluster_resolver = cluster_resolver or cluster_from_env()
            group = cluster_resolver.form_group()
        self._cluster, self._group = cluster_resolver, group
        ops = CollectiveAllReduce(options=communication_options, group=group)
        own = share_of(cluster_resolver) if devices is None else devices
        super().__init__(own, ops, own_random_streams=own_random_streams)
        self._are_devices_given = devices is not None

    def _extended_of(self, ops: CrossDeviceOps) -> StrategyExtended:
        self._counts = _numbers_of_all(self._group, len(self._devices))
        if len(set(self._counts)) > 1:
            self._group.compare_always()
        self.first_replica = sum(self._counts[: self._group.rank])
        return StrategyExtended(self._devices, ops, sum(self._counts))

    @property
    def cluster_resolver(self) -> Cluster | None:
        """The processes of the launch; None if the strategy was given a group."""
        return self._cluster

    @property
    def group(self) -> ProcessGroup:
        """The group in which processes meet."""
        return self._group

    @property
    def is_chief(self) -> bool:
        """True on rank 0, the process that speaks for all."""
        return self._group.rank == 0

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Calls `fn` once per replica of this process; all processes call it together.

        As in MirroredStrategy, but that results come back as PerReplica even from a process with one replica,
        so that a program does not depend on how replicas are shared among processes. After an exception
        in one process the others raise a ProcessGroupError where they next meet, and a new group
        has to be formed.

        Args:
            fn: the function, called with `args` and `kwargs`.
            args: its arguments; of distributed ones each replica gets its own component.
            kwargs: its keyword arguments, likewise.
            options: only `timeout_seconds` is used, a deadline for the replicas of this process to meet;
                other processes are waited for as the group and each call's own options say.

        Returns:
            A PerReplica of what the replicas of this process returned.

        Raises:
            ReplicaError: replicas make different calls, or some have ended.
            DeadlineError: a replica did not come in time.
            ProcessGroupError: another process raised or was lost.
        """
        try:
            return super().run(fn, args, kwargs, options)
        except BaseException as error:
            if not (isinstance(error, MismatchError) and error.is_on_all_ranks):
                what = str(error).strip().partition("\n")[0]
                self._group.give_up(f"{type(error).__name__}: {what}" if what else type(error).__name__)
            error.add_note(f"on {self._group.members[self._group.rank]} of {self._group.size}")
            raise

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: Any = None,
    ) -> Iterable[Any]:
        """Distributes batches that `dataset_fn(InputContext)` makes on each process for its own replicas.

        A process is an input pipeline. All go on until the last has no more batches; replicas without a
        batch get empty arrays.

        Args:
            dataset_fn: called once, with an InputContext; returns an iterable of batches for one replica
                each.
            options: TensorFlow's; nothing depends on it.

        Returns:
            An iterable of PerReplicas.

        Raises:
            ConversionError: the function returned no iterable.
        """
        check_input_options(options)
        group = self._group
        context = InputContext(group.size, group.rank, self.num_replicas_in_sync)
        ops, host = self._extended.cross_device_ops, host_device(0)

        def of_all_processes(number: int) -> list[int]:
            return [int(count) for count in ops.gather(np.array([number]), host)]

        return DealtDataset(batches_of(dataset_fn(context), None), self._placement, of_all_processes)

    def explain(self) -> str:
        """Describes this process, its engine and devices, and how values are reduced.

        Returns:
            Text for people.

        >>> print(MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]).explain())
        MultiWorkerMirroredStrategy: rank 0 of 1 on threads, replicas 0 to 1 of 2: cpu:0, cpu:1
        CollectiveAllReduce: reduces over the replicas of all processes (2)
        """
        names = ", ".join(map(str, self._devices))
        last = self.first_replica + len(self._devices) - 1
        own = f"replica {last}" if last == self.first_replica else f"replicas {self.first_replica} to {last}"
        group, counts = self._group, " + ".join(map(str, self._counts))
        return (
            f"MultiWorkerMirroredStrategy: rank {group.rank} of {group.size} on {group.engine_name}, "
            f"{own} of {sum(self._counts)}: {names}\n"
            f"CollectiveAllReduce: reduces over the replicas of all processes ({counts})"
        )

    def __repr__(self) -> str:
        names = [str(device) for device in self._devices]
        return f"MultiWorkerMirroredStrategy(rank {self._group.rank} of {self._group.size}, {names})"


def share_of(cluster: Cluster | None) -> Sequence[Device]:
    """Returns the devices of a process that names none."""
    if cluster is None or cluster.local_rank is None or cluster.local_size is None:
        return default_devices()
    return default_devices(cluster.local_rank, cluster.local_size)


def _numbers_of_all(group: ProcessGroup, number: int) -> tuple[int, ...]:
    with group.call("make a MultiWorkerMirroredStrategy", b"strategy") as call:
        records = call.all_gather(number.to_bytes(8, "little"))
    return tuple(int.from_bytes(record, "little") for record in records)
