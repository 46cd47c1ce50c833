"""The plugin in vLLM's own code: what it replaces, that it fits, and that what goes through it is right."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_processes

from crossweft.engines import vllm as plugin
from crossweft.engines._plugin import UnsupportedEngine


def test_its_loader_finds_the_plugin() -> None:
    [point] = [each for each in metadata.entry_points(group="vllm.general_plugins") if each.name == "crossweft"]
    assert point.load() is plugin.register


def test_the_version_here_is_one_that_is_said_to_be_tested() -> None:
    assert metadata.version("vllm") in plugin.TESTED


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's CUDA platform, to which the test may do anything."""
    from vllm.platforms.cuda import CudaPlatformBase

    name = "get_device_communicator_cls"
    monkeypatch.setattr(CudaPlatformBase, name, vars(CudaPlatformBase)[name])
    return CudaPlatformBase


def _listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes what is logged under vLLM's name reach pytest."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def test_members_have_the_signatures_of_theirs() -> None:
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    from crossweft.engines._vllm_communicator import CrossweftCommunicator

    assert issubclass(CrossweftCommunicator, CudaCommunicator)
    assert set(plugin.CONTRACT) == {name for name, each in vars(CrossweftCommunicator).items() if callable(each)}
    for name in plugin.CONTRACT:
        theirs, ours = (
            [(each.name, each.kind, each.default) for each in inspect.signature(getattr(of, name)).parameters.values()]
            for of in (CudaCommunicator, CrossweftCommunicator)
        )
        assert ours == theirs, name
        assert hasattr(DeviceCommunicatorBase, name)


def test_the_platform_names_the_communicator(monkeypatch: pytest.MonkeyPatch, platform: Any) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    monkeypatch.setenv(plugin.SWITCH, "0")
    assert not plugin.register()
    assert platform.get_device_communicator_cls() == plugin.THEIRS
    monkeypatch.setenv(plugin.SWITCH, "1")
    # Plugins may be loaded more than once.
    for _ in range(2):
        assert plugin.register()
        for each in (platform, *platform.__subclasses__()):
            assert each.get_device_communicator_cls() == plugin.OURS
    assert resolve_obj_by_qualname(plugin.OURS).__name__ == "CrossweftCommunicator"


@pytest.mark.parametrize("case", ["version", "value", "named"])
def test_what_does_not_fit_is_refused_loudly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, platform: Any, case: str
) -> None:
    monkeypatch.setenv(plugin.SWITCH, "pp" if case == "value" else "1")
    named = plugin.THEIRS
    if case == "version":
        monkeypatch.setattr(metadata, "version", lambda name: "0.99.0")
    elif case == "named":
        named = "others.Communicator"
        platform.get_device_communicator_cls = classmethod(lambda cls: named)
    words = {
        "version": "vllm 0.99.0 was not tested",
        "value": "CROSSWEFT_VLLM is 'pp'",
        "named": "names others.Communicator",
    }
    _listen(monkeypatch)
    assert not plugin.register()
    assert platform.get_device_communicator_cls() == named
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "changes nothing in vLLM" in record.message and words[case] in record.message


@pytest.fixture
def deep_ep(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A ``deep_ep`` of somebody else's, which vLLM has not looked for yet."""
    from vllm.utils import import_utils

    theirs = ModuleType("deep_ep")
    monkeypatch.setitem(sys.modules, "deep_ep", theirs)
    monkeypatch.setitem(sys.modules, "deep_ep.part", theirs)
    clear = import_utils._has_module.cache_clear
    clear()
    yield theirs
    clear()


@pytest.mark.parametrize("case", ["not found", "no cache", "time limit", "another class"])
def test_deep_ep_is_there_again_if_the_plugin_refuses_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, platform: Any, deep_ep: ModuleType, case: str
) -> None:
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
    from vllm.utils import import_utils

    monkeypatch.setenv(plugin.SWITCH, "ep")
    _listen(monkeypatch)
    if case == "another class":
        assert plugin.register() and sys.modules["deep_ep"].__name__ == "crossweft.compat.deep_ep"
        monkeypatch.setattr(CudaCommunicator, "all_gather", lambda self, input_, axis=-1: None)
    elif case == "not found":
        monkeypatch.setattr(import_utils, "has_deep_ep", lambda: False)
    elif case == "time limit":
        monkeypatch.setenv("CROSSWEFT_TIMEOUT", "soon")
    else:
        monkeypatch.setattr(import_utils, "_has_module", lambda name: True)
    caplog.clear()
    if case != "another class":
        assert not plugin.register()
    assert platform.get_device_communicator_cls() == plugin.THEIRS
    assert sys.modules["deep_ep"] is deep_ep is sys.modules["deep_ep.part"]
    [record] = [each for each in caplog.records if each.levelno == logging.ERROR]
    words = {
        "not found": "does not find deep_ep",
        "no cache": "AttributeError: ",
        "time limit": "CROSSWEFT_TIMEOUT is 'soon'",
        "another class": "is not called as",
    }
    assert "changes nothing in vLLM" in record.message and words[case] in record.message


@pytest.mark.parametrize("value", ["1", "ep", "all"])
def test_the_real_loader_loads_it(value: str) -> None:
    script = f"""
import engine_stubs
engine_stubs.install()
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.platforms.cuda import CudaPlatform
assert CudaPlatform.get_device_communicator_cls() == "{plugin.OURS}"
from vllm.utils.import_utils import has_deep_ep
assert has_deep_ep() == {value != "1"}
if has_deep_ep():
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ll
    assert deepep_ll.deep_ep.__name__ == "crossweft.compat.deep_ep"
"""
    environment = {**os.environ, plugin.SWITCH: value, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr


def _communicator_uses_it() -> None:
    """Made and called as vLLM's groups do it."""
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

    from crossweft.engines._vllm_communicator import CrossweftCommunicator

    def make(name: str) -> CrossweftCommunicator:
        return CrossweftCommunicator(
            cpu_group=dist.group.WORLD,
            device=torch.device("cpu"),
            device_group=dist.group.WORLD,
            unique_name=name,
        )

    rank = dist.get_rank()
    ours = make("tp:0")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        # No powers of two; no multiple of 16 bytes.
        for shape in ((1, 5120), (8, 7168), (3,)):
            data = (torch.arange(torch.Size(shape).numel()) % 7 + rank).reshape(shape).to(dtype)
            before = data.clone()
            out = ours.all_reduce(data)
            assert torch.equal(data, before) and out.data_ptr() != data.data_ptr()
            assert torch.equal(out, 2 * before + (1 - 2 * rank))
    data = torch.arange(24.0).reshape(2, 3, 4) + 100 * rank
    blocks = [data + 100 * (each - rank) for each in range(2)]
    for dim in (0, 1, 2, -1):
        assert torch.equal(ours.all_gather(data, dim), torch.cat(blocks, dim)), dim
    data = torch.arange(64.0).reshape(4, 4, 4) * (rank + 1)
    for dim in (0, 1, 2, -1):
        theirs = DeviceCommunicatorBase.reduce_scatter(ours, data, dim)
        assert torch.equal(ours.reduce_scatter(data, dim), theirs), dim
    assert torch.equal(ours.reduce_scatter(data[0], 1), 3 * torch.arange(16.0).reshape(4, 4).chunk(2, 1)[rank])
    made: dict[str, int] = {}
    for count in ours.crossweft.report().calls:
        made[count.operation] = made.get(count.operation, 0) + count.calls
    assert made == {"all_reduce": 9, "all_gather": 4, "reduce_scatter": 5}
    # vLLM's own takes what is refused: gloo here.
    for refused in (torch.full((1 << 20,), rank + 1.0), torch.full((64, 64), rank + 1.0)[:, ::2]):
        assert torch.equal(ours.all_reduce(refused), torch.full(refused.shape, 3.0))
    assert len(ours.crossweft.report().refused) == 2
    ours.destroy()
    assert ours.crossweft is None
    # Groups that it is not for.
    assert make("ep:0").crossweft is None
    parallel_state._ENABLE_CUSTOM_ALL_REDUCE = False
    assert make("tp:1").crossweft is None
    parallel_state._ENABLE_CUSTOM_ALL_REDUCE = True
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    assert make("tp:2").crossweft is None


def _experts_use_it() -> None:
    """A layer of experts between vLLM's own two halves, over the manager of a group that is made as vLLM's are."""
    from types import SimpleNamespace

    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import all2all
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

    from crossweft.engines import _vllm_all2all
    from crossweft.engines._vllm_communicator import CrossweftCommunicator

    assert plugin.register()
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    parallel_state._DP = parallel_state._TP = alone  # type: ignore[assignment]
    # Memory is pinned for devices.
    modular_kernel.PIN_MEMORY = False
    parallel = SimpleNamespace(enable_fault_tolerance=False, enable_expert_parallel=True)
    all2all.get_current_vllm_config = lambda: SimpleNamespace(parallel_config=parallel)

    def make(backend: str) -> Any:
        # What the configuration says.
        own = DeviceCommunicatorBase.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            own(self, *args, **kwargs)
            self.use_all2all, self.all2all_backend = True, backend

        DeviceCommunicatorBase.__init__ = init
        try:
            made = CrossweftCommunicator(
                cpu_group=dist.group.WORLD,
                device=torch.device("cpu"),
                device_group=dist.group.WORLD,
                unique_name="ep:0",
            )
        finally:
            DeviceCommunicatorBase.__init__ = own
        return made

    hidden, experts, tokens, top_k = 2048, 4, 5, 2
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 8, (tokens, hidden), generator=generator).bfloat16()
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k, -1)[1]
    # Powers of two, so that nothing is rounded.
    weights = torch.tensor([[0.5, 0.25]] * tokens)
    # Expert e multiplies by e + 1.
    expected = (x.float() * (weights * (ids + 1)).sum(1, keepdim=True)).bfloat16()
    own = experts // ranks

    ours = make("deepep_high_throughput")
    manager = ours.all2all_manager
    assert type(manager) is _vllm_all2all.HighThroughputManager and manager.max_sms_used() is None
    buffer = manager.get_handle({})
    assert manager.get_handle({}) is buffer and type(buffer).__module__.startswith("crossweft.")
    # CROSSWEFT_TIMEOUT.
    assert buffer.timeout == 120
    many = DeepEPHTPrepareAndFinalize(buffer, num_dispatchers=ranks, dp_size=ranks, rank_expert_offset=rank * own)
    for _ in range(2):
        got, scales, meta, idx, of_rows = many.prepare(
            x, weights, ids, experts, None, False, FUSED_MOE_UNQUANTIZED_CONFIG, defer_input_quant=True
        )
        assert scales is None and idx is not None and of_rows is not None
        # What is another rank's was moved there, with a weight of 0.
        made = (got.float() * (of_rows * (idx + 1)).sum(1, keepdim=True)).bfloat16()
        out = torch.empty_like(x)
        # What the experts have weighted and summed.
        plain = SimpleNamespace(apply=lambda fused_expert_output, **_: fused_expert_output)
        many.finalize(out, made, weights, ids, False, plain)
        assert torch.equal(out, expected)
        assert meta.expert_num_tokens.tolist() == [int((idx == e).sum()) for e in range(rank * own, (rank + 1) * own)]
    ours.destroy()

    ours = make("deepep_low_latency")
    manager = ours.all2all_manager
    assert type(manager) is _vllm_all2all.LowLatencyManager
    buffer = manager.get_handle(
        {
            "max_num_tokens_per_dp_rank": 8,
            "token_hidden_size": hidden,
            "num_ep_ranks": ranks,
            "num_global_experts": experts,
            "num_local_experts": own,
        }
    )
    few = DeepEPLLPrepareAndFinalize(buffer, max_tokens_per_rank=8, num_dispatchers=ranks)
    for _ in range(2):
        got, _, meta, _, _ = few.prepare(x, weights, ids, experts, None, False, FUSED_MOE_UNQUANTIZED_CONFIG)
        of_experts = torch.arange(rank * own, (rank + 1) * own) + 1
        made = (got.float() * of_experts.view(-1, 1, 1)).bfloat16()
        out = torch.empty_like(x)
        few.finalize(out, made, weights, ids, False, TopKWeightAndReduceDelegate())
        assert torch.equal(out, expected)
    with pytest.raises(Exception, match="enable_shrink"):
        manager.clean_buffers()
    ours.destroy()
    os.environ["VLLM_DEEPEPLL_NVFP4_DISPATCH"] = "1"
    with pytest.raises(UnsupportedEngine, match="not fp4, which VLLM_DEEPEPLL_NVFP4_DISPATCH asks for"):
        make("deepep_low_latency")
    del os.environ["VLLM_DEEPEPLL_NVFP4_DISPATCH"]
    # vLLM's own stays where crossweft has none.
    assert type(make("allgather_reducescatter").all2all_manager) is all2all.AgRsAll2AllManager


def test_its_layers_of_experts_use_it(tmp_path: Path) -> None:
    environment = {"VLLM_DISABLE_PYNCCL": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    in_processes(2, _experts_use_it, tmp_path, CROSSWEFT_VLLM="ep", **environment)


def test_a_communicator_of_vllm_uses_it(tmp_path: Path) -> None:
    # NCCL needs devices.
    environment = {"VLLM_DISABLE_PYNCCL": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    in_processes(2, _communicator_uses_it, tmp_path, CROSSWEFT_MAX_BYTES=str(2 << 20), **environment)
