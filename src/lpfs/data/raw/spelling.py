"""How values are spelled in logs."""

DATE = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}.*)?$"
NUMBER_MARKS = {"", "na", "n/a", "nan", "null", "none", "\\n", "-"}  # instead of a number, in lower case
