from tests.helpers.commands import run  # noqa: F401 (a fixture)
