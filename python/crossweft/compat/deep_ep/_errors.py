"""What this package raises beside :mod:`crossweft.errors`."""

from ...errors import Error


class Unsupported(Error, NotImplementedError):
    """Something of DeepEP's that has no meaning here; the message says why."""
