"""The modules of lpfs.data import each other in one direction only."""

import ast
from pathlib import Path

import lpfs.data

ROOT = Path(lpfs.data.__file__).parent
LAYERS = [  # a module imports only from layers before its own, or from its own folder
    {"bins", "fields", "remote", "parsing", "progress"},
    {"store", "infer", "sources"},
    {"batch", "hashing", "planning", "simulate_spec"},
    {"reader", "days", "encoders", "simulate_world"},
    {"stream", "passes"},
    {"dataset", "fit_encoders"},
    {"integers"},
    {"engines", "reencode", "simulate", "simulate_stream"},
    {"diagnose", "raw_rows"},
    {"prepare"},
]


def runtime_imports(path):
    """Return the modules of lpfs.data that a file imports, without those for type checking only."""
    tree = ast.parse(path.read_text("utf-8"))
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [node.module for node in nodes if str(node.module).startswith("lpfs.data.")]


def test_modules_import_only_from_earlier_layers():
    layer = {name: index for index, names in enumerate(LAYERS) for name in names}
    paths = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]
    for path in paths:
        name = path.relative_to(ROOT).parts[0].removesuffix(".py")
        assert name in layer, f"{name} has no layer"
        for module in runtime_imports(path):
            imported = module.split(".")[2]
            assert imported == name or layer[imported] < layer[name], f"{name} imports {module}"


def test_every_folder_has_a_docstring():
    for path in ROOT.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), path
