"""``Config``, and what memory is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from ..._crossweft import MoeGroup
from ...errors import UsageError

#: The most experts of a token.
TOP_K = 32
#: Tokens of a rank that a size hint is for.
_TOKENS = 4096


@dataclass(frozen=True)
class Config:
    """Numbers that tune DeepEP's kernels. They are checked as DeepEP does, kept, and decide nothing here.

    ``num_sms`` must be even; a queue must have room for more tokens than are sent at once.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        if self.num_sms < 0:
            raise UsageError(f"num_sms is {self.num_sms}; it must not be negative")
        for link in ("nvl", "rdma"):
            sent = getattr(self, f"num_max_{link}_chunked_send_tokens")
            received = getattr(self, f"num_max_{link}_chunked_recv_tokens")
            if not 0 < sent < received:
                raise UsageError(
                    f"num_max_{link}_chunked_send_tokens is {sent}, num_max_{link}_chunked_recv_tokens {received}; "
                    "the first must be positive, the second larger"
                )
        step = self.num_max_rdma_chunked_send_tokens
        rounded = -(-self.num_max_rdma_chunked_recv_tokens // step) * step
        object.__setattr__(self, "num_max_rdma_chunked_recv_tokens", rounded)
        if rounded < 2 * step:
            raise UsageError(f"num_max_rdma_chunked_recv_tokens is {rounded}; it must be twice {step} at least")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """What memory for up to 4096 tokens of each rank takes, with one expert a rank. Nothing needs to be given
        it."""
        hidden = -(-hidden_bytes // 16) * 8
        return MoeGroup.registered_bytes(
            num_ranks, experts=num_ranks, max_tokens=_TOKENS, hidden=hidden, top_k=TOP_K, dtype="bf16"
        )

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """None: ranks are on one host."""
        return 0


def low_latency_bytes(max_tokens: int, hidden: int, ranks: int, experts: int) -> int:
    """What memory for low-latency calls takes."""
    return MoeGroup.registered_bytes(
        ranks, experts=experts, max_tokens=max_tokens, hidden=hidden, top_k=TOP_K, dtype="bf16"
    )
