"""Mixture of experts: *dispatch* sends tokens to the ranks of their experts, *combine* brings back what these made of
them.

* :class:`Group`: long-lived; memory of all ranks for such calls, made once for the largest that will come.
* :class:`Handle`: one forward pass: where its tokens go, and where those that came lie (:class:`Counts`).
* :class:`Received`: what a dispatch brings, in one of four layouts.

A token crosses once to each rank that has one of its experts. Rows are placed by prefix sums, always by source rank and
then token, and all sums have one order: the same calls give the same bits. Tensors are where the communicator computes:
in host memory, torch's, numpy's, or any buffer, or on a CUDA device; those that are made here are of the kind of the
tokens. ``crossweft.torch.moe`` has gradients.
"""

from .._crossweft import MoeCounts as Counts
from ._group import DeviceArray, DeviceCounts, Group, Handle, Layout, Quantise, Received

__all__ = ["Counts", "DeviceArray", "DeviceCounts", "Group", "Handle", "Layout", "Quantise", "Received"]
