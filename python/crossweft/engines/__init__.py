"""crossweft inside inference engines: what their plugin loaders call.

* :mod:`crossweft.engines.sglang` for SGLang, switched on by ``CROSSWEFT_SGLANG``;
* :mod:`crossweft.engines.vllm` for vLLM, switched on by ``CROSSWEFT_VLLM``.

Both engines find them by the package's entry points. docs/engines.md says how to use them.
"""
