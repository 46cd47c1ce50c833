"""Run by torchrun, on a GPU that processes share or on one for each: a tensor-parallel transformer block, compiled and
not."""

import logging
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention

import crossweft as cw
from crossweft.engines._communicator import EngineCommunicator
from crossweft.torch import AllReduceCommunicator, register

BACKENDS = sys.argv[1].split(",") if len(sys.argv) > 1 else ["aot_eager"]
DTYPES = [getattr(torch, name) for name in (sys.argv[2] if len(sys.argv) > 2 else "float32,bfloat16").split(",")]
HIDDEN, HEADS, INNER, TOKENS, EPSILON = 256, 8, 512, 24, 1e-6
dist.init_process_group("gloo")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
communicator = AllReduceCommunicator(device=f"cuda:{torch.cuda.current_device()}", timeout=60.0)
rank, world_size = communicator.rank, communicator.world_size
device = communicator.device


def parameter(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device)


class Block(torch.nn.Module):
    """Attention and an MLP between normalisations, with this rank's heads and columns; or all, without a group."""

    def __init__(self, group: str | None, fused: bool, dtype: torch.dtype) -> None:
        super().__init__()
        ranks, own = (1, 0) if group is None else (world_size, rank)
        qkv, out = parameter(1, 3, HEADS, HIDDEN // HEADS, HIDDEN), parameter(2, HIDDEN, HIDDEN)
        up, down = parameter(3, INNER, HIDDEN), parameter(4, HIDDEN, INNER)
        self.heads = HEADS // ranks
        self.qkv = qkv.chunk(ranks, 1)[own].reshape(-1, HIDDEN).to(dtype)
        self.out, self.up = out.chunk(ranks, 1)[own].to(dtype), up.chunk(ranks)[own].to(dtype)
        self.down = down.chunk(ranks, 1)[own].to(dtype)
        self.first = (1 + parameter(5, HIDDEN)).to(dtype)
        self.second = (1 + parameter(6, HIDDEN)).to(dtype)
        self.group, self.fused = group, fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        qkv = (rms_norm(x, (HIDDEN,), self.first, EPSILON) @ self.qkv.t()).view(tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(1, 2, 0, 3).unbind(0)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(tokens, -1)
        partial = attended @ self.out.t()
        if self.fused:
            x = x.clone()
            h = torch.ops.crossweft.all_reduce_add_rms_norm(partial, x, self.second, EPSILON, self.group)
        else:
            x = x + self.all_reduced(partial)
            h = rms_norm(x, (HIDDEN,), self.second, EPSILON)
        return x + self.all_reduced(gelu(h @ self.up.t()) @ self.down.t())

    def all_reduced(self, partial: torch.Tensor) -> torch.Tensor:
        return partial if self.group is None else torch.ops.crossweft.all_reduce(partial, "sum", self.group)


def capture_what_nobody_has_prepared() -> None:
    """All ranks capture it at the same time, so it is prepared then."""
    tensor = torch.zeros(5000, dtype=torch.float16, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = communicator.all_reduce(tensor)
    for turn in range(20):
        tensor.fill_(turn + rank)
        graph.replay()
        assert total.unique().tolist() == [sum(turn + each for each in range(world_size))]
    communicator.check()


def replays(block: Block, x: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """A graph of the block, with other inputs each time."""
    static = x.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        block(static)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            made = block(static)
        for turn in range(6):
            static.copy_(x if turn % 2 == 0 else -x)
            graph.replay()
            if turn % 2 == 0:
                torch.testing.assert_close(made, expected, rtol=tolerance, atol=tolerance)
    torch.cuda.current_stream().wait_stream(side)


def engine() -> None:
    """What an engine's slot is given: eager, and in graphs of several sizes, which engines capture from the largest."""
    log = logging.getLogger("engine")
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.setLevel(logging.INFO)
    os.environ |= {"CROSSWEFT_DTYPES": "bfloat16", "CROSSWEFT_MAX_BYTES": str(1 << 20)}
    ours = EngineCommunicator.create(dist.group.WORLD, device, "an engine", log)
    assert ours is not None
    side, graphs = torch.cuda.Stream(), []
    with torch.cuda.stream(side):
        pool = torch.cuda.graph_pool_handle()
        for tokens in (64, 8, 1):
            static = torch.zeros(tokens, 5120, dtype=torch.bfloat16, device=device)
            assert ours.should_all_reduce(static)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                reduced = ours.all_reduce(ours.all_reduce(static + 1) - world_size)
            graphs.append((graph, static, reduced))
        for turn in range(4):
            for graph, static, reduced in graphs:
                static.fill_(turn + rank)
                graph.replay()
                total = sum(turn + each for each in range(world_size)) * world_size
                assert reduced.unique().tolist() == [total]
    assert not ours.should_all_reduce(torch.zeros(4, device=device)), "a type that was not asked for"
    ours.check()
    ours.close()


def symmetric() -> None:
    """Tensors that all ranks reach, and a graph whose memory they are: reduced where they lie."""
    ours = AllReduceCommunicator(dist.group.WORLD, device=device, timeout=60.0)
    pool = ours.mem_pool(64 << 20)
    # Beyond what goes in one hop.
    shape = (1 << 10, 1 << 10)
    ours.prepare(shape, torch.float32)
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.full(shape, rank + 1.0, device=device)
    assert pool.holds(tensor)
    ours.all_reduce_(tensor)
    assert tensor.unique().tolist() == [sum(range(1, world_size + 1))]
    own = torch.zeros(shape, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        total = ours.all_reduce_(own * 2)
    assert pool.holds(total)
    for turn in range(10):
        own.fill_(turn + rank)
        graph.replay()
        assert total.unique().tolist() == [2 * sum(turn + each for each in range(world_size))]
    ours.check()
    assert {count.path for count in ours.report().calls} == {"symmetric"}
    del graph, total, tensor
    ours.close()


capture_what_nobody_has_prepared()
engine()
symmetric()
with register("tp", communicator), torch.no_grad():
    for dtype in DTYPES:
        tolerance = 1e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        x = parameter(7, TOKENS, HIDDEN).to(dtype) * HIDDEN**0.5
        expected = Block(None, False, dtype)(x)
        for fused in (False, True):
            block = Block("tp", fused, dtype)
            torch.testing.assert_close(block(x), expected, rtol=tolerance, atol=tolerance)
            for backend in BACKENDS:
                compiled = torch.compile(block, backend=backend, fullgraph=True)
                for _ in range(2):
                    torch.testing.assert_close(compiled(x), expected, rtol=tolerance, atol=tolerance)
                torch._dynamo.reset()
            replays(block, x, expected, tolerance)
    tensor = torch.ones(6, HIDDEN, device=device)
    torch.library.opcheck(torch.ops.crossweft.all_reduce.default, (tensor, "sum", "tp"))
    torch.library.opcheck(torch.ops.crossweft.all_reduce_.default, (tensor, "sum", "tp"))
    torch.library.opcheck(torch.ops.crossweft.all_reduce_rms_norm.default, (tensor, tensor[0], EPSILON, "tp"))
    arguments = (tensor, tensor.clone(), tensor[0], EPSILON, "tp")
    torch.library.opcheck(torch.ops.crossweft.all_reduce_add_rms_norm.default, arguments)
communicator.check()
if rank == 0 and os.environ.get("CROSSWEFT_TELL"):
    print(*cw.report(), sep="\n")
print(f"rank {rank} ok\n", end="", flush=True)
communicator.close()
dist.destroy_process_group()
