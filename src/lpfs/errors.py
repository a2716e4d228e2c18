"""Every error lpfs raises on purpose, in one tree.

::

    LpfsError
    ├── InputError (ValueError)        an argument is wrong; nothing was changed
    │   ├── FieldError                 a field is unknown, named twice, or matches nothing
    │   └── DataError                  a log or a prepared Dataset cannot be used as it is
    ├── StateError (RuntimeError)      the right call at the wrong time; nothing was changed
    ├── ExactnessError (RuntimeError)  the result would not predict the same; nothing was changed
    │   ├── SharedTableError           one weight serves fields with different gates
    │   ├── LeakError                  a dropped field still reaches the prediction past its gate
    │   └── AbsenceError               zero does not mean absence (normalisation, attention)
    ├── SearchError (RuntimeError)     a search cannot go on
    │   ├── AllGatesZeroError          nothing is left to select
    │   └── NonFiniteError             a loss or a gradient is not a number
    ├── CheckpointError (RuntimeError)  a checkpoint cannot be written or read; the older ones are intact
    ├── RankError (RuntimeError)       a process that trains beside this one is gone or hangs; says which
    ├── DeviceMemoryError (RuntimeError)   the GPU has no memory left; says which batch size to try
    └── MissingPackageError (ImportError)   an optional package is needed; says what to install
"""


class LpfsError(Exception):
    """Root of all errors that lpfs raises on purpose."""


class InputError(LpfsError, ValueError):
    """An argument is wrong; nothing was changed."""


class FieldError(InputError):
    """A field is unknown, named twice, or matches nothing in the model."""


class DataError(InputError):
    """A log or a prepared Dataset cannot be used as it is."""


class StateError(LpfsError, RuntimeError):
    """The right call at the wrong time; nothing was changed."""


class ExactnessError(LpfsError, RuntimeError):
    """The result would not predict the same; nothing was changed."""


class SharedTableError(ExactnessError):
    """One weight serves fields with different gates, so it cannot take them in."""


class LeakError(ExactnessError):
    """A dropped field still reaches the prediction past its gate."""


class AbsenceError(ExactnessError):
    """Zero does not mean absence for the layer that reads the field, so its columns cannot go."""


class SearchError(LpfsError, RuntimeError):
    """A search cannot go on."""


class AllGatesZeroError(SearchError):
    """Every gate is at zero: nothing is left to select."""


class NonFiniteError(SearchError):
    """A loss or a gradient is not a number; nothing was moved."""


class CheckpointError(LpfsError, RuntimeError):
    """A checkpoint cannot be written or read; the older ones are intact."""


class RankError(LpfsError, RuntimeError):
    """A process that trains beside this one is gone or hangs; the last checkpoint is intact."""


class DeviceMemoryError(LpfsError, RuntimeError):
    """The GPU has no memory left; the message says which batch size to try."""


class MissingPackageError(LpfsError, ImportError):
    """An optional package is needed; the message says what to install."""
