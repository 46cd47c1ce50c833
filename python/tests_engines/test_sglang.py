"""The plugin in SGLang's own code: what it replaces, that it fits, and that what goes through it is right."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_processes

from crossweft.engines import sglang as plugin

PACKAGE = "sglang.srt.distributed.device_communicators"


def test_its_loader_finds_the_plugin() -> None:
    [point] = [each for each in metadata.entry_points(group="sglang.srt.plugins") if each.name == "crossweft"]
    assert point.load() is plugin.register


def test_the_version_here_is_one_that_is_said_to_be_tested() -> None:
    assert metadata.version("sglang") in plugin.TESTED


def test_members_have_the_signatures_of_theirs() -> None:
    from sglang.srt.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2
    from sglang.srt.distributed.device_communicators.pymscclpp import PyMscclppCommunicator

    def parameters(function: Any) -> list[tuple[str, Any, Any]]:
        return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]

    for name in plugin.MSCCLPP_CONTRACT:
        assert parameters(getattr(plugin.MscclppCommunicator, name)) == parameters(getattr(PyMscclppCommunicator, name))
    public = {name for name in vars(PyMscclppCommunicator) if not name.startswith("_")}
    # The conversion of types to MSCCL++'s is nobody's but its own.
    assert public - {"dtype_to_mscclpp_dtype"} == set(plugin.MSCCLPP_CONTRACT) - {"__init__"}
    for theirs in (CustomAllreduce, CustomAllReduceV2):
        for name in plugin.CUSTOM_CONTRACT:
            assert parameters(getattr(plugin.CrossweftAllReduce, name)) == parameters(getattr(theirs, name)), name


def _register(monkeypatch: pytest.MonkeyPatch, value: str) -> tuple[bool, dict[str, list[Any]]]:
    """Registers, and what that has added to an empty registry."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    added: dict[str, list[Any]] = {}
    monkeypatch.setattr(
        HookRegistry, "register", lambda target, hook, kind: added.setdefault(target, []).append((hook, kind.name))
    )
    monkeypatch.setenv(plugin.SWITCH, value)
    return plugin.register(), added


@pytest.mark.parametrize(
    ("value", "targets"), [("0", ()), ("1", ("c",)), ("mscclpp", ("m",)), ("custom,mscclpp", "cm")]
)
def test_the_switch_says_what_is_hooked(monkeypatch: pytest.MonkeyPatch, value: str, targets: tuple[str, ...]) -> None:
    names = {
        "c": f"{PACKAGE}.custom_all_reduce.dispatch_custom_allreduce",
        "m": f"{PACKAGE}.pymscclpp.PyMscclppCommunicator",
    }
    done, added = _register(monkeypatch, value)
    assert done == bool(targets)
    assert set(added) == {names[each] for each in targets}


@pytest.mark.parametrize("case", ["version", "value", "signature"])
def test_what_does_not_fit_is_refused_loudly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    from sglang.srt.distributed.device_communicators import custom_all_reduce

    value, words = "custom", "sglang 0.9.0 was not tested"
    if case == "version":
        monkeypatch.setattr(metadata, "version", lambda name: "0.9.0")
    elif case == "value":
        value, words = "yes please", "CROSSWEFT_SGLANG is 'yes please'"
    else:
        monkeypatch.setattr(custom_all_reduce, "dispatch_custom_allreduce", lambda group, device, size: None)
        words = "is not called as"
    with caplog.at_level(logging.ERROR):
        done, added = _register(monkeypatch, value)
    assert (done, added) == (False, {})
    [record] = [each for each in caplog.records if each.name.startswith("crossweft")]
    assert record.levelno == logging.ERROR
    assert "changes nothing in SGLang" in record.message and words in record.message


def test_a_version_that_is_not_known_stays_as_it_is_under_the_real_loader() -> None:
    script = f"""
import engine_stubs, logging
engine_stubs.install()
from importlib import metadata
real = metadata.version
metadata.version = lambda name: "0.9.0" if name == "sglang" else real(name)
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.distributed.device_communicators import custom_all_reduce, pymscclpp
assert custom_all_reduce.dispatch_custom_allreduce.__module__ == "{PACKAGE}.custom_all_reduce"
assert not hasattr(custom_all_reduce.dispatch_custom_allreduce, "__wrapped__")
assert pymscclpp.PyMscclppCommunicator.__module__ == "{PACKAGE}.pymscclpp"
"""
    environment = {**os.environ, plugin.SWITCH: "all", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "sglang 0.9.0 was not tested with this crossweft" in done.stderr


def _coordinator_uses_it() -> None:
    """SGLang's loader, then a group of SGLang's that makes its communicators itself."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.distributed import parallel_state

    group = parallel_state.GroupCoordinator(
        group_ranks=[[0, 1]],
        local_rank=dist.get_rank(),
        torch_distributed_backend="gloo",
        use_pynccl=False,
        use_mscclpp=True,
        use_custom_allreduce=True,
        use_torch_symm_mem_all_reduce=False,
        use_hpu_communicator=False,
        use_xpu_communicator=False,
        group_name="tp",
    )
    rank = group.rank_in_group
    _check_custom(group, rank)
    _check_mscclpp(group, rank)
    group.ca_comm.close()
    group.destroy()
    assert not group.pymscclpp_comm.available


def _check_custom(group: Any, rank: int) -> None:
    custom = group.ca_comm
    assert isinstance(custom, plugin.CrossweftAllReduce) and not custom.disabled
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        # 10 KiB, 14 KiB and 112 KiB in bf16: no powers of two. 3 elements: no multiple of 16 bytes.
        for shape in ((1, 5120), (1, 7168), (8, 7168), (3,)):
            data = (torch.arange(torch.Size(shape).numel()) % 7 + rank).reshape(shape).to(dtype)
            before = data.clone()
            assert group._resolve_outplace_all_reduce_method(data) == "ca"
            out = group._all_reduce_out_place(data, "ca")
            assert torch.equal(data, before) and out.data_ptr() != data.data_ptr()
            assert torch.equal(out, 2 * before + (1 - 2 * rank))
    # Dense, but not contiguous.
    data = torch.full((64, 32), float(rank + 1)).t()
    assert custom.should_custom_ar(data) and torch.equal(custom.custom_all_reduce(data), torch.full((32, 64), 3.0))
    with custom.capture():
        assert torch.equal(custom.custom_all_reduce(data), torch.full((32, 64), 3.0))
    for refused in (torch.zeros(1 << 20), torch.zeros(64, 64)[:, ::2], torch.zeros(4, dtype=torch.complex64)):
        assert not custom.should_custom_ar(refused)
        assert custom.custom_all_reduce(refused) is None
    report = custom.crossweft.report()
    assert sum(count.calls for count in report.calls) == 14
    assert {count.reason for count in report.refused} == {
        "it has more than max_bytes (2097152) bytes",
        "its elements do not fill a range of memory, so it would be copied",
        "its elements are of torch.complex64",
    }


def _check_mscclpp(group: Any, rank: int) -> None:
    from sglang.srt.compilation import compile_phase

    ours = group.pymscclpp_comm
    assert isinstance(ours, plugin.MscclppCommunicator)
    assert ours.available and ours.disabled and (ours.rank, ours.world_size, ours.ranks) == (rank, 2, [0, 1])
    data = torch.full((7, 128), rank + 1, dtype=torch.bfloat16)
    # Graphs are where SGLang enables it.
    assert not ours.should_mscclpp_allreduce(data)
    with ours.change_state(enable=True):
        assert not ours.disabled
        assert ours.should_mscclpp_allreduce(data)
        # It goes first.
        assert group._resolve_outplace_all_reduce_method(data) == "pymscclpp"
        assert ours.all_reduce(data) is data and torch.equal(data, torch.full_like(data, 3))
        # For "auto", SGLang copies the input of what works in place.
        out = group._all_reduce_out_place(data, "auto")
        assert torch.equal(out, torch.full_like(data, 6)) and torch.equal(data, torch.full_like(data, 3))
        assert not ours.should_mscclpp_allreduce(data, dist.ReduceOp.MAX)
        assert not ours.should_mscclpp_allreduce(torch.zeros(4, dtype=torch.int64))
        with pytest.raises(ValueError, match="sums only"):
            ours.all_reduce(data, dist.ReduceOp.MAX)
        block, whole = torch.full((3, 8), float(rank)), torch.empty(6, 8)
        assert ours.should_mscclpp_allgather(whole, block)
        group._all_gather_into_tensor(whole, block)
        assert torch.equal(whole, torch.tensor([0.0, 1.0]).repeat_interleave(24).reshape(6, 8))
        assert not ours.should_mscclpp_allgather(torch.empty(5, 8), block)
        assert not ours.should_mscclpp_allgather(torch.empty(6, 8, dtype=torch.float16), block)
        with pytest.raises(ValueError, match="40 elements; 2 inputs have 48"):
            ours.all_gather(torch.empty(5, 8), block)
        with ours.change_state(enable=False):
            assert ours.disabled and not ours.should_mscclpp_allreduce(data)
        with compile_phase.enable_torch_compile_warmup():
            assert not ours.should_mscclpp_allreduce(data)
    assert ours.disabled
    reasons = {count.reason for count in ours.crossweft.report().refused}
    assert "SGLang asks this communicator for sums only" in reasons
    assert "SGLang compiles or captures a piecewise graph" in reasons


def test_a_group_of_sglang_uses_it(tmp_path: Path) -> None:
    in_processes(2, _coordinator_uses_it, tmp_path, CROSSWEFT_SGLANG="all", CROSSWEFT_MAX_BYTES=str(2 << 20))


@pytest.mark.parametrize("case", ["dispatcher", "kernel", "registry"])
def test_deep_ep_stays_if_the_plugin_refuses_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    from sglang.kernels.ops.quantization import fp8_kernel
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.plugins.hook_registry import HookRegistry

    theirs = ModuleType("deep_ep")
    monkeypatch.setitem(sys.modules, "deep_ep", theirs)
    monkeypatch.setenv(plugin.SWITCH, "ep")
    if case == "dispatcher":
        monkeypatch.delattr(deepep, "use_deepep")
    elif case == "kernel":
        monkeypatch.setattr(deepep, "use_deepep", False)
        monkeypatch.delattr(fp8_kernel, "sglang_per_token_group_quant_fp8")
    else:
        monkeypatch.setattr(HookRegistry, "register", lambda target, hook: None)
    before, hooks = dict(vars(deepep)), dict(HookRegistry._hooks)
    assert not plugin.register()
    assert sys.modules["deep_ep"] is theirs and vars(deepep) == before and HookRegistry._hooks == hooks
    [record] = [each for each in caplog.records if each.levelno == logging.ERROR]
    words = {"dispatcher": "use_deepep", "kernel": "sglang_per_token_group_quant_fp8", "registry": "TypeError: "}
    assert "changes nothing in SGLang" in record.message and words[case] in record.message


def _their_own_takes_the_rest() -> None:
    """Over SGLang's class, whose kernels are replaced by torch's."""
    from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2

    closed: list[str] = []

    class Theirs(CustomAllReduceV2):  # type: ignore[misc]
        def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
            self.group, self.disabled = group, False

        def should_custom_ar(self, inp: torch.Tensor) -> bool:
            return inp.numel() * inp.element_size() <= 1 << 20

        def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(out := input.clone(), group=self.group)
            return out

        def close(self) -> None:
            closed.append("theirs")

    made = plugin.make_custom_all_reduce(Theirs, dist.group.WORLD, torch.device("cpu"))
    assert isinstance(made, CustomAllReduceV2) and isinstance(made, plugin.CustomAllReduce)
    small, large, larger = (torch.full((count,), dist.get_rank() + 1.0) for count in (64, 1024, 1 << 20))
    assert made.should_custom_ar(small) and made.should_custom_ar(large) and not made.should_custom_ar(larger)
    for data in (small, large):
        assert torch.equal(made.custom_all_reduce(data), torch.full_like(data, 3))
    assert [count.calls for count in made.crossweft.report().calls] == [1]
    made.close()
    assert closed == ["theirs"]
    # Theirs, disabled as it disables itself here, or by a fault on one rank: crossweft alone.
    for without in (_Disabled, _FailsOnOneRank):
        alone = plugin.make_custom_all_reduce(without, dist.group.WORLD, torch.device("cpu"))
        assert type(alone) is plugin.CrossweftAllReduce and not alone.disabled
        assert torch.equal(alone.custom_all_reduce(small), torch.full_like(small, 3))
        alone.close()
    # And neither.
    os.environ["CROSSWEFT_MAX_BYTES"] = "no number"
    neither = plugin.make_custom_all_reduce(_Disabled, dist.group.WORLD, torch.device("cpu"))
    assert neither.disabled and not neither.should_custom_ar(small)


class _Disabled(plugin.NoCustomAllReduce):
    pass


class _FailsOnOneRank(plugin.NoCustomAllReduce):
    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.disabled = False
        if dist.get_rank(group) == 1:
            raise MemoryError("no room")


def test_their_own_takes_the_rest(tmp_path: Path) -> None:
    in_processes(2, _their_own_takes_the_rest, tmp_path, CROSSWEFT_MAX_BYTES="1024")


def _experts_use_it() -> None:
    """A layer of experts between the two halves of SGLang's dispatcher, made as its layers make it."""
    from types import SimpleNamespace

    from sglang.srt.layers.moe.token_dispatcher import deepep

    # As in a process that has loaded the layers before the plugins.
    assert not deepep.use_deepep
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.batch_overlap import two_batch_overlap
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
    from sglang.srt.layers.moe.utils import DeepEPMode

    from crossweft.engines._plugin import UnsupportedEngine
    from crossweft.engines._sglang_dispatcher import CrossweftDispatcher

    assert two_batch_overlap.DeepEPDispatcher is CrossweftDispatcher and issubclass(CrossweftDispatcher, BaseDispatcher)
    # What is asked of a device, and of a server.
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    deepep.get_cuda_version = lambda: (13, 0)
    deepep.deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = True
    two_batch_overlap.is_tbo_enabled = deepep.is_tbo_enabled = lambda: False
    two_batch_overlap.get_moe_a2a_backend = lambda: SimpleNamespace(is_deepep=lambda: True)
    output = SimpleNamespace(now=deepep.DispatcherOutputDtype.BF16)
    deepep.get_deepep_output_dtype = lambda of: output.now
    deepep.get_deepep_config = lambda: None
    is_extend = SimpleNamespace(now=True)
    deepep.get_is_extend_in_batch = lambda: is_extend.now
    buffers = SimpleNamespace(buffers={})
    deepep.get_resources = lambda: buffers

    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden, experts, tokens, top_k = 512, 4, 5, 2
    own = experts // ranks
    dispatcher = two_batch_overlap.MaybeTboDeepEPDispatcher(
        group=dist.group.WORLD,
        router_topk=top_k,
        permute_fusion=True,
        num_experts=experts,
        num_local_experts=own,
        hidden_size=hidden,
        params_dtype=torch.bfloat16,
        deepep_mode=DeepEPMode.AUTO,
        async_finish=True,
        return_recv_hook=True,
    )
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 8, (tokens, hidden), generator=generator).bfloat16()
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k, -1)[1].int()
    # Powers of two, so that nothing is rounded.
    weights = torch.tensor([[0.5, 0.25]] * tokens)
    # Expert e multiplies by e + 1.
    expected = (x.float() * (weights * (ids + 1)).sum(1, keepdim=True)).bfloat16()
    topk_output = SimpleNamespace(topk_weights=weights, topk_ids=ids)
    for is_extend.now in (True, False, True):
        got = dispatcher.dispatch(hidden_states=x, topk_output=topk_output)
        if is_extend.now:
            assert got.format.is_deepep_normal() and got.hidden_states_scale is None
            factors = torch.where(got.topk_ids >= 0, got.topk_weights * (got.topk_ids + rank * own + 1), 0).sum(1)
            made = (got.hidden_states.float() * factors.unsqueeze(1)).bfloat16()
            held = deepep.DeepEPNormalCombineInput(made, got.topk_ids, got.topk_weights)
            # Rounded up for its matrix products.
            counts = [int((got.topk_ids == e).sum()) for e in range(own)]
            assert got.num_recv_tokens_per_expert == [-(-count // 128) * 128 for count in counts]
        else:
            assert got.format.is_deepep_ll() and got.hidden_states.shape[0] == own
            of_experts = torch.arange(rank * own, (rank + 1) * own) + 1
            made = (got.hidden_states.float() * of_experts.view(-1, 1, 1)).bfloat16()
            held = deepep.DeepEPLLCombineInput(made, got.topk_ids, got.topk_weights)
        assert torch.equal(dispatcher.combine(combine_input=held), expected), is_extend.now
    # CROSSWEFT_TIMEOUT.
    assert buffers.buffers["deepep_ep_state"].buffer.timeout == 120
    with pytest.raises(UnsupportedEngine, match="single-batch overlap"):
        dispatcher.set_overlap_args(None, {})
    output.now = deepep.DispatcherOutputDtype.NVFP4
    with pytest.raises(UnsupportedEngine, match="bf16 and fp8, not NVFP4"):
        dispatcher.set_quant_config({})


def test_its_layers_of_experts_use_it(tmp_path: Path) -> None:
    in_processes(
        2, _experts_use_it, tmp_path, CROSSWEFT_SGLANG="ep", SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK="8"
    )
