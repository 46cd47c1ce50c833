"""The Rust side."""

from collections.abc import Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar, final

from typing_extensions import Self

__all__ = [
    "Channel",
    "Chunk",
    "Communicator",
    "Diagnostic",
    "Memory",
    "MessageGroup",
    "MoeCounts",
    "MoeGroup",
    "MoeHandle",
    "Plan",
    "PreparedPlan",
    "Program",
    "Report",
    "Semaphore",
    "Switch",
    "UniqueId",
    "__version__",
    "caller",
    "describe",
]

__version__: str

#: Anything contiguous that speaks DLPack, the buffer protocol or ``__cuda_array_interface__``.
_Tensor: TypeAlias = Any
#: ``"f32"``, ``"bfloat16"``, ``torch.float16``, ``numpy.dtype("int32")``, ...
_DType: TypeAlias = Any
#: A sequence of integers, or a host tensor of 64-bit ones, which is looked at when the call begins.
_Counts: TypeAlias = Any
_Op: TypeAlias = Literal["sum", "prod", "min", "max", "avg"]
#: ``"cpu"``; ``"cuda"``, the device by this rank's number on its host; ``"cuda:0"`` and so on; ``"auto"``.
_Device: TypeAlias = str
_Layout: TypeAlias = Literal["expert_major", "expert_packed", "rank_major", "flat"]
#: Scales of quantised tokens.
_Scales: TypeAlias = Literal["f32", "f32_powers_of_two", "ue8m0"]
_T = TypeVar("_T")

def describe(tensor: _Tensor) -> dict[str, Any]:
    """What an object is as a tensor: address, nbytes, dtype, device, readonly, protocol, stream."""

@final
class Diagnostic:
    """A fault of a plan, and where it shows."""

    #: ``structure``, ``uninitialised``, ``pairing``, ``race``, ``deadlock``, ``post_condition`` or ``too_large``.
    @property
    def code(self) -> str: ...
    #: What is wrong, and what to do about it.
    @property
    def message(self) -> str: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def thread_block(self) -> int | None: ...
    #: The operation's index in its thread block.
    @property
    def op(self) -> int | None: ...
    #: The line of the program, if the plan was compiled from one.
    @property
    def file(self) -> str | None: ...
    @property
    def line(self) -> int | None: ...
    #: That of the other instruction, if it is a race of two.
    @property
    def other_file(self) -> str | None: ...
    @property
    def other_line(self) -> int | None: ...
    #: All of it in words.
    @property
    def text(self) -> str: ...

@final
class Report:
    """What the checker says of a plan; true if it is correct."""

    @property
    def plan(self) -> str: ...
    @property
    def ok(self) -> bool: ...
    @property
    def diagnostics(self) -> list[Diagnostic]: ...
    def __bool__(self) -> bool: ...

@final
class Plan:
    """A communication plan: what every thread block of every rank does, for any message size.

    Plans cannot be changed. Two with the same content are equal.
    """

    @staticmethod
    def from_json(text: str | bytes) -> Plan:
        """A plan in crossweft's own format. Raises PlanError."""
    @staticmethod
    def from_mscclpp(text: str | bytes) -> Plan:
        """An execution plan of MSCCL++. Raises PlanError; ``warnings`` says what is odd about it."""
    @staticmethod
    def from_file(path: str | PathLike[str]) -> Plan:
        """A plan file of either format. Raises OSError, PlanError."""
    @staticmethod
    def all_reduce(
        algorithm: Literal["one-shot", "two-shot", "two-shot-staged", "ring", "switch"],
        ranks: int,
        *,
        thread_blocks: int = 1,
    ) -> Plan:
        """The plan of a built-in all-reduce."""

    @property
    def name(self) -> str: ...
    #: The number of ranks.
    @property
    def ranks(self) -> int: ...
    #: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all``, ``send-recv``, ...
    @property
    def collective(self) -> str: ...
    #: The operation it is for; ``None`` if the caller chooses.
    @property
    def reduce_op(self) -> _Op | None: ...
    @property
    def in_place(self) -> Literal["any", "required", "forbidden"]: ...
    #: How many messages an input consists of, and an output.
    @property
    def input_blocks(self) -> int: ...
    @property
    def output_blocks(self) -> int: ...
    #: The most that any rank has.
    @property
    def thread_blocks(self) -> int: ...
    #: Of all ranks.
    @property
    def operations(self) -> int: ...
    #: Sizes of a message that it is meant for, inclusive.
    @property
    def message_bytes(self) -> tuple[int, int]: ...
    #: What sizes of a message must be multiples of.
    @property
    def message_multiple(self) -> int: ...
    #: Same content, same hash.
    @property
    def content_hash(self) -> str: ...
    #: What the importer found odd.
    @property
    def warnings(self) -> list[str]: ...
    def source(self, rank: int, thread_block: int, op: int) -> tuple[str, int] | None:
        """File and line that an operation was compiled from."""
    def to_json(self) -> str: ...
    def to_mscclpp(self) -> str:
        """As an execution plan of MSCCL++. Raises PlanError if their format has no word for it."""
    def check(self, *, raises: bool = True) -> Report:
        """Proves it free of races, deadlocks and wrong results, or raises CheckError.

        The first call does the work. With ``raises=False`` the faults are in the report only.
        """
    def show(
        self, path: str | PathLike[str] | None = None, *, topology: str = "h200", bytes: Sequence[int] = ...
    ) -> str:
        """Writes one self-contained HTML page and returns its path; without one, a temporary file.

        It draws what every thread block does, with the critical path, under the cost model of ``topology``: ``h200``,
        ``cpu`` or a file. ``bytes`` are sizes of messages that get a timeline. Notebooks show it by themselves.
        """
    def to_html(self, *, topology: str = "h200", bytes: Sequence[int] = ...) -> str:
        """The page itself."""
    def predict(self, bytes: int, *, topology: str = "h200") -> float | None:
        """Predicted microseconds for a message; ``None`` if it would never end."""
    def run(
        self,
        communicator: Communicator,
        input: _Tensor,
        output: _T | None = None,
        *,
        op: _Op | None = None,
        dtype: _DType | None = None,
        stream: int | None = None,
    ) -> _T:
        """Runs it on this rank's tensors and returns the output. Collective.

        Without ``output`` it runs in place: ``input`` is then the larger of both buffers, of which the smaller
        one is this rank's block. The plan is checked, and prepared for the communicator, when it is first
        run; so all ranks must make the same calls.

        Host tensors are complete when this returns. CUDA tensors are worked on in the order of ``stream`` (a
        raw handle, such as ``torch.cuda.current_stream().cuda_stream``), by default the stream that the tensor's
        library works on, or the legacy default stream. The stream must outlive the communicator, which waits for it
        before it gives memory back.
        """
    def prepare(
        self, communicator: Communicator, *, dtype: _DType, max_bytes: int, op: _Op | None = None
    ) -> PreparedPlan:
        """Prepares it for messages of up to ``max_bytes`` bytes. Collective."""
    def run_local(
        self,
        inputs: Sequence[_Tensor],
        outputs: Sequence[_T] | None = None,
        *,
        op: _Op | None = None,
        dtype: _DType | None = None,
        seed: int | None = None,
        timeout: float = 60.0,
    ) -> list[_T]:
        """Runs it once in this process, every rank a thread, and returns the outputs in rank order.

        Outputs that are not given are made like the inputs. ``seed`` makes the thread blocks of each rank take
        turns in a random order, which it repeats.
        """

@final
class MessageGroup:
    """A group of sends and receives. Made by Communicator.group."""

    def send(self, tensor: _Tensor, peer: int, *, dtype: _DType | None = None) -> None:
        """Adds a message to ``peer``. The tensor must stay as it is until the group has run."""
    def recv(self, tensor: _Tensor, peer: int, *, dtype: _DType | None = None) -> None:
        """Adds a message from ``peer``."""
    def run(self, *, stream: int | None = None) -> None:
        """Does all that was added, and empties the group.

        Returns when everything is received; of tensors on a GPU at once, in the order of ``stream`` or of their
        library's current one.
        """
    def __enter__(self) -> MessageGroup: ...
    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Runs it, unless an error ends the block."""

@final
class PreparedPlan:
    """A plan that is ready to be called; calls are local and allocate nothing."""

    def __new__(
        cls,
        plan: Plan,
        communicator: Communicator,
        *,
        dtype: _DType,
        max_bytes: int,
        op: _Op | None = None,
    ) -> Self: ...
    @property
    def max_bytes(self) -> int: ...
    #: Whether messages are copied through registered memory, because ranks reach into each other's buffers.
    @property
    def staged(self) -> bool: ...
    def run(self, input: _Tensor, output: _T | None = None, *, stream: int | None = None) -> _T:
        """As Plan.run."""
    def check(self) -> None:
        """Raises what went wrong on a GPU, once the stream has come to its end."""

@final
class UniqueId:
    """What a rank needs to join a job. It holds a secret: pass it like a password.

    The process that makes it hosts the rendezvous, and must keep it until all ranks have joined.
    """

    def __new__(cls, *, bind: str = "loopback", port: int = 0, timeout: float = 600.0) -> Self:
        """Listens on ``bind``: ``loopback``, an interface's name or an address of this host."""
    @staticmethod
    def from_bytes(bytes: bytes) -> UniqueId: ...
    @staticmethod
    def from_text(text: str) -> UniqueId: ...
    def __bytes__(self) -> bytes: ...
    def __str__(self) -> str: ...

@final
class Communicator:
    """One rank of a job. Every rank must make the same calls in the same order.

    As a context manager it leaves in the end, or ends the job where an error ends the block.
    """

    def __new__(
        cls,
        rank: int,
        world_size: int,
        unique_id: UniqueId,
        *,
        device: _Device = "cpu",
        timeout: float = 600.0,
    ) -> Self:
        """Joins the job of a unique id. Waits until all ranks have come; ``timeout`` seconds bound every call."""
    @staticmethod
    def from_env(*, device: _Device = "cpu", timeout: float = 600.0) -> Communicator:
        """Joins the job that torchrun, MPI, Slurm or ``CROSSWEFT_*`` variables describe. Raises LaunchError."""
    @staticmethod
    def from_process_group(
        group: Any = None,
        *,
        device: _Device = "cpu",
        timeout: float = 600.0,
        bind: str | None = None,
    ) -> Communicator:
        """The communicator of a ``torch.distributed`` process group of any backend; ``None`` is all ranks.

        They meet in the group, which waits for a late rank as long as it was made to, whatever ``timeout`` says.

        Across hosts, ``bind`` names an interface or address of the group's first rank.
        """
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    #: ``cpu``, or ``cuda:0`` and so on.
    @property
    def device(self) -> str: ...
    #: The longest any call may take, in seconds.
    @property
    def timeout(self) -> float: ...
    def __enter__(self) -> Communicator: ...
    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Leaves in good order. An error ends the job: the others would wait for this rank in vain."""
    def barrier(self) -> None: ...
    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Everybody's payload, in rank order. For small data."""
    def all_reduce(
        self,
        input: _Tensor,
        output: _T | None = None,
        *,
        op: _Op = "sum",
        scale: float | _Tensor | None = None,
        dtype: _DType | None = None,
        stream: int | None = None,
    ) -> _T:
        """Reduces the tensors of all ranks into ``output``, or in place, by the algorithm that fits the size.

        Streams are as for Plan.run. This and the other collectives work in place where no output is given: on the
        larger of input and output, with the smaller one as this rank's block of it. An output that is of no use on
        this rank, or an input, may be empty.

        With ``scale``, a sum is of this rank's input times that number, each product rounded to the element type (of
        integers: wrapped); each rank gives its own, or all none. A tensor of one element on the input's device is
        read when the call gets to it.
        """
    def all_reduce_rms_norm(
        self,
        input: _Tensor,
        weight: _Tensor,
        output: _T,
        *,
        residual: _Tensor | None = None,
        epsilon: float = 1e-6,
        quantised: _Tensor | None = None,
        scale: float | _Tensor | None = None,
        per: Literal["token", "group"] = "token",
        stream: int | None = None,
    ) -> _T:
        """Reduces tokens, adds the residual, and normalises: what follows an all-reduce in a transformer, in one call.

        Tensors of f32, f16 or bf16, all on the host or all on the communicator's CUDA device. ``weight`` has as many
        elements as a token: a multiple of 8, from 8 to 16384. ``residual``, the same on every rank, is replaced by its
        sum with the reduction. ``output`` gets the normalised tokens. ``quantised`` (f8e4m3, or bytes) gets them once
        more, divided by ``scale``: a number, or a tensor of f32 that is written, with one element per token, or per
        group of 128 elements of each token.
        """
    def all_gather(
        self,
        input: _Tensor,
        output: _T | None = None,
        *,
        dtype: _DType | None = None,
        stream: int | None = None,
    ) -> _T:
        """Every output is all inputs, in rank order."""
    def reduce_scatter(
        self,
        input: _Tensor,
        output: _T | None = None,
        *,
        op: _Op = "sum",
        scale: float | _Tensor | None = None,
        dtype: _DType | None = None,
        stream: int | None = None,
    ) -> _T:
        """Each rank's output is its block of the reduction of all inputs."""
    def all_to_all(
        self,
        input: _Tensor,
        output: _T | None = None,
        *,
        dtype: _DType | None = None,
        stream: int | None = None,
    ) -> _T:
        """Each rank's output is its block of every input, in rank order."""
    def broadcast(
        self,
        input: _Tensor,
        output: _T | None = None,
        *,
        root: int = 0,
        dtype: _DType | None = None,
        stream: int | None = None,
    ) -> _T:
        """Every output is the root's input."""
    def reduce(
        self,
        input: _Tensor,
        output: _T | None = None,
        *,
        root: int = 0,
        op: _Op = "sum",
        scale: float | _Tensor | None = None,
        dtype: _DType | None = None,
        stream: int | None = None,
    ) -> _T:
        """The root's output is the reduction of all inputs; the others' is left as it is."""
    def gather(
        self,
        input: _Tensor,
        output: _T | None = None,
        *,
        root: int = 0,
        dtype: _DType | None = None,
        stream: int | None = None,
    ) -> _T:
        """The root's output is all inputs, in rank order; the others' is left as it is."""
    def scatter(
        self,
        input: _Tensor,
        output: _T | None = None,
        *,
        root: int = 0,
        dtype: _DType | None = None,
        stream: int | None = None,
    ) -> _T:
        """Each rank's output is its block of the root's input."""
    def prepare_messages(self, *, reduces: Sequence[_DType] | None = None) -> None:
        """Prepares what messages, and collectives with blocks of any size, need.

        All ranks must call it together; so must they make the first of the calls below, where they have not. On a GPU,
        ``reduces`` are the types of elements that reduce_scatter_v is called with, whose kernels are loaded now.
        """
    def group(self) -> MessageGroup:
        """Sends and receives that are done together, so that no order of theirs leads to a deadlock.

        As a context manager it runs in the end.
        """
    def send(self, tensor: _Tensor, peer: int, *, dtype: _DType | None = None, stream: int | None = None) -> None:
        """Sends a tensor to ``peer``. Returns when it may be changed, maybe before it has been received.

        A tensor on a GPU is sent in the order of ``stream``, or of its library's current one, and the call returns at
        once; so it is with the calls below. What goes wrong there, check raises.

        Messages of two ranks match in the order in which they are sent and received; both sides must give as many
        elements of the same type, or get a Mismatch.
        """
    def recv(self, tensor: _T, peer: int, *, dtype: _DType | None = None, stream: int | None = None) -> _T:
        """Receives a message of ``peer`` into a tensor."""
    def all_to_all_v(
        self,
        input: _Tensor,
        output: _T,
        send_counts: _Counts,
        recv_counts: _Counts,
        *,
        send_displacements: _Counts | None = None,
        recv_displacements: _Counts | None = None,
        dtype: _DType | None = None,
        stream: int | None = None,
    ) -> _T:
        """Sends block ``r`` of the input to rank ``r``, and receives block ``r`` of the output from there.

        Counts and displacements are in elements, by rank; without displacements blocks lie one after another.
        """
    def all_gather_v(
        self,
        input: _Tensor | None,
        output: _T,
        counts: _Counts,
        *,
        displacements: _Counts | None = None,
        dtype: _DType | None = None,
        stream: int | None = None,
    ) -> _T:
        """Block ``r`` of every output is the input of rank ``r``; without an input, what it has there already."""
    def reduce_scatter_v(
        self,
        input: _Tensor,
        output: _T,
        counts: _Counts,
        *,
        displacements: _Counts | None = None,
        op: _Op = "sum",
        dtype: _DType | None = None,
        stream: int | None = None,
    ) -> _T:
        """The output of rank ``r`` is the reduction of block ``r`` of all inputs, in rank order."""
    def run(
        self,
        plan: Plan,
        input: _Tensor,
        output: _T | None = None,
        *,
        op: _Op | None = None,
        dtype: _DType | None = None,
        stream: int | None = None,
    ) -> _T:
        """As Plan.run."""
    def register(self, plan: Plan) -> None:
        """Registers a plan beside the built-in algorithms: calls from now on may choose it. Collective.

        It is chosen for the sizes that it was measured to be fastest for (``crossweft tune``), or, if it was not
        measured, that the cost model says it is. Raises CheckError, PlanError; Mismatch if ranks register different
        plans.
        """
    def explain(
        self,
        collective: str,
        bytes: int,
        *,
        dtype: _DType | None = None,
        op: _Op = "sum",
        root: int = 0,
        in_place: bool | None = None,
        symmetric: bool = False,
    ) -> dict[str, Any]:
        """What a call takes, and why not something else, as ``crossweft explain --format json``. Local.

        ``bytes`` are those of the larger of input and output; elements are ``f32`` unless given. ``in_place`` says
        whether calls are known to be in place, or not to be, ``symmetric`` that tensors lie in the pool.
        ``candidates`` is a list of all, each with its ``name``,
        ``verdict`` (``chosen``, ``not_chosen``, ``refused``), ``reason``, ``predicted_us`` and ``measured_us``.
        """
    def prepare(self, collective: str, bytes: int, *, dtype: _DType, op: _Op = "sum", root: int = 0) -> None:
        """Prepares what calls of up to ``bytes`` bytes, of the larger of input and output, need. Collective.

        Calls without ``scale`` find it then. The first call does the same, even while its stream is being captured
        into a CUDA graph, if all ranks make it then.
        """
    def check(self) -> None:
        """Raises what went wrong in calls on streams, once those have come to their end. Later calls raise it too."""
    def check_peer(self, peer: int, doing: str) -> None:
        """Raises why rank ``peer`` will not do its part in what this one is ``doing``: PeerLost, Aborted.

        Does not block.
        """
    def compile(self, dtypes: Sequence[_DType]) -> None:
        """Compiles the kernels of some element types, each rank of a host a part of them, so that preparing does not.

        For the first start on a machine with GPUs; the driver keeps what was compiled. Collective.
        """
    def make_pool(self, bytes: int) -> tuple[str, str]:
        """Makes symmetric memory of ``bytes`` bytes on every rank for torch's allocator, once. Collective.

        Returns the names of the functions of this module's library that an allocator calls; see
        ``crossweft.torch.AllReduceCommunicator.mem_pool``. Raises UsageError on the CPU and where there is a pool.
        """
    #: Address, size and bytes in use of the pool; ``None`` if there is none.
    @property
    def pool(self) -> tuple[int, int, int] | None: ...
    def abort(self, reason: str) -> None:
        """Ends the job: every wait of every rank ends with Aborted."""
    def leave(self) -> None:
        """Leaves in good order."""

# What crossweft.language records with. Every method notes the line of the caller outside of the package, and raises
# ProgramError with it.

def caller() -> tuple[str, int]:
    """File and line of the innermost caller outside of the package."""

@final
class Chunk:
    """Chunks of a buffer that follow one another."""

    @property
    def rank(self) -> int: ...
    #: ``i``, ``o`` or ``s``.
    @property
    def buffer(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...

@final
class Memory:
    def __len__(self) -> int: ...
    def chunks(self, first: int, end: int) -> Chunk: ...

@final
class Channel: ...

@final
class Switch: ...

@final
class Semaphore: ...

@final
class Program:
    def __new__(cls, name: str, collective: str, ranks: int, **options: Any) -> Self: ...
    def input(self, rank: int) -> Memory: ...
    def output(self, rank: int) -> Memory: ...
    def scratch(self, rank: int, chunks: int) -> Memory: ...
    def expect(self, output: Chunk, inputs: Sequence[Chunk]) -> None: ...
    def memory_channel(self, destination: int, source: int) -> Channel: ...
    def port_channel(self, destination: int, source: int) -> Channel: ...
    def switch_channel(self, ranks: Sequence[int], letter: str) -> Switch: ...
    def semaphore(self, rank: int, initial: int) -> Semaphore: ...
    def copy(self, dst: Chunk, src: Chunk, blocks: Sequence[int]) -> None: ...
    def copy_packets(self, dst: Chunk, src: Chunk, blocks: Sequence[int]) -> None: ...
    def unpack_packets(self, dst: Chunk, src: Chunk, blocks: Sequence[int]) -> None: ...
    def reduce(self, dst: Chunk, src: Chunk, others: Sequence[Chunk], blocks: Sequence[int]) -> None: ...
    def reduce_packets(self, dst: Chunk, src: Chunk, others: Sequence[Chunk], blocks: Sequence[int]) -> None: ...
    def barrier(self, rank: int, blocks: Sequence[int]) -> None: ...
    def acquire(self, semaphore: Semaphore, block: int) -> None: ...
    def release(self, semaphore: Semaphore, block: int) -> None: ...
    def signal(self, channel: Channel, block: int, relaxed: bool) -> None: ...
    def wait(self, channel: Channel, block: int, relaxed: bool) -> None: ...
    def flush(self, channel: Channel, block: int) -> None: ...
    def get(self, channel: Channel, dst: Chunk, src: Chunk, blocks: Sequence[int]) -> None: ...
    def put(self, channel: Channel, dst: Chunk, src: Chunk, blocks: Sequence[int]) -> None: ...
    def put_with_signal(self, channel: Channel, dst: Chunk, src: Chunk, block: int) -> None: ...
    def put_with_signal_and_flush(self, channel: Channel, dst: Chunk, src: Chunk, block: int) -> None: ...
    def put_packets(self, channel: Channel, dst: Chunk, src: Chunk, blocks: Sequence[int]) -> None: ...
    def read_put_packets(self, channel: Channel, dst: Chunk, src: Chunk, blocks: Sequence[int]) -> None: ...
    def read_reduce(
        self,
        channel: Channel,
        dst: Chunk,
        src: Chunk,
        others: Sequence[Chunk],
        blocks: Sequence[int],
    ) -> None: ...
    def switch_reduce(self, switch: Switch, rank: int, first: int, dst: Chunk, blocks: Sequence[int]) -> None: ...
    def switch_broadcast(self, switch: Switch, rank: int, first: int, src: Chunk, blocks: Sequence[int]) -> None: ...
    def switch_broadcast_packets(
        self, switch: Switch, rank: int, first: int, src: Chunk, blocks: Sequence[int]
    ) -> None: ...
    def begin_loop(self, unit_bytes: int, chunks: int) -> None: ...
    def end_loop(self) -> None: ...
    def compile(self) -> Plan: ...

@final
class MoeGroup:
    """What :class:`crossweft.moe.Group` is a face of."""

    def __new__(
        cls,
        communicator: Communicator,
        *,
        experts: int,
        max_tokens: int,
        hidden: int,
        top_k: int,
        dtype: _DType | None = None,
        blocks: int | None = None,
        timeout: float | None = None,
        masking: bool = False,
    ) -> Self: ...
    @staticmethod
    def registered_bytes(
        ranks: int, *, experts: int, max_tokens: int, hidden: int, top_k: int, dtype: _DType | None = None
    ) -> int:
        """What the memory that peers write into takes on each rank of such a group."""
    @property
    def communicator(self) -> Communicator: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def masking(self) -> bool: ...
    @property
    def allocated_bytes(self) -> int: ...
    def expert_bounds(self, rank: int | None = None) -> tuple[int, int]: ...
    @property
    def masked(self) -> list[bool]: ...
    def check(self) -> None:
        """Fails if a launch on a device that has ended, ended badly."""
    def set_masked(self, rank: int, masked: bool) -> None: ...
    def handle(
        self,
        experts: _Tensor,
        top_k: int,
        weights: _Tensor | None = None,
        *,
        layout: _Layout = "expert_major",
        alignment: int = 1,
    ) -> MoeHandle: ...
    def output_shape(
        self, layout: _Layout, top_k: int, *, alignment: int = 1, scales: _Scales | None = None
    ) -> tuple[int, int, int, int]:
        """Rows, bytes of a row's elements and of its scales, experts of a row."""

@final
class MoeHandle:
    """What :class:`crossweft.moe.Handle` is a face of."""

    @property
    def group(self) -> MoeGroup: ...
    @property
    def tokens(self) -> int:
        """Tokens of this rank."""
    @property
    def allocated_bytes(self) -> int: ...
    def route(self, experts: _Tensor, top_k: int, weights: _Tensor | None = None) -> None: ...
    def output_shape(self, *, scales: _Scales | None = None) -> tuple[int, int, int, int]: ...
    def counts(self) -> MoeCounts: ...
    def device_counts(self) -> tuple[int, int, int]:
        """Addresses, and the most experts of a rank."""
    def dispatch(
        self,
        tokens: _Tensor,
        output: _Tensor,
        *,
        scales: _Tensor | None = None,
        quantise: _Scales | None = None,
        output_scales: _Tensor | None = None,
        output_experts: _Tensor | None = None,
        output_weights: _Tensor | None = None,
        output_sources: _Tensor | None = None,
        bounded: bool = False,
    ) -> None: ...
    def dispatch_send(
        self, tokens: _Tensor, *, scales: _Tensor | None = None, quantise: _Scales | None = None
    ) -> None: ...
    def wait_for_counts(self) -> MoeCounts: ...
    def dispatch_complete(
        self,
        output: _Tensor,
        *,
        scales: _Tensor | None = None,
        experts: _Tensor | None = None,
        weights: _Tensor | None = None,
        sources: _Tensor | None = None,
    ) -> None: ...
    def combine(self, rows: _Tensor, output: _Tensor, *, weights: _Tensor | None = None) -> None: ...
    def combine_send(self, rows: _Tensor, *, weights: _Tensor | None = None) -> None: ...
    def combine_complete(self, output: _Tensor) -> None: ...

@final
class MoeCounts:
    """How many rows a dispatch brought, and where they lie."""

    @property
    def rows(self) -> int:
        """Rows that the layout takes up, gaps and padding included: what a combine's input must have."""
    @property
    def per_expert(self) -> list[int]:
        """Tokens for each local expert, without padding."""
    @property
    def per_source(self) -> list[int]:
        """Tokens from each rank; each once, however many experts here it is for."""
    @property
    def expert_offsets(self) -> list[int]:
        """The first row of each local expert, where rows are grouped by expert."""
    def bounds(self, expert: int, source: int) -> tuple[int, int]:
        """The rows of a local expert that are tokens of a rank: the first, and one past the last."""
