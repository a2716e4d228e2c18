"""From a trained model to a file that serves without lpfs.

::

    verb.py           export and export_run: write aside, check, then put in place
    names.py          names of inputs from names of fields
    fields.py         the fields of a model as columns, with what its Dataset knows
    columns.py        a column: raw value -> id (number_columns.py for numbers); marks.py: what stands for missing
    graph.py          nodes and weights of an ONNX graph, as they are added
    inputs.py         ids and numbers -> embeddings, in ONNX
    dense.py          embeddings -> logits, in ONNX, a function a model
    onnx_file.py      all of it as one ONNX file with its metadata
    torch_file.py     ids in, logits out, by torch.export
    raw.py            rows of a Dataset as the raw values they came from
    parity.py         what is written predicts what the model predicts, or is not kept

"""

import sys
from types import ModuleType
from typing import Any

from lpfs.export.export import Exported, export, export_run

__all__ = ["Exported", "export", "export_run"]


class _Verb(ModuleType):
    """The package, which may be called: ``lpfs.export(…)`` is ``lpfs.export.export.export(…)``."""

    def __call__(self, *args: Any, **given: Any) -> Exported:
        return export(*args, **given)


sys.modules[__name__].__class__ = _Verb
