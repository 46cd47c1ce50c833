"""crossweft in SGLang: a plugin for its loader.

``CROSSWEFT_SGLANG`` says where: ``custom`` (or ``1``) for the custom all-reduce of every group, in eager mode and in
graphs; ``mscclpp`` for the place of MSCCL++, which ``--enable-mscclpp`` opens and which is used in graphs only; ``ep``
for expert parallelism, where ``--moe-a2a-backend deepep`` then sends tokens through crossweft instead of DeepEP, which
need not be installed; ``all`` for all three. Unless it is set, nothing is changed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..torch._dtypes import reduce_op
from ._communicator import EngineCommunicator, gather
from ._plugin import UnsupportedEngine, asked_for, check_contract, check_signature, check_version, refuse

logger = logging.getLogger(__name__)

#: Says where crossweft is used.
SWITCH = "CROSSWEFT_SGLANG"
#: Versions that tests run with.
TESTED = ("0.5.23",)

_CHOICES = {
    "1": ("custom",),
    "on": ("custom",),
    "custom": ("custom",),
    "mscclpp": ("mscclpp",),
    "ep": ("ep",),
    "all": ("custom", "mscclpp", "ep"),
}
#: Element types for which SGLang asks its MSCCL++ communicator.
ASKED_FOR = (torch.bfloat16, torch.float16, torch.float32)
_COMMUNICATORS = "sglang.srt.distributed.device_communicators"
#: Where layers of experts find their dispatcher.
_DISPATCHER = "sglang.srt.batch_overlap.two_batch_overlap.DeepEPDispatcher"
#: What SGLang calls of one.
DISPATCHER_CONTRACT = (
    "__init__",
    "dispatch",
    "dispatch_a",
    "dispatch_b",
    "combine",
    "combine_a",
    "combine_b",
    "set_quant_config",
    "set_overlap_args",
    "clear_overlap_args",
    "register_deepep_dispatch_hook",
)
#: What SGLang calls of a custom all-reduce, and of its MSCCL++ communicator.
CUSTOM_CONTRACT = ("should_custom_ar", "custom_all_reduce", "capture", "close")
MSCCLPP_CONTRACT = (
    "__init__",
    "should_mscclpp_allreduce",
    "all_reduce",
    "should_mscclpp_allgather",
    "all_gather",
    "change_state",
    "destroy",
)


def register() -> bool:
    """Registers what ``CROSSWEFT_SGLANG`` asks for; whether it did. Called by SGLang in each of its processes.

    Raises nothing: what it finds wrong is logged as an error, and SGLang stays as it is.
    """
    try:
        asked = asked_for(SWITCH, _CHOICES)
        if not asked:
            logger.info("crossweft is installed; set %s=custom to use it", SWITCH)
            return False
        version = check_version("sglang", TESTED)
        hooks = _hooks(asked)
        from sglang.srt.plugins.hook_registry import HookRegistry

        take_place: Callable[[], None] | None = None
        if "ep" in asked:
            from ._sglang_dispatcher import place

            take_place = place()
        # All is known to be there.
        for target, hook, kind in hooks:
            HookRegistry.register(target, hook, kind)
        if take_place is not None:
            take_place()
    except Exception as error:
        refuse(logger, "SGLang", error)
        return False
    logger.info("crossweft is used in SGLang %s: %s", version, ", ".join(sorted(asked)))
    return True


def _hooks(asked: frozenset[str]) -> list[tuple[str, Any, Any]]:
    """Target, hook and its kind for each part, when all are known to fit."""
    from sglang.srt.plugins.hook_registry import HookType

    hooks: list[tuple[str, Any, Any]] = []
    if "custom" in asked:
        from sglang.srt.distributed.device_communicators import custom_all_reduce as theirs

        check_signature(theirs.dispatch_custom_allreduce, _dispatch, given=1)
        check_contract(theirs.CustomAllreduce, CrossweftAllReduce, CUSTOM_CONTRACT)
        hooks.append((f"{_COMMUNICATORS}.custom_all_reduce.dispatch_custom_allreduce", _dispatch, HookType.AROUND))
    if "mscclpp" in asked:
        from sglang.srt.distributed.device_communicators import pymscclpp

        check_contract(pymscclpp.PyMscclppCommunicator, MscclppCommunicator, MSCCLPP_CONTRACT)
        target = f"{_COMMUNICATORS}.pymscclpp.PyMscclppCommunicator"
        hooks.append((target, MscclppCommunicator, HookType.REPLACE))
    if "ep" in asked:
        from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPDispatcher

        from ._sglang_dispatcher import CrossweftDispatcher

        check_contract(DeepEPDispatcher, CrossweftDispatcher, DISPATCHER_CONTRACT)
        hooks.append((_DISPATCHER, CrossweftDispatcher, HookType.REPLACE))
    return hooks


def _dispatch(original: Callable[..., Any], group: dist.ProcessGroup, device: torch.device) -> Callable[..., Any]:
    """Around SGLang's choice of a custom all-reduce: crossweft, and what SGLang would have taken for the rest."""
    # SGLang has no custom all-reduce on processors, and does not expect to be asked.
    is_cpu = torch.device(device).type == "cpu"
    theirs: Callable[..., Any] = NoCustomAllReduce if is_cpu else original(group=group, device=device)
    if not isinstance(theirs, type):
        # Of a platform that crossweft does not know.
        return theirs
    try:
        check_contract(theirs, CrossweftAllReduce, CUSTOM_CONTRACT)
    except UnsupportedEngine as error:
        refuse(logger, "SGLang", error)
        return theirs
    return functools.partial(make_custom_all_reduce, theirs)


def make_custom_all_reduce(theirs: type, group: dist.ProcessGroup, device: torch.device) -> Any:
    """A group's custom all-reduce. Collective over the group.

    Where SGLang's own works it is extended, so that models which look for its class and members find them, and tensors
    that crossweft refuses go to it.
    """
    try:
        made = type(f"Crossweft{theirs.__name__}", (CustomAllReduce, theirs), {})(group=group, device=device)
    except Exception as error:
        # SGLang goes on without its own; the other ranks would wait for this one.
        logger.warning("SGLang's own custom all-reduce is not there: %s", error)
        made = NoCustomAllReduce()
    # Where one rank has none, the others' is of no use.
    is_alone = any(gather(group, bool(made.disabled)))
    if is_alone:
        made.close()
        made = CrossweftAllReduce()
    name = f"SGLang's custom all-reduce of ranks {dist.get_process_group_ranks(group)}"
    made.crossweft = EngineCommunicator.create(group, torch.device(device), name, logger)
    if is_alone:
        made.disabled = made.original_disabled = made.crossweft is None
    return made


class NoCustomAllReduce:
    """The members of a custom all-reduce that takes nothing."""

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        self.disabled = True
        self.original_disabled = True

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Whether it takes a tensor."""
        return False

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        """The sum of all ranks' tensors."""
        return None

    def capture(self) -> Any:
        """The context in which graphs are captured."""
        return nullcontext()

    def close(self) -> None:
        """Frees everything."""


if TYPE_CHECKING:
    _Theirs = NoCustomAllReduce
else:
    _Theirs = object


class CustomAllReduce(_Theirs):
    """What crossweft takes, before the methods of the class that it is laid over."""

    crossweft: EngineCommunicator | None = None

    def should_custom_ar(self, inp: torch.Tensor) -> bool:
        """Whether crossweft takes a tensor, or SGLang's own does."""
        ours = self.crossweft
        if ours is not None and not self.disabled and ours.should_all_reduce(inp):
            return True
        return super().should_custom_ar(inp)

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor | None:
        """The sum of all ranks' tensors, a new tensor."""
        ours = self.crossweft
        if ours is not None and not self.disabled and ours.why_not(input) is None:
            return ours.all_reduce(input)
        return super().custom_all_reduce(input)

    def close(self) -> None:
        """Frees everything."""
        ours, self.crossweft = self.crossweft, None
        if ours is not None:
            ours.close()
        super().close()


class CrossweftAllReduce(CustomAllReduce, NoCustomAllReduce):
    """The custom all-reduce of groups for which SGLang has none."""


class MscclppCommunicator:
    """crossweft with the members of SGLang's ``PyMscclppCommunicator``, for ``--enable-mscclpp``.

    SGLang enables it while it captures graphs. Any world size will do, and every size of tensor up to
    ``CROSSWEFT_MAX_BYTES``, in float32, float16 and bfloat16.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: int | str | torch.device,
        group_name: str = "anonymous",
        collectives: set[str] | None = None,
    ) -> None:
        """Joins the group, which must not be of NCCL. Collective.

        ``collectives`` is a subset of ``allreduce`` and ``allgather``; raises ValueError for others.
        """
        self.disabled = True
        self.available = False
        self.collectives = frozenset(("allreduce", "allgather") if collectives is None else collectives)
        if unknown := self.collectives - {"allreduce", "allgather"}:
            raise ValueError(f"there are no collectives {', '.join(sorted(unknown))}; give allreduce, allgather")
        if dist.get_backend(group) == dist.Backend.NCCL:
            raise ValueError("the group is of NCCL; give one that works on the host, such as gloo's")
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.device = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
        self.crossweft: EngineCommunicator | None = None
        if self.world_size > 1:
            name = f"SGLang's {group_name} in place of MSCCL++, ranks {self.ranks}"
            self.crossweft = EngineCommunicator.create(group, self.device, name, logger, _phases())
        self.available = self.crossweft is not None

    def should_mscclpp_allreduce(self, inp: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> bool:
        """Whether :meth:`all_reduce` takes the tensor."""
        ours = self._of("allreduce", inp, "all_reduce")
        if ours is None:
            return False
        if reduce_op(op) != ("sum", None):
            ours._counts.refuse("all_reduce", "SGLang asks this communicator for sums only")
            return False
        return ours.should_all_reduce(inp)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, stream: Any = None) -> torch.Tensor:
        """Replaces the tensor by the sum of all ranks' and returns it. On the current stream unless one is given.

        Raises ValueError for another operation, RuntimeError if there is no communicator, crossweft's errors.
        """
        if reduce_op(op) != ("sum", None):
            raise ValueError(f"{op} is not for this communicator; sums only")
        with _on(stream):
            return self._communicator().all_reduce_(tensor)

    def should_mscclpp_allgather(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor) -> bool:
        """Whether :meth:`all_gather` takes the tensors."""
        ours = self._of("allgather", input_tensor, "all_gather")
        return ours is not None and ours.should_gather(output_tensor, input_tensor)

    def all_gather(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, stream: Any = None) -> torch.Tensor:
        """Puts all ranks' inputs into the output, in rank order, and returns it. Streams are as for :meth:`all_reduce`.

        Raises ValueError if the output is not as large as all inputs, RuntimeError if there is no communicator,
        crossweft's errors.
        """
        if output_tensor.numel() != input_tensor.numel() * self.world_size:
            raise ValueError(
                f"the output has {output_tensor.numel()} elements; {self.world_size} inputs have "
                f"{input_tensor.numel() * self.world_size}"
            )
        with _on(stream):
            self._communicator().all_gather(input_tensor.view(-1), output_tensor.view(-1))
        return output_tensor

    @contextmanager
    def change_state(self, enable: bool | None = None) -> Iterator[None]:
        """Enables or disables it for a while; without an argument it is enabled if it can be."""
        before = self.disabled
        self.disabled = not (self.available and (enable is None or enable))
        try:
            yield
        finally:
            self.disabled = before

    def destroy(self) -> None:
        """Frees everything. It is disabled from then on."""
        self.disabled, self.available = True, False
        ours, self.crossweft = self.crossweft, None
        if ours is not None:
            ours.close()

    def _of(self, collective: str, tensor: torch.Tensor, operation: str) -> EngineCommunicator | None:
        """The communicator, if the collective is enabled and may be asked for this type."""
        ours = self.crossweft
        if self.disabled or ours is None or collective not in self.collectives:
            return None
        if tensor.dtype not in ASKED_FOR:
            ours._counts.refuse(operation, f"SGLang does not ask this communicator for elements of {tensor.dtype}")
            return None
        return ours

    def _communicator(self) -> EngineCommunicator:
        if self.crossweft is None:
            raise RuntimeError("this communicator is not available; its constructor has logged why")
        return self.crossweft


def _on(stream: Any) -> Any:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _phases() -> list[Callable[[], str | None]]:
    """In which phases SGLang's own would refuse: a changed path would make it compile anew."""
    from sglang.srt.compilation.compile_phase import get_pcg_capture_stream, is_in_torch_compile_warmup
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import is_in_tc_piecewise_cuda_graph

    def piecewise() -> str | None:
        if is_in_tc_piecewise_cuda_graph() or is_in_torch_compile_warmup() or get_pcg_capture_stream() is not None:
            return "SGLang compiles or captures a piecewise graph"
        return None

    return [piecewise]
