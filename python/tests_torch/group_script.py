"""Run by torchrun: communicators of process groups, and of the launcher."""

import os
import sys

import torch
import torch.distributed as dist

import crossweft as cw
from crossweft.torch import AllReduceCommunicator, from_store

if sys.argv[1] == "no group":
    # Of the launcher, then of a store.
    with AllReduceCommunicator() as communicator:
        assert communicator.all_reduce(torch.ones(3)).tolist() == [communicator.world_size] * 3
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    joined = from_store(dist.PrefixStore("of this test", store), rank, world_size)
    communicator = AllReduceCommunicator(joined)
else:
    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    communicator = AllReduceCommunicator()
    rank = communicator.rank
    assert (rank, communicator.world_size) == (dist.get_rank(), dist.get_world_size())
    pair = AllReduceCommunicator(groups[rank % 2], name="pair")
    assert (pair.rank, pair.world_size) == (rank // 2, 2)
    expected = torch.full((1000,), 2.0 if rank % 2 == 0 else 4.0)
    assert torch.equal(pair.all_reduce(torch.full((1000,), float(rank))), expected)
    # The communicator beneath, of the same kind of group.
    data = torch.full((1000,), rank, dtype=torch.bfloat16)
    plan = cw.Plan.all_reduce("one-shot", 2)
    plan.run(cw.Communicator.from_process_group(groups[rank % 2]), data)
    assert torch.equal(data.float(), expected)
    try:
        AllReduceCommunicator(groups[1 - rank % 2])
    except cw.UsageError as error:
        assert "not a member" in str(error)
    else:
        raise AssertionError("this rank is not a member")
    # What only the first rank finds out.
    try:
        AllReduceCommunicator(bind="no-such-if")
    except cw.UsageError as error:
        assert "there is no interface" in str(error)
    else:
        raise AssertionError("there is no such interface")
total = communicator.all_reduce_(torch.ones(5, dtype=torch.int64) * communicator.rank)
assert total.tolist() == [sum(range(communicator.world_size))] * 5
communicator.close()
assert communicator.disabled
print(f"rank {communicator.rank} ok\n", end="", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
