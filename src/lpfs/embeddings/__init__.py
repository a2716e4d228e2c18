"""The rows of many fields in one table: lookup, gradient by rows, row updates, on CPU and GPU."""
