"""Everything this package raises on purpose. All derive from :class:`GradcompError`."""

from __future__ import annotations


class GradcompError(Exception):
    """Base of all errors of hvd_gradcomp."""

    ag_pass_through = True  # else TensorFlow's AutoGraph turns it into a StagingError


class SpecError(GradcompError, ValueError):
    """A spec string, codec argument or option that cannot be meant: says what exists."""


class PayloadError(GradcompError, ValueError):
    """Received bytes that no encoder of this configuration can have produced."""


class DisagreementError(GradcompError, RuntimeError):
    """Ranks were configured differently: names the rank and the difference."""


class ProcessSetError(GradcompError, RuntimeError):
    """Horovod and the Compression reduce over different process sets."""


class UsageError(GradcompError, RuntimeError):
    """Calls that came in an order, or for tensors, that cannot be right."""


class StateError(GradcompError, ValueError):
    """A state_dict that does not fit; nothing was changed."""


class KernelError(GradcompError, ImportError):
    """The native kernels were required and cannot be loaded: says why."""


class MissingDependencyError(GradcompError, ImportError):
    """A framework or Horovod is not installed: says how to install it."""
