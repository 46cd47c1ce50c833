"""Run by torchrun: a tensor-parallel MLP, compiled and not, whole and in shards."""

import shutil
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist

import crossweft as cw
from crossweft.torch import AllReduceCommunicator, register

# So that sums in another order are close.
torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
communicator = AllReduceCommunicator()
rank, world_size = communicator.rank, communicator.world_size
HIDDEN, INNER, TOKENS = 16, 32, 8


class Mlp(torch.nn.Module):
    """Columns of the first layer, and rows of the second, on each rank; or all, without a group."""

    def __init__(self, group: str | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        first, second = (torch.randn(shape, generator=generator) for shape in [(INNER, HIDDEN), (HIDDEN, INNER)])
        if group is not None:
            first, second = first.chunk(world_size)[rank], second.chunk(world_size, dim=1)[rank]
        self.first, self.second = torch.nn.Parameter(first.clone()), torch.nn.Parameter(second.clone())
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = torch.nn.functional.gelu(x @ self.first.t()) @ self.second.t()
        if self.group is None:
            return partial
        return torch.ops.crossweft.all_reduce(partial, "sum", self.group)


class InPlace(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = torch.nn.functional.gelu(x @ self.first.t()) @ self.second.t()
        torch.ops.crossweft.all_reduce_(partial, "sum", self.group)
        return partial + 1


class Sequence(Mlp):
    """Tokens are shared out between the layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.crossweft.all_gather(x, world_size, self.group)
        partial = torch.nn.functional.gelu(x @ self.first.t()) @ self.second.t()
        return torch.ops.crossweft.reduce_scatter(partial, "sum", world_size, self.group)


x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
# Inductor needs a C++ compiler and Python's headers.
has_compiler = shutil.which("g++") and (Path(sysconfig.get_path("include")) / "Python.h").exists()
backends = ["aot_eager", *(["inductor"] if has_compiler else [])]
with register("tp", communicator):
    whole, sharded = Mlp(None), Mlp("tp")
    expected = whole(x)
    torch.testing.assert_close(sharded(x), expected)
    rows = x.chunk(world_size)[rank]
    with torch.no_grad():
        torch.testing.assert_close(Sequence("tp")(rows), expected.chunk(world_size)[rank])
    # Each rank's loss is the whole loss, so their sum is world_size times it.
    expected.square().sum().backward()
    sharded(x).square().sum().backward()
    torch.testing.assert_close(sharded.first.grad / world_size, whole.first.grad.chunk(world_size)[rank])
    for backend in backends:
        # Inductor compiles C++ for each, which takes its time.
        models = [(sharded, x), (InPlace("tp"), x), (Sequence("tp"), rows)]
        for model, tokens in models if backend == "aot_eager" else models[1:2]:
            with torch.no_grad():
                eager = model(tokens)
                compiled = torch.compile(model, backend=backend, fullgraph=True)(tokens)
            torch.testing.assert_close(compiled, eager)
        grads = [parameter.grad.clone() for parameter in sharded.parameters()]
        sharded.zero_grad()
        torch.compile(sharded, backend=backend, fullgraph=True)(x).square().sum().backward()
        torch.testing.assert_close([parameter.grad for parameter in sharded.parameters()], grads)
        torch._dynamo.reset()
    try:
        torch.ops.crossweft.all_reduce_(sharded.first * 2, "sum", "tp")
    except cw.UsageError as error:
        assert "all_reduce_ has no gradients" in str(error)
    else:
        raise AssertionError("gradients would be wrong")

    def tripled(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch.ops.crossweft.all_reduce_(y, "sum", "tp")
        return y * 3

    for backend in backends:
        # Dynamo's own error has ours in it.
        try:
            torch.compile(tripled, backend=backend)(torch.ones(2, requires_grad=True)).sum().backward()
        except Exception as error:
            assert "all_reduce_ has no gradients" in str(error), error
        else:
            raise AssertionError("gradients would be wrong")
        torch._dynamo.reset()
    tokens, weight = torch.ones(4, 8, dtype=torch.float32), torch.full((8,), 3.0, dtype=torch.float32)
    norm, add_norm = torch.ops.crossweft.all_reduce_rms_norm, torch.ops.crossweft.all_reduce_add_rms_norm

    def normalised(residual: torch.Tensor) -> torch.Tensor:
        return norm(tokens, weight, 1e-6, "tp") + 2 * add_norm(tokens, residual, weight, 1e-6, "tp")

    for backend in [None, *backends]:
        call = torch.compile(normalised, backend=backend, fullgraph=True) if backend else normalised
        residual = torch.full_like(tokens, 5.0)
        torch.testing.assert_close(call(residual), torch.full_like(tokens, 9.0))
        assert torch.equal(residual, torch.full_like(tokens, 5.0 + world_size)), "replaced"
    torch.library.opcheck(norm.default, (tokens, weight, 1e-6, "tp"))
    torch.library.opcheck(add_norm.default, (tokens, residual, weight, 1e-6, "tp"))
    try:
        norm(tokens, weight.clone().requires_grad_(), 1e-6, "tp")
    except cw.UsageError as error:
        assert "all_reduce_rms_norm has no gradients" in str(error)
    else:
        raise AssertionError("gradients would be wrong")
    sizes = torch.compile(lambda x: torch.ops.crossweft.all_reduce(x, "sum", "tp"), backend="aot_eager", dynamic=True)
    for tokens in (3, 5, 9):
        assert torch.equal(sizes(torch.ones(tokens, 2)), torch.full((tokens, 2), float(world_size)))
    arguments = [(torch.ops.crossweft.all_reduce, "sum", "tp"), (torch.ops.crossweft.all_reduce_, "sum", "tp")]
    for op, *rest in arguments:
        for tensor in (torch.ones(4), torch.ones(6, 8).t(), torch.ones(6, 8).t()[:, 2:5]):
            torch.library.opcheck(op.default, (tensor, *rest))
    torch.library.opcheck(torch.ops.crossweft.all_gather.default, (torch.ones(4, 2), world_size, "tp"))
    torch.library.opcheck(torch.ops.crossweft.reduce_scatter.default, (torch.ones(4, 2), "sum", world_size, "tp"))
    try:
        torch.ops.crossweft.all_gather(x, world_size + 1, "tp")
    except cw.UsageError as error:
        assert f"'tp' has {world_size} ranks, not {world_size + 1}" in str(error)
    else:
        raise AssertionError("the group has other ranks")
    try:
        register("tp", communicator)
    except cw.UsageError as error:
        assert "called 'tp' already" in str(error)
    else:
        raise AssertionError("the name is taken")
try:
    torch.ops.crossweft.all_reduce(x, "sum", "tp")
except cw.UsageError as error:
    assert "no communicator is called 'tp' (there are: none)" in str(error)
else:
    raise AssertionError("the registration is closed")
print(f"rank {rank} ok with {', '.join(backends)}\n", end="", flush=True)
communicator.close()
dist.destroy_process_group()
