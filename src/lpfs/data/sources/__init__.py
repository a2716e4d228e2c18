"""The raw log: files or a table, read in chunks of rows, each row with its day."""
