"""Benchmarks against what engines use otherwise.

* ``python -m crossweft.bench.all_reduce``: all-reduce of crossweft, torch and NCCL, alone and before RMS normalisation.
"""
