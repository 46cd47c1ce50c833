"""``Buffer``: DeepEP's interface over groups of :mod:`crossweft.moe`."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, TypeAlias, TypeVar

import torch

from ... import moe
from ..._crossweft import Communicator, UniqueId
from ...errors import UsageError
from ._config import Config, low_latency_bytes
from ._errors import Unsupported
from ._groups import Groups
from ._low_latency import Handle as LowLatencyHandle
from ._low_latency import Hook, LowLatency
from ._normal import Bias, Normal, layout
from ._normal import Handle as NormalHandle
from ._streams import Streams
from .utils import EventHandle, EventOverlap

#: Tokens, or quantised ones and their scales.
_Tokens: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_Mode = TypeVar("_Mode", Normal, LowLatency)

_SEVERAL_HOSTS = "ranks of several hosts are not supported, so no call has a part between hosts; use dispatch, combine"


class Buffer:
    """What the ranks of ``group`` send tokens through: a ``torch.distributed`` process group of any backend, or a
    :class:`crossweft.Communicator`; or ``comm``, one of mpi4py. Collective.

    Tensors are on ``device``: on torch's current CUDA device unless another is given, in host memory (``"cpu"``) where
    torch sees none, or where the communicator computes if that is given. A call takes ``timeout`` seconds at most,
    ``Buffer.default_timeout`` if none are given; only here a process group's ranks wait for one another as long as the
    group was made to.

    Sizes, ``num_qps_per_rank``, ``allow_nvlink_for_low_latency_mode``, ``allow_mnnvl`` and ``use_fabric`` decide
    nothing here. With ``enable_shrink``, low-latency calls leave out a rank that is gone, or late by ``timeout``
    seconds: see :meth:`low_latency_query_mask_buffer`. What a shape needs is made by the first call with it, so all
    ranks must be there for that; :meth:`clean_low_latency_buffer` can be that call.
    """

    num_sms: ClassVar[int] = 20
    #: Of buffers that are given none. Plugins of engines, which make them without, set it.
    default_timeout: ClassVar[float] = 100.0

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        timeout: float | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        timeout = Buffer.default_timeout if timeout is None else timeout
        communicator = _communicator(group, comm, timeout, device)
        #: Seconds that a call takes at most.
        self.timeout = timeout
        self.group = group
        self.rank = communicator.rank
        self.group_size = communicator.world_size
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        #: Read by those who size queues by it.
        self.nvshmem_qp_depth = 1024
        self._streams = Streams(torch.device(communicator.device))
        #: How many of its GPU's multiprocessors a call of many tokens takes, and one of few; ``None`` on the host.
        self.multiprocessors = _blocks(communicator)
        many, few = self.multiprocessors
        self._normal: Normal | None = Normal(communicator, Groups(communicator, timeout, blocks=many))
        self._low_latency: LowLatency | None = LowLatency(
            Groups(communicator, timeout, blocks=few, masking=enable_shrink), self._streams
        )

    def destroy(self) -> None:
        """Gives everything back; nothing can be called after it. ``explicitly_destroy`` need not have been said."""
        self._normal = self._low_latency = None

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether there is fp8: always."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets ``num_sms``, which must be even and decides nothing here."""
        if new_num_sms % 2:
            raise UsageError(f"num_sms is {new_num_sms}; it must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """What the current stream was asked for so far."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that low-latency calls of this shape take on each rank; they are made without being given."""
        return low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def get_comm_stream(self) -> Any:
        """The stream of asynchronous calls; on the host the CPU's, which does everything at once."""
        return self._streams.own or torch.cpu.current_stream()

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> NoReturn:
        """Raises Unsupported: what peers write into has a layout of its own."""
        raise Unsupported(
            "memory that peers write into has a layout of its own, and is no tensor; use what calls return, or "
            "get_next_low_latency_combine_buffer"
        )

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The default one, of ``num_sms``; for any number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The default one, of ``num_sms``; for any number of ranks."""
        return Config(Buffer.num_sms)

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Tokens for each rank (i32), ``None``, tokens for each expert (i32), which tokens ``[tokens, ranks]`` are for
        which rank, an event. Local."""
        with self._streams.call((topk_idx,), previous_event, async_finish) as ends:
            per_rank, per_expert, in_rank = layout(topk_idx.detach(), num_experts, self.group_size)
            return per_rank, None, per_expert, in_rank, ends(per_rank, per_expert, in_rank)

    def dispatch(
        self,
        x: _Tokens,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[_Tokens, torch.Tensor | None, torch.Tensor | None, list[int] | None, Any, EventOverlap]:
        """Sends tokens ``[T, H]`` (bf16, f16, f32, or f8e4m3 with scales ``[T, H / 128]`` in f32 or four exponents to
        an i32).

        Returns those that came, by source rank and then token; their local experts, -1 for none, and weights; the
        numbers of tokens for each local expert, rounded up to multiples of ``expert_alignment``; a handle; an event.
        With a handle tokens go the ways of that dispatch, and there are no experts, weights and numbers. With
        ``num_worst_tokens`` there are as many rows, those that nothing came for without experts, and no numbers.
        Collective.
        """
        normal = self._used(self._normal)
        tokens, scales = x if isinstance(x, tuple) else (x, None)
        if handle is not None and (topk_idx is not None or topk_weights is not None):
            raise UsageError("tokens that go the ways of a handle have its experts; give no topk_idx, topk_weights")
        layout_given = (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
        given = (x, topk_idx, topk_weights, *layout_given)
        with self._streams.call(given, previous_event, async_finish) as ends:
            if handle is not None:
                received = normal.again(tokens, scales, handle)
                return _tokens(received), None, None, None, handle, ends(_tokens(received))
            received, counts, made = normal.dispatch(
                tokens,
                scales,
                (topk_idx, topk_weights),
                layout_given,
                alignment=expert_alignment,
                worst_tokens=num_worst_tokens,
            )
            experts = None if topk_idx is None else received.experts
            weights = None if topk_weights is None else received.weights
            event = ends(_tokens(received), experts, weights, made)
            return _tokens(received), experts, weights, counts, made, event

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sums the rows of each token over the ranks, in f32, and adds one bias or two (which rounds once more).

        ``topk_weights`` of the rows are summed as well, in f32: those are gradients of a dispatch's weights. Returns
        the sums, those of weights, an event. Collective.
        """
        normal = self._used(self._normal)
        with self._streams.call((x, topk_weights, bias), previous_event, async_finish) as ends:
            sums, weights = normal.combine(x, handle, topk_weights, bias)
            return sums, weights, ends(sums, weights)

    def internode_dispatch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises Unsupported: ranks are on one host."""
        raise Unsupported(_SEVERAL_HOSTS)

    def internode_combine(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises Unsupported: ranks are on one host."""
        raise Unsupported(_SEVERAL_HOSTS)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Makes what calls of this shape need, and waits for all ranks. There is nothing to clean. Collective."""
        low_latency = self._used(self._low_latency)
        with self._streams.call(()):
            low_latency.step(low_latency.group(num_max_dispatch_tokens_per_rank, hidden, num_experts))

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[_Tokens, torch.Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Sends at most ``M = num_max_dispatch_tokens_per_rank`` tokens of bf16, the same M on all ranks.

        Returns rows ``[L, R * M, H]``, in f8e4m3 with scales ``[L, R * M, H / 128]`` (f32), or with ``use_ue8m0`` ``[L,
        R * M, H / 512]`` (i32), whose columns are contiguous; the number of each local expert's rows (i32); a handle;
        an event; a hook. With ``return_recv_hook`` nothing is there before the hook is called; hooks are called in the
        order of their calls, of which two may be open, and none when a call without a hook is made. Collective.
        """
        _no_times(dispatch_wait_recv_cost_stats)
        _one_of(async_finish, return_recv_hook)
        if use_ue8m0 and not use_fp8:
            raise UsageError("use_ue8m0 is about scales of fp8; give use_fp8 as well")
        low_latency = self._used(self._low_latency)
        group = low_latency.group(num_max_dispatch_tokens_per_rank, x.shape[1], num_experts)
        quantise: moe.Quantise | None = None
        if use_fp8:
            quantise = "ue8m0" if use_ue8m0 else "f32_powers_of_two" if round_scale else "f32"
        stats = cumulative_local_expert_recv_stats
        with self._streams.call((x, topk_idx, stats), asynchronous=async_finish) as ends:
            received, counts, handle, hook = low_latency.dispatch(x, topk_idx, group, quantise, stats, return_recv_hook)
            event = ends(received, counts, handle)
        return received, counts, handle, event, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Sums the rows of each token, weighted by ``topk_weights`` ``[T, K]`` (f32), to ``[T, H]`` of bf16.

        ``topk_idx`` is that of the dispatch. With ``zero_copy``, rows are what
        :meth:`get_next_low_latency_combine_buffer` has returned for the handle, and not ``x``. ``use_logfmt`` asks for
        fewer bits on the way; all are sent here. Collective.
        """
        _no_times(combine_wait_recv_cost_stats)
        _one_of(async_finish, return_recv_hook)
        low_latency = self._used(self._low_latency)
        # What zero_copy sends goes with the handle, perhaps before the call is over.
        given = (x, topk_idx, topk_weights, out, getattr(handle, "made", None))
        with self._streams.call(given, asynchronous=async_finish) as ends:
            sums, hook = low_latency.combine(x, topk_idx, topk_weights, handle, zero_copy, out, return_recv_hook)
            event = ends(sums)
        return sums, event, hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Room ``[L, R * M, H]`` of bf16 for what experts make of the handle's rows, which ``zero_copy`` sends."""
        return self._used(self._low_latency).next_buffer(handle)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leaves a rank out of low-latency calls, or takes it in again."""
        self._shrinks().set_masked(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes 1 for each rank that is left out, 0 for others, to ``[R]`` of i32."""
        masked = torch.tensor(self._shrinks().masked, dtype=torch.int32, device="cpu")
        if mask_status.shape != masked.shape or mask_status.dtype != torch.int32:
            raise UsageError(f"mask_status must be [{len(masked)}] of torch.int32")
        mask_status.copy_(masked)

    def low_latency_clean_mask_buffer(self) -> None:
        """Takes all ranks in again."""
        groups = self._shrinks()
        for rank in range(self.group_size):
            if rank != self.rank:
                groups.set_masked(rank, False)

    def _shrinks(self) -> Groups:
        if not self.enable_shrink:
            raise UsageError("ranks can be left out only of a Buffer with enable_shrink=True")
        return self._used(self._low_latency).groups

    def _used(self, mode: _Mode | None) -> _Mode:
        if mode is None:
            raise UsageError("the buffer was destroyed; make a new one")
        return mode


def _communicator(group: Any, comm: Any, timeout: float, device: str | torch.device | None) -> Communicator:
    if (group is None) == (comm is None):
        raise UsageError("give a group or, of mpi4py, a comm")
    if isinstance(group, Communicator):
        return group
    if device is None:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    where = str(device)
    if comm is None:
        return Communicator.from_process_group(group, device=where, timeout=timeout)
    rank = comm.Get_rank()
    # Kept until everybody has joined: its owner hosts the rendezvous.
    unique_id = UniqueId(timeout=timeout) if rank == 0 else None
    text = comm.bcast(None if unique_id is None else str(unique_id), root=0)
    unique_id = unique_id or UniqueId.from_text(text)
    return Communicator(rank, comm.Get_size(), unique_id, device=where, timeout=timeout)


def _blocks(communicator: Communicator) -> tuple[int | None, int | None]:
    """How many multiprocessors calls of many and of few tokens take, of a GPU that several ranks may share."""
    device = torch.device(communicator.device)
    if device.type == "cpu":
        return None, None
    own = str(torch.cuda.get_device_properties(device).uuid).encode()
    sharers = communicator.all_gather_bytes(own).count(own)
    # Those of all sharers are there at once, with room for others.
    all_of_them = torch.cuda.get_device_properties(device).multi_processor_count // 2
    share = max(1, all_of_them // sharers)
    return share, min(share, 32)


def _tokens(received: moe.Received) -> _Tokens:
    return received.tokens if received.scales is None else (received.tokens, received.scales)


def _one_of(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise UsageError("a call ends by its event or by its hook; give one of async_finish and return_recv_hook")


def _no_times(stats: torch.Tensor | None) -> None:
    if stats is not None:
        raise Unsupported("how long each rank was waited for is not measured; give no *_wait_recv_cost_stats")
