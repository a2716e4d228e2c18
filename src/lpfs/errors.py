"""The exceptions that lpfs raises; all are subclasses of LpfsError."""


class LpfsError(Exception):
    """Base class of all exceptions that lpfs raises."""


class InputError(LpfsError, ValueError):
    """An argument is invalid; nothing was changed."""


class FieldError(InputError):
    """A field is unknown, a duplicate, or matches nothing in the model."""


class DataError(InputError):
    """A log or a prepared Dataset cannot be used."""


class StateError(LpfsError, RuntimeError):
    """A valid call in the wrong state; nothing was changed."""


class LockedError(StateError):
    """Another process is writing to the same directory; nothing was changed."""


class ExactnessError(LpfsError, RuntimeError):
    """The predictions would change; nothing was changed."""


class SharedTableError(ExactnessError):
    """Fields with different gates share one weight, so the gates cannot be absorbed into it."""


class LeakError(ExactnessError):
    """A dropped field reaches the prediction around its gate."""


class AbsenceError(ExactnessError):
    """A zero input is not the same as an absent one for a layer, so its columns cannot be removed."""


class SearchError(LpfsError, RuntimeError):
    """A search cannot continue."""


class AllGatesZeroError(SearchError):
    """Every gate is zero, so no field is left."""


class NonFiniteError(SearchError):
    """A loss or a gradient is NaN or infinite; no parameter was changed."""


class CheckpointError(LpfsError, RuntimeError):
    """A checkpoint cannot be written or read; older checkpoints are intact."""


class RankError(LpfsError, RuntimeError):
    """Another rank has exited or does not respond; the last checkpoint is intact."""


class DeviceMemoryError(LpfsError, RuntimeError):
    """The GPU is out of memory; the message suggests a batch size."""


class MissingPackageError(LpfsError, ImportError):
    """An optional package is missing; the message says what to install."""
