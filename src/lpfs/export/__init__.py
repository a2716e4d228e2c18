"""Export a trained model to one file that serves without lpfs: ONNX with preprocessing, or ``torch.export``.

``lpfs.export(model, path)`` writes the file to a temporary directory, checks its predictions against the model's,
and moves it to its place only if they agree.
"""

from lpfs._imports import callable_package
from lpfs.export.export import Exported, export, export_run

__all__ = ["Exported", "export", "export_run"]

callable_package(__name__, "lpfs.export.export:export")
