"""A communication hook for DistributedDataParallel, with gradients that do not depend on buckets."""

# DistributedDataParallel compares a hook's annotations with types, so here they must not be strings.

import gc
import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce
from crossdevice.errors import OptionError
from crossdevice.process_groups.background import BackgroundThread
from crossdevice.process_groups.engines.torch_engine import form_group
from crossdevice.process_groups.group import TIMEOUT_SECONDS, ProcessGroup
from crossdevice.recording.recorder import Leaves, as_one_call, digests_by_path, is_recording, write_call
from crossdevice.values.options import CommunicationOptions, Precision
from crossdevice.values.quantities import counted
from crossdevice.values.reduce_op import ReduceOp


class ReproducibleMean:
    """State of `reproducible_hook`: the model's processes, and a worker thread that reduces buckets in order.

    The processes are those of the model's own `process_group` or `device_mesh`. The group is formed when
    the first bucket is reduced, so this may be created before `init_process_group`. Models on the same
    processes may share one; a bucket of a model on other processes is refused.

    Args:
        group: a group of crossdevice or of torch.distributed to use instead of the model's own.
        precision: `"accurate"` adds in a wider type in the order of ranks and rounds once; `"exact"` rounds
            the true mean, so the order of ranks does not matter.

    Raises:
        OptionError: the precision is unknown, or the group is of another kind.

    >>> state = ReproducibleMean(precision="exact")
    >>> state.group is None  # until the first bucket
    True
    """

    def __init__(
        self, group: "ProcessGroup | dist.ProcessGroup | None" = None, precision: Precision = "accurate"
    ) -> None:
        check_group(group)
        self._options = CommunicationOptions(precision=precision)
        self._given = group if isinstance(group, ProcessGroup) else None
        self._processes = group if isinstance(group, dist.ProcessGroup) else None
        self._ranks = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else None
        self._ops: CollectiveAllReduce | None = None
        self._of_models: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._names: dict[int, str] = {}
        self._thread = BackgroundThread("crossdevice gradients")

    @property
    def group(self) -> ProcessGroup | None:
        """The group in which gradients are exchanged; None until the first bucket, unless one was given."""
        return self._given if self._ops is None else self._ops.group

    def __reduce__(self) -> Any:
        """Copies and saves the settings without the group: a copy forms one of its own."""
        return type(self), (None, self._options.precision)

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the mean of a bucket over all processes, after those started before.

        Args:
            bucket: the bucket that PyTorch gives a hook.

        Returns:
            A future of the bucket's mean.

        Raises:
            OptionError: the bucket's model is on other processes.
        """
        self._check_model_of(bucket.parameters())
        gradients = bucket.buffer()
        if gradients.is_cuda:
            torch.cuda.current_stream(gradients.device).synchronize()
        ended: torch.futures.Future[Any] = torch.futures.Future(
            devices=[gradients.device] if gradients.is_cuda else None
        )

        def reduce() -> None:
            try:
                result = self._recorded_mean(bucket, gradients) if is_recording() else self._mean(gradients)
                if gradients.is_cuda:
                    torch.cuda.current_stream(gradients.device).synchronize()
            except BaseException as error:
                ended.set_result(error)
                raise
            ended.set_result(result)

        self._thread.submit(reduce)
        return ended.then(_result_of)

    def _mean(self, gradients: torch.Tensor) -> Any:
        if self._ops is None:
            group = self._given
            if group is None:
                assert self._processes is not None
                group = formed_group(self._processes, "communication hook")
            self._ops = CollectiveAllReduce(options=self._options, group=group)
        # Not into the bucket: DistributedDataParallel copies gradients from wherever the result is.
        return self._ops.reduce(ReduceOp.MEAN, gradients, gradients)

    def _recorded_mean(self, bucket: dist.GradBucket, gradients: torch.Tensor) -> Any:
        """Computes the mean, recorded by parameter names, since buckets may differ from run to run."""
        names = [self._names.get(id(parameter), "without a name") for parameter in bucket.parameters()]
        parts = bucket.gradients()
        before = _by_name(names, digests_by_path(_parts(names, gradients, parts)))
        with as_one_call():
            result = self._mean(gradients)
        after = _by_name(names, digests_by_path(_parts(names, result, parts)))
        assert self._ops is not None
        assert self._ops.group is not None
        for name in names:
            write_call(f"mean of gradient {name}", self._ops.group.rank, before[name], after[name])
        return result

    def _check_model_of(self, parameters: list[torch.Tensor]) -> None:
        """Refuses buckets of a model on other processes; each model is looked for once."""
        if self._of_models.get(id(parameters[0])) is parameters[0]:
            return
        models = _models_with(parameters[0], self)
        for model in models:
            self._check_ranks(dist.get_process_group_ranks(model.process_group))
            self._processes = self._processes or model.process_group
        if self._ranks is None and self._given is None:
            raise OptionError(
                "the DistributedDataParallel model that this bucket is from was not found, so its processes "
                "are not known; give them: ReproducibleMean(model.process_group)"
            )
        own = [parameter for model in models for parameter in model.parameters()]
        self._of_models.update({id(parameter): parameter for parameter in (*parameters, *own)})
        for model in models:
            self._names.update((id(own), name) for name, own in model.module.named_parameters())

    def _check_ranks(self, ranks: list[int]) -> None:
        if self._given is not None and self._given.size != len(ranks):
            raise OptionError(
                f"a bucket is from a model on ranks {ranks}, and the group given to ReproducibleMean has "
                f"{counted(self._given.size, 'process', 'processes')}: give none, or one of the model's "
                "processes"
            )
        self._ranks = self._ranks or ranks
        if self._ranks != ranks:
            raise OptionError(
                f"a bucket is from a model on ranks {ranks}, and this ReproducibleMean is for ranks "
                f"{self._ranks}: make one for each group of processes"
            )


def check_group(group: object) -> None:
    """Refuses what is neither a group nor None."""
    if not isinstance(group, (ProcessGroup, dist.ProcessGroup, type(None))):
        raise OptionError(
            "group must be a group of crossdevice or of torch.distributed that this process is in, "
            f"got {group!r}"
        )


def _parts(names: list[str], whole: torch.Tensor, gradients: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Splits a bucket, or its mean, into the parts of its parameters, by path."""
    if whole.is_sparse:
        return {_path(names[0]): whole}
    parts = whole.view(-1).split([gradient.numel() for gradient in gradients])
    return {
        _path(name): part.view(gradient.shape)
        for name, part, gradient in zip(names, parts, gradients, strict=True)
    }


def _by_name(names: list[str], digests: Leaves) -> dict[str, Leaves]:
    """Returns the digests of each parameter's leaves; a sparse gradient has two."""
    of_paths: dict[str, Leaves] = {}
    for path, found in digests.items():
        of_paths.setdefault(path[: path.index("]") + 1], {})[path] = found
    return {name: of_paths[_path(name)] for name in names}


def _path(name: str) -> str:
    """Returns the path of a parameter's leaf in a record."""
    return f"value[{name!r}]"


def formed_group(group: dist.ProcessGroup | None, purpose: str) -> ProcessGroup:
    """Forms a group of the ranks of one of torch.distributed, with its timeout.

    All of them form it for the same purpose.
    """
    ranks = dist.get_process_group_ranks(group)
    name = f"{purpose} of ranks {', '.join(map(str, ranks))}"
    own = ranks.index(dist.get_rank())
    return form_group(own, len(ranks), name=name, timeout_seconds=_timeout_seconds(group))


def _timeout_seconds(group: dist.ProcessGroup | None) -> float:
    """Returns the shortest timeout of a group's backends; ours if they have none, as MPI's."""
    group = group or dist.group.WORLD
    options: list[Any] = [
        getattr(group._get_backend(device), "options", None) for device in group._device_types
    ]
    found = [each._timeout.total_seconds() for each in options if hasattr(each, "_timeout")]
    return min(found, default=TIMEOUT_SECONDS)


def _models_with(parameter: torch.Tensor, state: object) -> list[DistributedDataParallel]:
    """Returns the models that may own a bucket with this parameter: those with this state, if any.

    A hook is told neither its model nor the model's group, and PyTorch keeps no list of models.
    """
    kinds, models = _with_subclasses(DistributedDataParallel), []
    # Young objects first: a model is one of few when its first bucket comes, and one of millions later.
    for generation in range(len(gc.get_threshold())):
        objects = gc.get_objects(generation)
        # Not in a loop of Python's, which takes six times as long.
        found = itertools.compress(objects, map(kinds.__contains__, map(type, objects)))
        models += [model for model in found if any(own is parameter for own in model.parameters())]
        del objects
        with_state = [model for model in models if any(own is state for _, own in model._comm_hooks)]
        if with_state:
            return with_state
    return models


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))


def _result_of(ended: torch.futures.Future[Any]) -> torch.Tensor:
    result = ended.value()
    if isinstance(result, BaseException):
        raise result
    return result


def reproducible_hook(state: ReproducibleMean, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduces a bucket: `model.register_comm_hook(ReproducibleMean(), reproducible_hook)`.

    Gradients, also in bfloat16 and float16, become the mean over the model's processes, computed by
    `CollectiveAllReduce`: added in a wider type and rounded once. Their bits do not depend on
    `bucket_cap_mb`. Sparse gradients stay sparse and get the rows of all processes, in the order of ranks.
    The backward pass continues while buckets are reduced. An error of the group ends it.

    Args:
        state: the state that is registered with it.
        bucket: the bucket that PyTorch gives.

    Returns:
        A future of the bucket's mean.

    Raises:
        OptionError: the bucket's model is on other processes.
    """
    if not isinstance(state, ReproducibleMean):
        raise OptionError(
            f"reproducible_hook needs a ReproducibleMean as its state, got {type(state).__name__}: "
            "model.register_comm_hook(ReproducibleMean(), reproducible_hook)"
        )
    return state.start(bucket)
