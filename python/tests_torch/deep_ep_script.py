"""A pass of each kind over a gloo process group, by the name of DeepEP."""

from __future__ import annotations

import torch
import torch.distributed as dist

from crossweft.compat import deep_ep

deep_ep.install()

from deep_ep import Buffer  # noqa: E402

dist.init_process_group("gloo")
# As DeepEP's own programs do.
torch.set_default_dtype(torch.bfloat16)
rank, ranks = dist.get_rank(), dist.get_world_size()
buffer = Buffer(
    group=dist.new_group(backend="gloo"), num_nvl_bytes=1 << 20, num_rdma_bytes=0, num_qps_per_rank=1, timeout=60.0
)
x = torch.full((4, 128), rank + 1.0, dtype=torch.bfloat16)
topk_idx = torch.tensor([[0, 1], [1, 0], [-1, 0], [1, -1]])
weights = torch.full((4, 2), 0.5, dtype=torch.float32)
per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx=topk_idx, num_experts=ranks)
rows, idx, row_weights, counts, handle, _ = buffer.dispatch(
    x=x,
    num_tokens_per_rank=per_rank,
    is_token_in_rank=in_rank,
    num_tokens_per_expert=per_expert,
    topk_idx=topk_idx,
    topk_weights=weights,
)
assert counts == [6] and len(rows) == 6 and idx.shape == (6, 2)
assert torch.equal(rows[:, 0], torch.tensor([1.0, 1, 1, 2, 2, 2], dtype=torch.bfloat16))
combined, row_weights, _ = buffer.combine(rows, handle, topk_weights=row_weights)
assert torch.equal(row_weights, torch.where(topk_idx >= 0, weights, 0.0).float())
assert torch.equal(combined, x * torch.tensor([[2], [2], [1], [1]], dtype=torch.bfloat16))

rows, counts, handle, _, hook = buffer.low_latency_dispatch(x, topk_idx, 8, ranks, use_fp8=False, return_recv_hook=True)
hook()
assert counts.tolist() == [6]
combined, _, _ = buffer.low_latency_combine(rows, topk_idx, weights, handle)
assert torch.equal(combined, x * torch.tensor([[1], [1], [0.5], [0.5]], dtype=torch.bfloat16))
buffer.destroy()
dist.barrier()
dist.destroy_process_group()
print("rank ok", flush=True)
