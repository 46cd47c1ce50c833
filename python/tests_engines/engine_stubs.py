"""Stand-ins for what the engines import and tests have no use for.

The engines are installed without what they depend on. What they import at the top of a file and is not there becomes a
module of placeholders: anything can be got from it, called, subclassed or used as a decorator. Modules by which an
engine finds out what it runs on stay missing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

ENGINES = ("sglang", "vllm")
#: Parts of the engines: kernels that are not built, and patches of libraries that are not there.
INTERNAL = (
    "vllm._C",
    "vllm._C_stable_libtorch",
    "sglang.srt.configs.deepseek_ocr",
    "sglang.srt.function_call.response_template_structural_tag",
    "sglang.srt.utils.hf_transformers_patches",
)
#: Were they there, an engine would believe itself on other hardware, or use them for communication.
ABSENT = (
    "aiter",
    "amdsmi",
    "deep_ep",
    "flashinfer",
    "habana_frameworks",
    "intel_extension_for_pytorch",
    "libtpu",
    "mooncake",
    "mori",
    "mscclpp",
    "pynvml",
    "sgl_kernel",
    "torch_npu",
    "torch_xla",
    "triton_kernels",
    "tpu_inference",
)


def install() -> None:
    """Makes imports of the engines find stand-ins from now on."""
    sys.meta_path.insert(0, _Internal())
    sys.meta_path.append(_Missing())


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder

    def __setitem__(cls, key: Any, value: Any) -> None:
        """A registry takes anything, and forgets it."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        is_decorator = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if is_decorator else super().__call__()


class Placeholder(metaclass=_Kind):
    """What stands for every name of a module that is not there."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Whatever the class that it stands for takes."""

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Placeholder(*args, **kwargs)


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


class _Internal(_Finder):
    """Comes first."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name in INTERNAL else None


class _Missing(_Finder):
    """Comes last, so it is asked for what nobody else has."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if top in (*ENGINES, *ABSENT):
            return None
        is_part = isinstance(sys.modules.get(name.rpartition(".")[0]), _Module)
        if not is_part and _importer().partition(".")[0] not in ENGINES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)


def _importer() -> str:
    """The module whose import statement runs."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and not name.startswith(("importlib", "_frozen_importlib")):
            return str(name)
        frame = frame.f_back  # type: ignore[assignment]
    return ""
